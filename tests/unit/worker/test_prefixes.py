"""A row says the same wherever its beginning comes from, and the host hears truly what was found and what is kept."""

from __future__ import annotations

import pytest

from runtime.engine import fake
from runtime.protocol.commands import AnyCommand, Configure, Fault, Inspect, Prefill
from runtime.protocol.events import (
    AnyEvent,
    Inspected,
    Kept,
    Prefilled,
    Refused,
    Released,
    Restored,
    StepDone,
)
from runtime.protocol.ids import SequenceId
from runtime.worker.prefix_places import MIN_TOKENS
from tests.support.phases import Phases, kept, release, restored, start
from tests.unit.worker.fake_prefixes import OTHER_SCOPE, expected, load_fake, positions, prompt_of, tokens_of

# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [MIN_TOKENS + 1, 255, 256, 257, 511, 512, 513, 1000])
def test_a_prompt_asked_again_leaves_one_token_to_compute(length: int) -> None:
    prompt = prompt_of(length)
    events = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)]).run()
    assert tokens_of(events, 1) == tokens_of(events, 2) == expected(prompt)
    assert restored(events, 1) == Restored(SequenceId(1), 0, "none")
    assert restored(events, 2) == Restored(SequenceId(2), length - 1, "memory")


@pytest.mark.parametrize("length", [1, 2, MIN_TOKENS - 10])
def test_a_context_that_is_computed_as_fast_as_copied_is_not_kept(length: int) -> None:
    prompt = prompt_of(length)
    events = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)]).run()
    assert tokens_of(events, 1) == tokens_of(events, 2) == expected(prompt)
    assert restored(events, 2) == Restored(SequenceId(2), 0, "none")


@pytest.mark.parametrize("shared", [1, 3, MIN_TOKENS - 1])
def test_so_few_common_tokens_are_computed_with_the_rest(shared: int) -> None:
    first = prompt_of(600)
    second = [*first[:shared], 200, *prompt_of(50, 3)]
    events = Phases(load_fake(), [start(1, first)], [start(2, second)]).run()
    assert restored(events, 2) == Restored(SequenceId(2), 0, "none")
    assert tokens_of(events, 2) == expected(second)


@pytest.mark.parametrize("shared", [MIN_TOKENS, 100, 255, 256, 257, 400, 512, 599, 600])
def test_a_prompt_that_parts_anywhere_is_restored_up_to_there(shared: int) -> None:
    first = prompt_of(600)
    second = [*first[:shared], 200, *prompt_of(50, 3)]
    events = Phases(load_fake(), [start(1, first)], [start(2, second)], [start(3, first)]).run()
    assert restored(events, 2).length == shared
    assert restored(events, 3).length == 599
    assert tokens_of(events, 2) == expected(second)
    assert tokens_of(events, 3) == expected(first)


def test_the_next_turn_finds_the_answer_too_but_for_its_last_token() -> None:
    first = prompt_of(500)
    second = [*first, *expected(first, 300), *prompt_of(9)]
    events = Phases(load_fake(), [start(1, first, max_tokens=300)], [start(2, second)]).run()
    assert restored(events, 2).length == 500 + 299
    assert tokens_of(events, 2) == expected(second)
    assert positions(events) == [(0, 256), (256, 512), (512, 768)]


def test_what_is_held_is_copied_once() -> None:
    prompt = prompt_of(1000)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], [start(3, prompt)])
    events = stage.run()
    assert positions(events) == [(0, 512), (512, 768)]
    assert stage.memory.num_bytes == (1000 + 3) * 16


def test_nothing_of_another_scope_is_found() -> None:
    prompt = prompt_of(600)
    events = Phases(load_fake(), [start(1, prompt)], [start(2, prompt, scope=OTHER_SCOPE)]).run()
    assert restored(events, 2).length == 0
    assert tokens_of(events, 2) == expected(prompt)


