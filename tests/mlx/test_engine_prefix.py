"""A prefix that was computed once goes on in any row, any number of times, as if that row had computed it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from runtime.engine.engine import Engine, RowError, RowStep
from runtime.engine.prefix_parts import PrefixPart
from runtime.protocol.commands import Sampling
from runtime.protocol.ids import SequenceId
from tests.support.crowd import Guest, add, load_engine, make_guests, run_alone, run_crowd
from tests.support.prefixes import (
    BLOCK,
    GREEDY,
    NUM_TOKENS,
    PENALISED,
    A,
    B,
    C,
    D,
    as_from_file,
    computed,
    engine_of,
    feed,
    finish,
    guest,
    prompt_of,
)
from tests.support.tiny import MakeTiny

FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "mamba2"]
DENSE = ["llama", "qwen3"]


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_row_says_bit_for_bit_what_a_cold_one_says(tiny: MakeTiny, family: str, sampling: Sampling) -> None:
    """At every split around block edges: a prompt just longer than the prefix, or much; prefixes below and above the window."""
    engine = load_engine(tiny(family)).engine
    long = guest(A, 7 * BLOCK, sampling)
    edges = list(range(BLOCK, 7 * BLOCK, BLOCK))
    parts = computed(engine, long, edges)
    if family in DENSE:
        cold = finish(engine, long)
        add(engine, replace(long, sequence=B))
        assert finish(engine, replace(long, sequence=B)) == cold  # chunks change no bit here
    for number, edge in enumerate(edges, start=1):
        for length in (edge + 1, edge + BLOCK - 1):
            one = Guest(C, long.prompt[:length], sampling, NUM_TOKENS)
            add(engine, one)
            for chunk_end in range(BLOCK, edge + 1, BLOCK):
                feed(engine, C, one.prompt[chunk_end - BLOCK : chunk_end])
            cold = finish(engine, one)
            add(engine, one)
            engine.restore(C, [as_from_file(part) for part in parts[:number]])
            assert engine.length(C) == edge
            assert finish(engine, one) == cold, (edge, length)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_row_says_what_one_says_that_was_fed_in_one_piece(tiny: MakeTiny, family: str) -> None:
    engine = load_engine(tiny(family)).engine
    one = guest(A, 61, PENALISED)
    alone = run_alone(engine, one)
    parts = computed(engine, one, [16, 48])
    assert [token for token, _ in finish(engine, one)] == alone
    add(engine, one)
    engine.restore(A, parts)
    assert [token for token, _ in finish(engine, one)] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_one_export_serves_several_rows_among_others_that_come_and_go(tiny: MakeTiny, family: str) -> None:
    """Forks of one prefix go on in different ways, beside strangers; the row it came from goes on too."""
    engine = load_engine(tiny(family)).engine
    origin = guest(A, 3 * BLOCK + 5)
    shared = origin.prompt[: 3 * BLOCK]
    forks = [
        Guest(B, [*shared, 9], PENALISED, NUM_TOKENS),
        Guest(C, [*shared, *prompt_of(13, 5)], Sampling(logprobs=2), NUM_TOKENS),
        Guest(D, [*shared, *prompt_of(3, 6)], Sampling(temperature=1.0, seed=4, logprobs=2), NUM_TOKENS),
    ]
    strangers = [Guest(SequenceId(10 + number), prompt_of(length, 11), GREEDY, 20) for number, length in enumerate((5, 30, 18))]
    expected = {one.sequence: run_alone(engine, one) for one in (origin, *forks, *strangers)}
    said: dict[SequenceId, list[int]] = {sequence: [] for sequence in expected}

    def step(*rows: RowStep) -> None:
        for result in engine.step(rows).result():
            assert result.error is None, result.error
            said[result.sequence] += result.tokens

    for one in strangers[:2]:
        add(engine, one)
    step(*(RowStep(one.sequence, one.prompt, 1) for one in strangers[:2]))
    parts = computed(engine, origin, [BLOCK, 3 * BLOCK])
    step(RowStep(A, origin.prompt[3 * BLOCK :], 1), *(RowStep(one.sequence, None, 1) for one in strangers[:2]))
    for one in forks[:2]:
        add(engine, one)
        engine.restore(one.sequence, parts)
    add(engine, strangers[2])
    step(
        RowStep(B, forks[0].prompt[3 * BLOCK :], 1),
        RowStep(C, forks[1].prompt[3 * BLOCK : 3 * BLOCK + 4], 0),
        RowStep(strangers[2].sequence, strangers[2].prompt, 1),
        RowStep(A, None, 1),
    )
    engine.release([strangers[0].sequence])
    del said[strangers[0].sequence]
    add(engine, forks[2])
    engine.restore(D, parts)
    step(RowStep(D, forks[2].prompt[3 * BLOCK :], 1), RowStep(C, forks[1].prompt[3 * BLOCK + 4 :], 1), RowStep(B, None, 1))
    here = {one.sequence: one for one in (origin, *forks, *strangers) if one.sequence in said}
    while active := [sequence for sequence, one in here.items() if len(said[sequence]) < one.num_tokens]:
        step(*(RowStep(sequence, None, 1) for sequence in active))
    assert said == {sequence: expected[sequence] for sequence in said}


@pytest.mark.parametrize("family", FAMILIES)
def test_export_while_steps_are_under_way(tiny: MakeTiny, family: str) -> None:
    """The prefill step's result not yet taken; then with a look-ahead submitted, which leaves the state before it at hand."""
    engine = load_engine(tiny(family)).engine
    one, other = guest(A, 3 * BLOCK), guest(B, 20, PENALISED, 5)
    expected = {guest.sequence: run_alone(engine, guest) for guest in (one, other)}
    longer = Guest(C, [*one.prompt, *prompt_of(5, 9)], GREEDY, NUM_TOKENS)
    of_longer = run_alone(engine, longer)
    add(engine, other)
    said = {A: list[int](), B: list(engine.step([RowStep(B, other.prompt, 1)]).result()[0].tokens)}
    add(engine, one)
    pending = engine.step([RowStep(A, one.prompt, 1)])
    under_way = engine.export(A, 0, 3 * BLOCK)
    ahead = engine.step([RowStep(A, None, 1), RowStep(B, None, 1)])
    after = engine.export(A, 0, 3 * BLOCK)
    for step in (pending, ahead):
        for result in step.result():
            said[result.sequence] += result.tokens
    later = engine.export(A, 0, 2 * BLOCK)
    for _ in range(NUM_TOKENS - 2):
        for result in engine.step([RowStep(A, None, 1), RowStep(B, None, 1)]).result():
            said[result.sequence] += result.tokens
    assert said == expected
    for export in (under_way, after):
        assert export.missing == ()
        add(engine, longer)
        engine.restore(C, [export.part])
        assert [token for token, _ in finish(engine, longer)] == of_longer
    first, second = under_way.part.arrays, after.part.arrays
    assert [bytes(array.buffer()) for array in first] == [bytes(array.buffer()) for array in second]
    assert bool(later.missing) == (family in ("lfm2", "qwen3_next", "mamba2"))


