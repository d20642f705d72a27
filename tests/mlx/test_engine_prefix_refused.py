"""What is no prefix of this model, or of this row, is refused with a reason, and harms nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import KVCache

from runtime.engine.engine import RowError
from runtime.engine.prefix_parts import PrefixArray, PrefixPart
from tests.support.crowd import add, load_engine, make_guests, run_alone
from tests.support.prefixes import (
    NUM_TOKENS,
    PENALISED,
    A,
    B,
    computed,
    engine_of,
    feed,
    finish,
    guest,
    prompt_of,
)
from tests.support.tiny import MakeTiny


def _bad_chains(parts: list[PrefixPart]) -> dict[str, tuple[list[PrefixPart], str]]:
    first, second = parts
    array = first.arrays[0]

    def with_array(**changes: Any) -> list[PrefixPart]:
        return [replace(first, arrays=(replace(array, **changes), *first.arrays[1:])), second]

    return {
        "nothing": ([], "0 positions cannot be restored"),
        "a gap": ([second], "does not join"),
        "wrong order": ([second, first], "does not join"),
        "twice": ([first, first], "does not join"),
        "all of the context": ([replace(first, end=40)], "at least one goes in, one is left out"),
        "no positions": ([replace(first, end=0), replace(second, start=0)], "has no positions"),
        "dtype": (with_array(dtype="F16"), "F16"),
        "shape": (with_array(shape=(2, 15, 16)), r"\[2, 15, 16\]"),
        "too few bytes": (with_array(data=bytes(array.buffer())[:-1]), "bytes instead of"),
        "a foreign layer": (with_array(layer=99), "no such array"),
        "an array twice": (with_array(layer=first.arrays[1].layer, name=first.arrays[1].name), "twice"),
        "an array missing": ([replace(first, arrays=first.arrays[1:]), second], "lacks"),
    }


@pytest.mark.parametrize("what", list(_bad_chains([PrefixPart(0, 16, (PrefixArray(0, "", "", (), b""),) * 2)] * 2)))
def test_what_does_not_fit_is_refused_and_the_row_stays_usable(tiny: MakeTiny, what: str) -> None:
    engine = load_engine(tiny("llama")).engine
    one, other = guest(A, 40, PENALISED), guest(B, 20)
    alone = {guest.sequence: run_alone(engine, guest) for guest in (one, other)}
    parts = computed(engine, one, [16, 32])
    engine.release([A])
    add(engine, other)
    said = feed(engine, B, other.prompt, 1)
    add(engine, one)
    chain, message = _bad_chains(parts)[what]
    with pytest.raises(RowError, match=message) as caught:
        engine.restore(A, chain)
    assert caught.value.code == "invalid_request"
    assert engine.length(A) == 0
    assert [token for token, _ in finish(engine, one)] == alone[A]
    while len(said) < NUM_TOKENS:
        said += feed(engine, B, None, 1)
    assert [token for token, _ in said] == alone[B]


def test_a_chain_needs_the_checkpoints_of_its_last_part_only(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("lfm2")).engine
    layout = engine.layout()
    assert layout is not None
    assert layout.has_checkpoints
    one = guest(A, 40)
    parts = computed(engine, one, [16, 32])
    cold = finish(engine, one)
    bare = [replace(part, arrays=tuple(array for array in part.arrays if not array.name.startswith("state"))) for part in parts]
    add(engine, one)
    with pytest.raises(RowError, match="lacks the checkpoint state0 of layer 0 at 32"):
        engine.restore(A, [parts[0], bare[1]])
    engine.restore(A, [bare[0], parts[1]])
    assert finish(engine, one) == cold


def test_a_checkpoint_that_is_gone_is_named(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("lfm2")).engine
    one = guest(A, 40)
    add(engine, one)
    feed(engine, A, one.prompt[:20])
    feed(engine, A, one.prompt[20:30])
    export = engine.export(A, 0, 16)
    assert [layer for layer, _ in export.missing] == [0, 2]
    assert "stands at 30" in export.missing[0][1]
    assert {array.layer for array in export.part.arrays} == {1}
    sliding = load_engine(tiny("gemma3_text")).engine
    (*_, last) = make_guests(1, 1, [400])
    add(sliding, last)
    for start in range(0, 400, 40):
        feed(sliding, last.sequence, last.prompt[start : start + 40])
    assert sliding.export(last.sequence, 0, 400).missing == ()
    assert {layer for layer, _ in sliding.export(last.sequence, 0, 24).missing} == {0, 2}


def test_positions_not_there_and_rows_begun_or_unknown_are_refused(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama")).engine
    one = guest(A, 40)
    add(engine, one)
    with pytest.raises(RowError, match="computed nothing yet"):
        engine.export(A, 0, 8)
    feed(engine, A, one.prompt[:20])
    for start, end in ((0, 21), (8, 8), (-1, 8), (9, 8)):
        with pytest.raises(RowError, match="20 tokens are computed"):
            engine.export(A, start, end)
    part = engine.export(A, 0, 16).part
    with pytest.raises(RowError, match="has begun already") as caught:
        engine.restore(A, [part])
    assert caught.value.code == "conflict"
    for call in (lambda: engine.export(B, 0, 8), lambda: engine.restore(B, [part])):
        with pytest.raises(RowError, match="not in this engine"):
            call()


def test_a_part_of_another_model_is_no_part_of_this_one(tiny: MakeTiny) -> None:
    part = computed(load_engine(tiny("llama")).engine, guest(A, 20), [16])[0]
    other = load_engine(tiny("llama", head_dim=32)).engine
    add(other, guest(A, 20))
    for call in (lambda: other.adopt(part), lambda: other.restore(A, [part])):
        with pytest.raises(RowError, match=r"F32 \[2, 16, 16\], but this model has F32 \[2, 16, 32\]"):
            call()


class ForeignCache(KVCache):  # type: ignore[misc]
    """Works like its parent, but nobody knows that."""


def test_a_model_with_caches_of_its_own_refuses_with_a_reason(tiny: MakeTiny) -> None:
    part = computed(load_engine(tiny("llama")).engine, guest(A, 20), [16])[0]
    model, _ = mlx_lm.load(str(tiny("llama")))
    model.make_cache = lambda: [ForeignCache() for _ in model.layers]
    engine = engine_of(model)
    assert engine.layout() is None
    add(engine, guest(A, 20))
    for call in (lambda: engine.restore(A, [part]), lambda: engine.adopt(part)):
        with pytest.raises(RowError, match=r"capabilities\.prefix is false"):
            call()
    feed(engine, A, prompt_of(20))
    with pytest.raises(RowError, match=r"capabilities\.prefix is false"):
        engine.export(A, 0, 16)