def test_a_row_that_keeps_nothing_still_finds() -> None:
    prompt = prompt_of(600)
    longer = [*prompt, *prompt_of(300, 5)]
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, longer, keep=False)], [start(3, longer)])
    events = stage.run()
    assert restored(events, 2).length == restored(events, 3).length == 600
    assert kept(events, 2) == []


def test_a_row_without_prefixes_neither_finds_nor_keeps_nor_is_told_of() -> None:
    prompt = prompt_of(600)
    plain = start(1, prompt).rows[0]
    plain = type(plain)(plain.sequence, plain.tokens, plain.prompt_length, plain.max_length, plain.limit)
    stage = Phases(load_fake(), [Prefill((plain,))])
    events = stage.run()
    assert not any(isinstance(event, Restored | Kept) for event in events)
    assert stage.memory.num_nodes == 0


def test_the_host_hears_in_an_order_it_can_act_on() -> None:
    prompt = prompt_of(1300)
    stage = Phases(load_fake(), [start(1, prompt)], [release(1)])
    kinds = [type(event) for event in stage.run()]
    assert kinds[0] is Restored
    assert kinds[1:5] == [Kept, Kept, Kept, Prefilled]
    assert kinds[5] is StepDone
    assert kinds[-2:] == [Kept, Released]
    lengths = [event.length for event in kept(stage.channel.events, 1)]
    assert lengths == [512, 1024, 1300, 1303]


def test_nodes_are_offered_only_once_a_token_proved_them() -> None:
    events = Phases(load_fake(), [start(1, prompt_of(1300))]).run()
    assert [len(event.nodes) for event in kept(events, 1)] == [0, 0, 3, 0]


def test_nothing_is_kept_without_a_budget() -> None:
    prompt = prompt_of(600)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], prefix_memory_bytes=0)
    events = stage.run()
    assert (restored(events, 2).length, kept(events, 1), stage.memory.num_bytes) == (0, [], 0)


def test_a_context_larger_than_the_budget_is_kept_as_far_as_it_fits() -> None:
    prompt = prompt_of(2000)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], prefix_memory_bytes=1100 * 16)
    events = stage.run()
    assert restored(events, 2).length == 1024
    assert tokens_of(events, 2) == expected(prompt)


def test_old_prefixes_make_room_for_new_ones() -> None:
    prompts = [[33 + number, *prompt_of(599)] for number in range(5)]
    phases = [[start(number, prompt)] for number, prompt in enumerate(prompts)]
    stage = Phases(load_fake(), *phases, [start(8, prompts[0]), start(9, prompts[4])], prefix_memory_bytes=1300 * 16)
    events = stage.run()
    assert restored(events, 8).length == 0
    assert restored(events, 9).length == 599
    assert tokens_of(events, 8) == expected(prompts[0])


def test_a_smaller_budget_holds_at_once() -> None:
    stage = Phases(load_fake(), [start(1, prompt_of(600))], [Configure(0, 550 * 16), Inspect(1)])
    report = next(event.report for event in stage.run() if isinstance(event, Inspected))
    assert 0 < report.prefix_memory_bytes <= 550 * 16
    assert report.prefix_nodes == stage.memory.num_nodes


def test_a_budget_below_nothing_is_nothing() -> None:
    stage = Phases(load_fake(), [start(1, prompt_of(600))], [Configure(0, -1), start(2, prompt_of(600))], prefix_memory_bytes=-1)
    assert restored(stage.run(), 2).length == 0


def test_an_engine_that_refuses_a_prefix_computes_it() -> None:
    loaded = load_fake()

    def refuse(*arguments: object) -> None:
        raise fake.RowError("generation_failed", "no")

    loaded.engine.restore = refuse  # type: ignore[method-assign]
    prompt = prompt_of(600)
    events = Phases(loaded, [start(1, prompt)], [start(2, prompt)]).run()
    assert restored(events, 2) == Restored(SequenceId(2), 0, "none")
    assert tokens_of(events, 2) == expected(prompt)