def test_the_assistants_own_tokens_are_kept_as_well(tiny: MakeTiny) -> None:
    """The next turn of a chat extends the last one: prompt, answer, new message."""
    engine = load_engine(tiny("gemma3_text")).engine
    one = Guest(A, prompt_of(19), Sampling(), 30)
    add(engine, one)
    said = [token for token, _ in _plain(engine, A, one.prompt, 30)]
    export = engine.export(A, 0, 40)
    engine.release([A])
    turn = Guest(B, [*one.prompt, *said, 1, 2, 3], PENALISED, NUM_TOKENS)
    expected = run_alone(engine, turn)
    add(engine, turn)
    engine.restore(B, [export.part])
    assert [token for token, _ in finish(engine, turn)] == expected


def _plain(engine: Engine, sequence: SequenceId, prompt: Sequence[int], num_tokens: int) -> list[tuple[int, None]]:
    tokens = list(engine.step([RowStep(sequence, prompt, 1)]).result()[0].tokens)
    while len(tokens) < num_tokens:
        tokens += engine.step([RowStep(sequence, None, 1)]).result()[0].tokens
    return [(token, None) for token in tokens]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_a_restored_rows_look_ahead_taken_back_is_drawn_again_the_same(tiny: MakeTiny, family: str) -> None:
    """With penalties, which must then be counted anew from tokens that this row never fed."""
    engine = load_engine(tiny(family)).engine
    one = Guest(A, prompt_of(12), PENALISED, 20)
    alone = run_alone(engine, one)
    context = [*one.prompt, *alone[:6]]
    parts = computed(engine, Guest(B, context, GREEDY, 1), [16])
    engine.add(A, PENALISED, prompt_length=len(one.prompt), context=context, max_length=64)
    engine.restore(A, parts)
    said = feed(engine, A, context[16:], 1)
    ahead = engine.step([RowStep(A, None, 1)])
    engine.truncate(A, len(context))
    ahead.result()
    while len(said) < 14:
        said += feed(engine, A, None, 1)
    assert [token for token, _ in said] == alone[6:]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_replayed_context_with_output_is_restored_and_penalised_as_before(tiny: MakeTiny, family: str) -> None:
    engine = load_engine(tiny(family)).engine
    one = Guest(A, prompt_of(12), PENALISED, 20)
    alone = run_alone(engine, one)
    context = [*one.prompt, *alone[:11]]
    source = Guest(B, context, GREEDY, 1)
    parts = computed(engine, source, [16])
    engine.add(A, PENALISED, prompt_length=len(one.prompt), context=context, max_length=64)
    engine.restore(A, parts)
    said = feed(engine, A, context[16:], 1)
    while len(said) < 9:
        said += feed(engine, A, None, 1)
    assert [token for token, _ in said] == alone[11:]


