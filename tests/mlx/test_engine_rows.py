"""One row's fault is that row's alone: errors, NaN, and what a leaving row leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from runtime.engine.engine import Engine, Loaded, RowError, RowResult, RowStep
from runtime.engine.rows import Row
from runtime.protocol.commands import Sampling
from runtime.protocol.ids import SequenceId
from tests.support.crowd import Guest, add, load_engine, make_guests, run_alone
from tests.support.tiny import VOCABULARY_SIZE, MakeTiny

A, B, C, NOBODY = SequenceId(1), SequenceId(2), SequenceId(3), SequenceId(99)


@pytest.fixture
def loaded(tiny: MakeTiny) -> Loaded:
    return load_engine(tiny("llama"))


@pytest.fixture
def engine(loaded: Loaded) -> Engine:
    return loaded.engine


def guest(sequence: SequenceId, length: int, num_tokens: int = 8) -> Guest:
    return Guest(sequence, [(7 * sequence + 3 * index) % 256 for index in range(length)], Sampling(), num_tokens)


def prefill(engine: Engine, *guests: Guest) -> dict[SequenceId, list[int]]:
    for one in guests:
        add(engine, one)
    return said(engine, [RowStep(one.sequence, one.prompt, 1) for one in guests])


def said(engine: Engine, steps: list[RowStep]) -> dict[SequenceId, list[int]]:
    results = engine.step(steps).result()
    assert [result.error for result in results] == [None] * len(steps)
    return {result.sequence: list(result.tokens) for result in results}


def decode(engine: Engine, *sequences: SequenceId) -> list[RowResult]:
    return engine.step([RowStep(sequence, None, 1) for sequence in sequences]).result()


def code_of(result: RowResult) -> str | None:
    return None if result.error is None else result.error.code


# -- what is refused before MLX sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, VOCABULARY_SIZE, 1 << 31])
def test_an_id_outside_the_vocabulary_is_refused_when_a_row_is_added(engine: Engine, token: int) -> None:
    with pytest.raises(RowError, match=str(token)) as caught:
        engine.add(A, Sampling(), prompt_length=3, context=[1, token, 2], max_length=9)
    assert caught.value.code == "invalid_request"


def test_a_context_that_leaves_nothing_to_generate_is_refused(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama"), max_context_tokens=16).engine
    engine.add(A, Sampling(), prompt_length=15, context=[1] * 15, max_length=16)
    with pytest.raises(RowError) as caught:
        engine.add(B, Sampling(), prompt_length=16, context=[1] * 16, max_length=20)
    assert caught.value.code == "context_length_exceeded"


def test_an_empty_context_and_a_sequence_already_there_are_refused(engine: Engine) -> None:
    with pytest.raises(RowError, match="empty"):
        engine.add(A, Sampling(), prompt_length=0, context=[], max_length=9)
    engine.add(A, Sampling(), prompt_length=1, context=[1], max_length=9)
    with pytest.raises(RowError) as caught:
        engine.add(A, Sampling(), prompt_length=1, context=[1], max_length=9)
    assert caught.value.code == "conflict"


def test_a_filter_outside_its_range_is_refused(engine: Engine) -> None:
    with pytest.raises(RowError, match="top_p"):
        engine.add(A, Sampling(top_p=1.5), prompt_length=1, context=[1], max_length=9)
    with pytest.raises(RowError, match="logit_bias"):
        engine.add(A, Sampling(logit_bias=((5, float("inf")),)), prompt_length=1, context=[1], max_length=9)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (RowStep(NOBODY, None, 1), "not in this engine"),
        (RowStep(B, [5, VOCABULARY_SIZE], 1), str(VOCABULARY_SIZE)),
        (RowStep(B, [-7], 1), "-7"),
        (RowStep(B, [], 0), "no token"),
        (RowStep(B, None, 1), "has drawn no token"),
    ],
)
def test_a_step_ends_the_row_at_fault_and_serves_the_others(engine: Engine, step: RowStep, what: str) -> None:
    one = guest(A, 9)
    alone = run_alone(engine, replace(one, num_tokens=2))
    first = prefill(engine, one)[A]
    add(engine, guest(B, 4))
    good, bad = engine.step([RowStep(A, None, 1), step]).result()
    assert first + list(good.tokens) == alone
    assert what in str(bad.error)
    assert code_of(bad) == "invalid_request"
    assert code_of(decode(engine, step.sequence)[0]) == "invalid_request"  # it is gone


def test_a_sequence_named_twice_in_a_step_runs_once(engine: Engine) -> None:
    one = guest(A, 9)
    alone = run_alone(engine, replace(one, num_tokens=3))
    first = prefill(engine, one)[A]
    once, twice = decode(engine, A, A)
    assert first + list(once.tokens) + said(engine, [RowStep(A, None, 1)])[A] == alone
    assert code_of(twice) == "invalid_request"


# -- what turns up in the middle -----------------------------------------------------------------------------------


def row_of(engine: Any, sequence: SequenceId) -> Row:
    row = engine._rows[sequence]
    assert isinstance(row, Row)
    return row


def poison(engine: Engine, sequence: SequenceId) -> None:
    """NaN into everything that one row has cached."""
    row = row_of(engine, sequence)
    batch: Any = row.batch
    place = batch.rows.index(row)
    for layer in batch._attention:
        layer.keys[place] = mx.array(float("nan"))
        layer.values[place] = mx.array(float("nan"))
    for state in batch._recurrent:
        for index, array in enumerate(state.cache):
            if array is not None:
                array[place] = mx.array(float("nan"))
                state.cache[index] = array


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "mamba2"])
def test_a_row_that_turns_into_nan_ends_alone_and_leaves_nothing_to_its_successors(tiny: MakeTiny, family: str) -> None:
    engine = load_engine(tiny(family)).engine
    guests = [guest(A, 9), guest(B, 30), guest(C, 17)]
    alone = {one.sequence: run_alone(engine, one) for one in guests}
    spoken = prefill(engine, *guests)
    poison(engine, B)
    pending = engine.step([RowStep(one.sequence, None, 1) for one in guests])
    ahead = engine.step([RowStep(one.sequence, None, 1) for one in guests])  # already on its way when the NaN shows
    for step in (pending, ahead):
        for result in step.result():
            if result.sequence == B:
                assert code_of(result) == "generation_failed"
                assert result.tokens == ()
            else:
                spoken[result.sequence] += result.tokens
    newcomers = [replace(one, sequence=SequenceId(one.sequence + 10)) for one in (guests[1], guests[2])]
    late = {one.sequence: run_alone(engine, one) for one in newcomers}  # where the NaN row was, while A and C are there
    for _ in range(5):
        for result in decode(engine, A, C):
            spoken[result.sequence] += result.tokens
    assert spoken[A] == alone[A]
    assert spoken[C] == alone[C]
    assert late == {SequenceId(B + 10): alone[B], SequenceId(C + 10): alone[C]}


def test_a_new_row_in_a_place_full_of_nan_sees_nothing_of_it(engine: Engine) -> None:
    """The place is used again within the same rectangle: masked slots with NaN would still spoil a weighted sum."""
    first, second, third = guest(A, 40), guest(B, 5), guest(C, 6)
    alone = run_alone(engine, third)
    prefill(engine, first, second)
    decode(engine, A, B)
    poison(engine, B)
    engine.release([B])
    spoken = prefill(engine, third)[C]
    while len(spoken) < third.num_tokens:
        results = decode(engine, A, C)
        assert row_of(engine, A).batch is row_of(engine, C).batch
        spoken += results[1].tokens
    assert spoken == alone


def test_a_row_on_which_the_model_raises_falls_and_the_others_go_on(loaded: Loaded) -> None:
    engine: Any = loaded.engine
    guests = [guest(A, 9), guest(B, 12), guest(C, 12)]
    alone = {one.sequence: run_alone(engine, one) for one in guests}
    model = engine._model

    def fussy(tokens: mx.array, cache: Any = None) -> Any:
        logits = model(tokens, cache=cache)  # the caches have already been written to when it raises
        if (tokens == 250).any().item():
            raise FloatingPointError("a token the model cannot bear")
        return logits

    engine._model = fussy
    for one in guests:
        add(engine, one)
    prompts = {one.sequence: list(one.prompt) for one in guests}
    prompts[B][5] = 250
    results = engine.step([RowStep(one.sequence, prompts[one.sequence], 1) for one in guests]).result()
    assert [code_of(result) for result in results] == [None, "generation_failed", None]
    assert "cannot bear" in str(results[1].error)
    spoken = {A: list(results[0].tokens), C: list(results[2].tokens)}
    for _ in range(7):
        for result in decode(engine, A, C):
            spoken[result.sequence] += result.tokens
    assert spoken == {A: alone[A], C: alone[C]}


def test_rows_released_while_a_step_is_under_way_disturb_nobody(engine: Engine) -> None:
    guests = make_guests(2, 6, [3, 20, 33], greedy=True)
    alone = {one.sequence: run_alone(engine, replace(one, num_tokens=4)) for one in guests}
    spoken = prefill(engine, *guests)
    pending = engine.step([RowStep(one.sequence, None, 1) for one in guests])
    engine.release([guests[0].sequence, guests[3].sequence, NOBODY])
    stayed = [one.sequence for one in guests if one.sequence not in (guests[0].sequence, guests[3].sequence)]
    following = engine.step([RowStep(sequence, None, 1) for sequence in reversed(stayed)])
    for step in (pending, following):
        for result in step.result():
            spoken[result.sequence] += result.tokens
    for result in decode(engine, *stayed):
        spoken[result.sequence] += result.tokens
    assert {sequence: spoken[sequence] for sequence in stayed} == {sequence: alone[sequence] for sequence in stayed}
    assert engine.step([]).result() == []


def test_a_step_of_prompts_and_decoding_rows_together_is_right_too(engine: Engine) -> None:
    guests = [guest(A, 9), guest(B, 30), guest(C, 70)]
    alone = {one.sequence: run_alone(engine, replace(one, num_tokens=3)) for one in guests}
    spoken = prefill(engine, guests[0])
    add(engine, guests[1])
    add(engine, guests[2])
    mixed = [RowStep(B, guests[1].prompt, 1), RowStep(A, None, 1), RowStep(C, guests[2].prompt[:50], 0)]
    spoken |= {A: spoken[A] + said(engine, mixed)[A]}
    results = {
        result.sequence: result for result in engine.step([RowStep(C, guests[2].prompt[50:], 1), RowStep(A, None, 1)]).result()
    }
    assert spoken[A] + list(results[A].tokens) == alone[A]
    assert list(results[C].tokens) == alone[C][:1]
    assert engine.length(A) == 11
    assert engine.length(B) == 30


def test_explicit_tokens_and_the_drawn_one_are_the_same_to_a_row(engine: Engine) -> None:
    one = Guest(A, list(range(40, 60)), Sampling(temperature=1.0, repetition_penalty=1.4, seed=3), 10)
    alone = run_alone(engine, one)
    spoken = prefill(engine, one)[A]
    while len(spoken) < 10:
        spoken += said(engine, [RowStep(A, spoken[-1:] if len(spoken) % 2 else None, 1)])[A]
    assert spoken == alone