def test_a_malformed_use_is_refused_and_harms_nobody() -> None:
    prompt = prompt_of(600)
    events = Phases(load_fake(), [start(1, prompt, boundaries=(601,)), start(2, prompt)]).run()
    assert [(event.code, event.sequences) for event in events if isinstance(event, Refused)] == [("invalid_request", (1,))]
    assert tokens_of(events, 2) == expected(prompt)


# -- ends before the end ----------------------------------------------------------------------------------


def test_who_gives_up_and_comes_back_gets_further_each_time() -> None:
    prompt = prompt_of(1000)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], [start(3, prompt)], prefill_chunk_tokens=100)
    num_chunks = 0
    original = stage.loop._engine.step

    def step(rows: object) -> object:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks in (2, 4):
            stage.channel.waiting.append(release(num_chunks // 2))
        return original(rows)  # type: ignore[arg-type]

    stage.loop._engine.step = step  # type: ignore[method-assign, assignment]
    events = stage.run()
    assert [restored(events, number).length for number in (1, 2, 3)] == [0, 200, 400]
    assert tokens_of(events, 3) == expected(prompt)


def test_what_a_cancelled_row_has_said_is_kept() -> None:
    prompt = prompt_of(300)
    stage = Phases(load_fake(), [start(1, prompt, max_tokens=100)], [start(2, [*prompt, *expected(prompt, 100)])])

    def cancel(event: AnyEvent) -> list[AnyCommand]:
        return [release(1)] if isinstance(event, StepDone) and event.rows[0].index == 320 else []

    stage.channel.on_send = cancel
    events = stage.run()
    num_said = len(tokens_of(events, 1))
    assert num_said < 100
    assert restored(events, 2).length == 300 + num_said - 1
    assert tokens_of(events, 2) == expected([*prompt, *expected(prompt, 100)])


@pytest.mark.parametrize("action", ["nonfinite", "raise"])
@pytest.mark.parametrize(("at", "number"), [("prefill", 1), ("prefill", 2), ("prefill", 3), ("decode", 1), ("decode", 3)])
def test_of_a_row_that_fails_nothing_is_kept(at: str, number: int, action: str) -> None:
    fault = Fault(at, action, number=number, sequence_number=1)  # type: ignore[arg-type]
    prompt = prompt_of(1300)
    stage = Phases(load_fake(fault), [start(1, prompt, max_tokens=9)], [Inspect(1)], [start(2, prompt)])
    events = stage.run()
    report = next(event.report for event in events if isinstance(event, Inspected))
    assert report.prefix_nodes == report.prefix_memory_bytes == 0
    assert any(isinstance(event, Refused) and event.sequences == (1,) for event in events)
    assert restored(events, 2).length == 0
    assert tokens_of(events, 2) == expected(prompt)


def test_of_a_pinned_row_that_fails_nothing_is_kept_either() -> None:
    stage = Phases(load_fake(Fault("decode", "nonfinite")), [start(1, prompt_of(1300), pin=True)])
    events = stage.run()
    assert kept(events, 1)[-1].pinned_length == 1300
    assert stage.memory.num_bytes == stage.memory.pinned_bytes == 0


def test_a_failing_row_leaves_the_whole_blocks_that_others_had_kept() -> None:
    fault = Fault("decode", "nonfinite", sequence_number=2)
    prompt = prompt_of(600)
    longer = [*prompt, *prompt_of(600, 2)]
    events = Phases(load_fake(fault), [start(1, prompt, max_tokens=1)], [start(2, longer)], [start(3, longer)]).run()
    assert restored(events, 2).length == 600
    assert restored(events, 3).length == 512


def test_the_step_under_way_is_not_kept_when_a_row_ends_before_its_result() -> None:
    """The end token comes with a step, and by then the next one has been submitted with it."""
    prompt = prompt_of(300)
    loaded = load_fake(reply="Hello")
    row = start(1, prompt, max_tokens=50).rows[0]
    row = type(row)(row.sequence, row.tokens, row.prompt_length, row.max_length, row.limit, prefix=row.prefix)
    stage = Phases(loaded, [Prefill((row,))])
    events = stage.run()
    assert kept(events, 1)[-1].length == 300 + len("Hello")