def test_only_the_rows_own_positions_leave(tiny: MakeTiny) -> None:
    """Slots behind a length hold forgotten tokens and other rows' leavings: two rows of one prefix give the same bytes."""
    engine = load_engine(tiny("gemma3_text")).engine
    clean = computed(engine, guest(A, 30), [24])
    add(engine, guest(B, 60, seed=9))
    add(engine, guest(C, 30))
    engine.step([RowStep(B, prompt_of(60, 9), 0), RowStep(C, prompt_of(30)[:20], 0)]).result()
    engine.step([RowStep(C, [1, 2, 3, 4, 5, 6, 7], 0)]).result()
    engine.truncate(C, 20)
    engine.step([RowStep(C, prompt_of(30)[20:24], 0)]).result()
    engine.release([B])
    (used,) = [engine.export(C, 0, 24).part]
    assert [bytes(array.buffer()) for array in used.arrays] == [bytes(array.buffer()) for array in clean[0].arrays]
    layout = engine.layout()
    assert layout is not None
    assert sum(array.num_bytes for array in used.arrays) == layout.num_bytes_in(0, 24)


def test_a_row_restored_can_go_back_and_be_exported_again(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("gemma3_text")).engine
    one = guest(A, 50)
    parts = computed(engine, one, [24, 40])
    cold = finish(engine, one)
    add(engine, one)
    engine.restore(A, parts)
    again = engine.export(A, 24, 40).part
    assert [bytes(array.buffer()) for array in again.arrays] == [bytes(array.buffer()) for array in parts[1].arrays]
    with pytest.raises(RowError, match="no longer kept"):
        engine.truncate(A, 30)
    feed(engine, A, [5, 5, 5])
    engine.truncate(A, 40)
    assert finish(engine, one) == cold


def test_bfloat16_goes_through_bytes_unchanged(tiny: MakeTiny) -> None:
    model, _ = mlx_lm.load(str(tiny("llama")))
    model.set_dtype(mx.bfloat16)
    engine = engine_of(model)
    layout = engine.layout()
    assert layout is not None
    assert {field.dtype for field in layout.fields} == {"BF16"}
    one = guest(A, 40, PENALISED)
    parts = computed(engine, one, [16, 32])
    cold = finish(engine, one)
    assert [array.buffer().nbytes for array in parts[0].arrays] == [2 * 2 * 16 * 16] * 4
    add(engine, one)
    engine.restore(A, [as_from_file(part) for part in parts])
    assert finish(engine, one) == cold


def test_reading_and_adopting_work_on_another_thread_while_steps_run(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("lfm2")).engine
    one, other = guest(A, 40, PENALISED), guest(B, 10)
    alone = run_alone(engine, one)
    add(engine, other)
    feed(engine, B, other.prompt, 1)
    part = computed(engine, one, [32])[0]
    brought: list[PrefixPart] = []
    thread = threading.Thread(target=lambda: brought.append(engine.adopt(as_from_file(part))))
    pending = engine.step([RowStep(B, None, 1)])
    thread.start()
    pending.result()
    thread.join(30)
    engine.release([A])
    for sequence in (A, C):
        fork = replace(one, sequence=sequence)
        add(engine, fork)
        engine.restore(sequence, brought)
        assert [token for token, _ in finish(engine, fork)] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_cut_serves_as_the_part_exported_of_these_positions(tiny: MakeTiny, family: str) -> None:
    """From bytes and from the engine's arrays, on this thread and on another, at places that are no block's edge."""
    engine = load_engine(tiny(family)).engine
    layout = engine.layout()
    assert layout is not None
    one = guest(A, 40, PENALISED)
    (whole,) = computed(engine, one, [32])
    cold = finish(engine, one)
    for source in (whole, as_from_file(whole)):
        here = [engine.adopt(source, 0, 11), engine.adopt(source, start=11)]
        elsewhere: list[PrefixPart] = []
        thread = threading.Thread(target=lambda source=source, made=elsewhere: made.append(engine.adopt(source, 11, 32)))
        thread.start()
        thread.join(30)
        tails = [as_from_file(part) for part in (here[1], *elsewhere)]
        assert tails[0] == tails[1]
        assert here[1].start == 11
        assert sum(array.num_bytes for array in here[1].arrays) == layout.num_bytes_in(11, 32)
        for tail in (here[1], *elsewhere):
            add(engine, one)
            engine.restore(A, [here[0], tail])
            assert finish(engine, one) == cold
    if layout.has_checkpoints:
        add(engine, one)
        with pytest.raises(RowError, match="lacks the checkpoint"):
            engine.restore(A, [engine.adopt(whole, 0, 24)])
    else:
        add(engine, one)
        engine.restore(A, [engine.adopt(whole, 0, 29)])
        assert finish(engine, one) == cold


