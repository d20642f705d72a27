"""A crowd of ragged rows says, row for row, what each says alone: the engine's reason to be."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

from runtime.engine.blas import is_exact_over_batch_shapes
from tests.support.crowd import load_engine, make_guests, run_alone, run_crowd
from tests.support.tiny import MakeTiny

FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "mamba2", "mamba"]
LENGTHS = [1, 2, 3, 9, 17, 40, 70]


@pytest.fixture(autouse=True, scope="module")
def exact_arithmetic() -> None:
    assert is_exact_over_batch_shapes(), "these tests want bit for bit equality: run them on MLX's own reference BLAS"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_in_a_crowd_says_what_it_says_alone(tiny: MakeTiny, family: str) -> None:
    loaded = load_engine(tiny(family))
    guests = make_guests(11, 32, LENGTHS)
    evening = run_crowd(loaded.engine, guests, 5, longest_chunk=30)
    assert evening.most_at_once >= 16
    assert loaded.engine.cache_bytes() == 0
    alone = {guest.sequence: run_alone(loaded.engine, guest) for guest in guests}
    assert evening.said == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rows_of_a_crowd_equal_mlx_lm_one_at_a_time(tiny: MakeTiny, family: str) -> None:
    loaded = load_engine(tiny(family))
    guests = make_guests(3, 12, LENGTHS, greedy=True, num_tokens=40)
    evening = run_crowd(loaded.engine, guests, 8, longest_chunk=50)
    model, _ = mlx_lm.load(str(tiny(family)))
    for guest in guests:
        steps = generate_step(mx.array(guest.prompt), model, max_tokens=guest.num_tokens)
        assert evening.said[guest.sequence] == [int(token) for token, _ in steps]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_exact_too(tiny: MakeTiny, dtype: str) -> None:
    loaded = load_engine(tiny("llama"))
    loaded.engine._model.set_dtype(getattr(mx, dtype))
    guests = make_guests(4, 12, LENGTHS)
    evening = run_crowd(loaded.engine, guests, 2, longest_chunk=30)
    assert evening.said == {guest.sequence: run_alone(loaded.engine, guest) for guest in guests}


def test_rows_far_past_a_window_forget_as_the_model_wants(tiny: MakeTiny) -> None:
    """Long enough that dead slots are compacted away several times, at different moments for different rows."""
    loaded = load_engine(tiny("gemma3_text"))
    guests = [replace(guest, num_tokens=100) for guest in make_guests(6, 5, [3, 200, 230, 420], greedy=True)]
    evening = run_crowd(loaded.engine, guests, 1, longest_chunk=150, pausing=0.02)
    model, _ = mlx_lm.load(str(tiny("gemma3_text")))
    for guest in guests:
        steps = generate_step(mx.array(guest.prompt), model, max_tokens=guest.num_tokens)
        assert evening.said[guest.sequence] == [int(token) for token, _ in steps]
