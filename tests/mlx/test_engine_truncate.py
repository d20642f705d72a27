"""Going back: a row that fed too much goes on as if it had never fed it."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.engine import Engine, RowError, RowStep
from runtime.protocol.commands import Sampling
from runtime.protocol.events import Capabilities
from runtime.protocol.ids import SequenceId
from tests.support.crowd import Guest, add, load_engine, run_alone
from tests.support.tiny import MakeTiny

A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)
CAN_GO_BACK = ["llama", "gemma3_text", "lfm2", "qwen3_next", "mamba2", "mamba"]
PENALISED = Sampling(temperature=0.9, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.2, seed=12)


def guests(num_tokens: int = 12) -> list[Guest]:
    return [
        Guest(A, [3, 1, 4, 1, 5, 9, 2, 6], Sampling(), num_tokens),
        Guest(B, [(index * index) % 256 for index in range(35)], PENALISED, num_tokens),
        Guest(C, [200, 100], Sampling(temperature=0.7, seed=5), num_tokens),
    ]


def begin(engine: Engine, crowd: list[Guest]) -> dict[SequenceId, list[int]]:
    for one in crowd:
        add(engine, one)
    results = engine.step([RowStep(one.sequence, one.prompt, 1) for one in crowd]).result()
    return {result.sequence: list(result.tokens) for result in results}


def go_on(engine: Engine, crowd: list[Guest], said: dict[SequenceId, list[int]]) -> None:
    """To the end; the first token each row feeds is given, as after a verify, the others it draws itself."""
    given = {one.sequence: said[one.sequence][engine.length(one.sequence) - len(one.prompt) :] for one in crowd}
    while active := [one.sequence for one in crowd if len(said[one.sequence]) < one.num_tokens]:
        steps = [RowStep(sequence, given.pop(sequence, None), 1) for sequence in active]
        for result in engine.step(steps).result():
            assert result.error is None, result.error
            said[result.sequence] += result.tokens


@pytest.mark.parametrize("family", CAN_GO_BACK)
def test_wrong_tokens_fed_and_taken_back_leave_no_trace(tiny: MakeTiny, family: str) -> None:
    """As after a verify: every row fed four tokens, and keeps three, one, or none of them."""
    engine = load_engine(tiny(family)).engine
    crowd = guests()
    alone = {one.sequence: run_alone(engine, one) for one in crowd}
    said = begin(engine, crowd)
    steps = [RowStep(one.sequence, None, 1) for one in crowd]
    for _ in range(3):
        for result in engine.step(steps).result():
            said[result.sequence] += result.tokens
    for round_number in range(2):
        fed = []
        for number, one in enumerate(crowd):
            right = alone[one.sequence][len(said[one.sequence]) - 1 :][: (3, 1, 0)[number]]
            fed.append(RowStep(one.sequence, right + [11 + round_number] * (4 - len(right)), 0))
        lengths = {one.sequence: engine.length(one.sequence) for one in crowd}
        engine.step(fed).result()
        for number, one in enumerate(crowd):
            kept = (3, 1, 0)[number]
            engine.truncate(one.sequence, lengths[one.sequence] + kept)
            assert engine.length(one.sequence) == lengths[one.sequence] + kept
            said[one.sequence] = alone[one.sequence][: len(said[one.sequence]) + kept]
    go_on(engine, crowd, said)
    assert said == alone


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_a_look_ahead_taken_back_is_drawn_again_the_same(tiny: MakeTiny, family: str) -> None:
    """While the look-ahead is still under way, and with penalties that had counted its token already."""
    engine = load_engine(tiny(family)).engine
    crowd = guests()
    alone = {one.sequence: run_alone(engine, one) for one in crowd}
    said = begin(engine, crowd)
    steps = [RowStep(one.sequence, None, 1) for one in crowd]
    first = engine.step(steps)
    ahead = engine.step(steps)
    for one in crowd:
        engine.truncate(one.sequence, len(one.prompt) + 1)
    for result in first.result():
        said[result.sequence] += result.tokens
    ahead.result()
    while len(said[A]) < 12:
        for result in engine.step(steps).result():
            said[result.sequence] += result.tokens
    assert said == alone


def test_a_row_cannot_be_cut_to_a_length_it_never_had(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama")).engine
    begin(engine, guests())
    for length in (-1, 9):
        with pytest.raises(RowError, match="8 tokens are fed"):
            engine.truncate(A, length)
    with pytest.raises(RowError, match="not in this engine"):
        engine.truncate(SequenceId(77), 1)


def test_recurrent_rows_go_back_over_their_last_step_only(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("lfm2")).engine
    crowd = guests()
    begin(engine, crowd)
    steps = [RowStep(one.sequence, None, 1) for one in crowd]
    engine.step(steps).result()
    engine.step(steps).result()
    with pytest.raises(RowError, match="no longer kept"):
        engine.truncate(A, len(crowd[0].prompt))
    assert engine.length(A) == len(crowd[0].prompt) + 2


def test_a_sliding_row_goes_back_a_good_way_but_not_beyond_what_it_has_forgotten(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("gemma3_text")).engine
    one = Guest(A, [(5 * index) % 251 for index in range(300)], Sampling(), 20)
    alone = run_alone(engine, one)
    add(engine, one)
    for start in range(0, 300, 50):
        engine.step([RowStep(A, one.prompt[start : start + 50], int(start == 250))]).result()
    for _ in range(19):
        engine.step([RowStep(A, None, 1)]).result()
    engine.truncate(A, 300)
    said = {A: alone[:1]}
    go_on(engine, [one], said)
    assert said[A] == alone
    with pytest.raises(RowError, match="no longer kept"):
        engine.truncate(A, 60)


def test_a_model_that_cannot_go_back_says_so(tiny: MakeTiny) -> None:
    engine: Any = load_engine(tiny("llama")).engine
    engine._capabilities = Capabilities(batched_decode=True, padded_prefill=True, chunked_prefill=True, rollback="none")
    begin(engine, guests())
    with pytest.raises(RowError, match="cannot go back"):
        engine.truncate(A, 3)