def test_a_part_that_was_cut_keeps_nothing_of_what_was_cut_away_alive(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama")).engine
    (whole,) = computed(engine, guest(A, 40), [32])
    cut = engine.adopt(whole, 8, 24)
    before = [bytes(array.buffer()) for array in cut.arrays]
    heads = [np.frombuffer(array.buffer(), np.uint8).reshape(2, 32, -1)[:, 8:24] for array in whole.arrays]
    assert before == [head.tobytes() for head in heads]
    assert not any(
        np.shares_memory(np.frombuffer(mine.buffer(), np.uint8), np.frombuffer(theirs.buffer(), np.uint8))
        for mine in cut.arrays
        for theirs in whole.arrays
    )


# -- at random -----------------------------------------------------------------------------------------------------------


class Restoring:
    """An engine that begins every row with what is kept of an earlier row's prompt, and keeps blocks of all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[tuple[int, ...], list[PrefixPart]] = {}
        self._prompts: dict[SequenceId, list[int]] = {}
        self._ahead: dict[SequenceId, int] = {}
        self.num_restored = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, sequence: SequenceId, sampling: Sampling, *, context: Sequence[int], **others: Any) -> None:
        self._engine.add(sequence, sampling, context=context, **others)
        self._prompts[sequence] = list(context)
        for end in range((len(context) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            parts = self._kept.get(tuple(context[:end]))
            if parts is not None:
                self._engine.restore(sequence, parts)
                self._ahead[sequence] = end
                self.num_restored += 1
                return

    def step(self, rows: Sequence[RowStep]) -> Any:
        """What of a chunk lies before the restored length is left out; a chunk that is wholly there is not fed at all."""
        fed: list[RowStep] = []
        for row in rows:
            skipped = min(self._ahead.get(row.sequence, 0), len(row.tokens or ()))
            if row.tokens is not None and skipped:
                self._ahead[row.sequence] -= skipped
                row = replace(row, tokens=row.tokens[skipped:])
            if row.tokens is None or row.tokens:
                fed.append(row)
        pending = self._engine.step(fed)
        for row in fed:
            self._keep(row.sequence)
        return pending

    def _keep(self, sequence: SequenceId) -> None:
        prompt, end = self._prompts[sequence], self._engine.length(sequence)
        if end % BLOCK == 0 and end <= len(prompt) and tuple(prompt[:end]) not in self._kept:
            export = self._engine.export(sequence, 0, end)
            assert export.missing == ()
            self._kept[tuple(prompt[:end])] = [export.part]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_of_rows_with_prefixes_in_common_says_what_each_says_alone(tiny: MakeTiny, family: str) -> None:
    engine = load_engine(tiny(family)).engine
    prefixes = [prompt_of(40, seed) for seed in (1, 2)]
    guests = [
        replace(one, prompt=[*prefixes[number % 2][: 8 * (number % 5 + 1)], *one.prompt])
        for number, one in enumerate(make_guests(31, 14, [1, 5, 8, 20], num_tokens=10))
    ]
    restoring = Restoring(engine)
    evening = run_crowd(restoring, guests, 5, longest_chunk=12)  # type: ignore[arg-type]
    assert restoring.num_restored > 0
    assert evening.said == {one.sequence: run_alone(engine, one) for one in guests}


def test_another_process_reads_the_same_model_the_same_way(tiny: MakeTiny, tmp_path: Path) -> None:
    """Two engines of one checkpoint have one layout, and one goes on with what the other computed."""
    first, second = load_engine(tiny("qwen3_next")).engine, load_engine(tiny("qwen3_next")).engine
    assert first.layout() == second.layout()
    one = guest(A, 30, PENALISED)
    parts = [as_from_file(part) for part in computed(first, one, [16, 24])]
    cold = finish(first, one)
    add(second, one)
    second.restore(A, parts)
    assert finish(second, one) == cold
