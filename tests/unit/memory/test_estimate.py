"""What a model will need is read off its files, and what several need together is added up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.config import ModelSpec
from runtime.memory.estimate import CACHE_SLACK, LEAST_TOKENS, PROCESS_BYTES, max_tokens, of_files
from runtime.memory.ledger import Need
from runtime.memory.plan import plan
from runtime.protocol.commands import FakeScript

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
PER_TOKEN = 2 * 3 * 2 * 8 * 2


def a_checkpoint(directory: Path, config: Any = CONFIG, sizes: tuple[int, ...] = (1000, 500)) -> ModelSpec:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for number, size in enumerate(sizes):
        (directory / f"model-{number}.safetensors").write_bytes(bytes(size))
    return ModelSpec("m", str(directory), max_slots=4)


def test_weights_are_the_files_and_the_cache_is_of_the_layers(tmp_path: Path) -> None:
    need = of_files(a_checkpoint(tmp_path), tmp_path, 512)
    assert (need.weights_bytes, need.load_bytes, need.process_bytes) == (1500, 1000, PROCESS_BYTES)
    assert need.bytes_per_token == PER_TOKEN
    assert need.kv_least_bytes == int(PER_TOKEN * CACHE_SLACK) * LEAST_TOKENS
    assert need.kv_most_bytes == int(PER_TOKEN * CACHE_SLACK) * 2048 * 4
    assert need.prefill_bytes > 512 * 128 * 4


def test_a_vision_models_text_part_counts_and_the_specs_context_is_the_lower_bound(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, {"model_type": "x", "text_config": CONFIG})
    need = of_files(ModelSpec("m", str(tmp_path), max_slots=1, max_context_tokens=100), tmp_path, 512)
    assert need.kv_most_bytes == need.kv_least_bytes == int(PER_TOKEN * CACHE_SLACK) * 100


@pytest.mark.parametrize("config", ["", "[]", "{", '{"hidden_size": "x", "num_attention_heads": true}', "[" * 100_000])
def test_a_config_that_says_nothing_costs_only_the_estimate(tmp_path: Path, config: str) -> None:
    need = of_files(a_checkpoint(tmp_path, config), tmp_path, 512)
    assert (need.weights_bytes, need.bytes_per_token, need.kv_least_bytes) == (1500, 0, 0)


def test_of_a_model_that_is_not_here_yet_only_its_process_is_known() -> None:
    assert of_files(ModelSpec("m", "owner/name"), None, 512).peak_bytes == PROCESS_BYTES


def test_the_fake_engine_says_itself_what_its_weights_would_take() -> None:
    spec = ModelSpec("m", kind="fake", fake=FakeScript(weight_bytes=12345))
    assert of_files(spec, None, 512).weights_bytes == 12345


def test_tokens_are_counted_only_where_they_could_be_too_many() -> None:
    need = Need(kv_least_bytes=100, kv_most_bytes=10_000, bytes_per_token=2)
    assert max_tokens(need, 10_000) is None
    assert max_tokens(need, 9_999) == 3333
    assert max_tokens(need, 0) == 1
    assert max_tokens(Need(), 0) is None


def test_a_plan_adds_all_up_with_the_largest_load_on_top() -> None:
    big, small = Need(weights_bytes=60, load_bytes=20), Need(weights_bytes=10, load_bytes=5)
    found = plan([("big", 1, big, True), ("small", 2, small, True)], 110, 10)
    assert (found.fits, found.needed_bytes, found.advice) == (True, 10 + 60 + 20 + 20, "")
    found = plan([("big", 1, big, True), ("small", 2, small, True)], 109, 10)
    assert not found.fits
    assert "'small'" in found.advice
    assert "several" in plan([("a", 1, big, True), ("b", 1, big, True)], 50, 10).advice
