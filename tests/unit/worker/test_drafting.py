"""A drafter goes back to where an order says, feeds, and proposes; what it does not hold it says, and it never speaks unasked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from runtime.protocol.commands import (
    AnyCommand,
    Draft,
    DraftRow,
    FakeScript,
    Fault,
    Grant,
    Hold,
    Inspect,
    Prefill,
    PrefillRow,
    Release,
    Resume,
    Sampling,
    Verify,
    VerifyRow,
)
from runtime.protocol.events import AnyEvent, Drafted, Held, Inspected, Prefilled, Refused, StepDone, Verified
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from tests.unit.worker.stage import Stage, row, tokens_of

ONE, TWO, THREE = SequenceId(1), SequenceId(2), SequenceId(3)
PROMPT = b"once upon a time"
START = len(PROMPT)

PLAIN, GREEDY = FakeScript(), Sampling()

Answer = Callable[[Drafted], Sequence[AnyCommand]]


def guest(sequence: int, prompt: Sequence[int] = PROMPT, *, sampling: Sampling = GREEDY) -> PrefillRow:
    return row(sequence, prompt, max_tokens=400, hold=True, ignore_eos=True, sampling=sampling)


def order(number: int, base: int, commit: Sequence[int], count: int, sequence: SequenceId = ONE) -> DraftRow:
    return DraftRow(sequence, number, base, TokenIds(list(commit)), count)


def drawn(context: Sequence[int], count: int, sampling: Sampling = GREEDY, script: FakeScript = PLAIN) -> tuple[int, ...]:
    """What plain decoding says after these tokens."""
    start = row(1, context, max_tokens=count, ignore_eos=True, sampling=sampling)
    return tuple(tokens_of(Stage([[Prefill((start,))]], script=script).run(), 1))


def play(starts: Sequence[PrefillRow], *answers: Answer | Sequence[AnyCommand], script: FakeScript = PLAIN) -> Stage:
    """`answers`: to the last `Prefilled`, then to each `Drafted`. The worker is inspected at the end."""
    stage = Stage([[Prefill(tuple(starts))], *[[] for _ in range(40)], [Inspect(1)]], script=script)
    left = list(answers)

    def reply(event: AnyEvent) -> Sequence[AnyCommand]:
        if not left or not isinstance(event, Prefilled | Drafted):
            return []
        answer = left.pop(0)
        if not callable(answer):
            return answer
        assert isinstance(event, Drafted)
        return answer(event)

    stage.channel.on_send = reply
    stage.run()
    assert all(stage.engine.steps), "a step of nobody"
    return stage


def drafts(stage: Stage) -> list[tuple[SequenceId, int, tuple[int, ...]]]:
    events = [event for event in stage.channel.events if isinstance(event, Drafted)]
    return [(one.sequence, one.number, one.proposed) for event in events for one in event.rows]


def lost(stage: Stage) -> list[SequenceId]:
    return [sequence for event in stage.channel.events if isinstance(event, Drafted) for sequence in event.lost]


def report(stage: Stage) -> Inspected:
    (inspected,) = [event for event in stage.channel.events if isinstance(event, Inspected)]
    return inspected


def test_a_held_row_is_computed_and_then_waits_for_orders_whatever_else_is_said_to_it() -> None:
    told = [Resume((ONE,)), Grant(((ONE, 1 << 21),)), Hold((ONE,)), Verify((VerifyRow(ONE, 1, START),), lookup=4)]
    stage = play([guest(1)], told)
    kinds = {type(event) for event in stage.channel.events}
    assert Prefilled in kinds
    assert not kinds & {StepDone, Held, Verified, Drafted, Refused}
    assert report(stage).report.running == (ONE,)
    assert report(stage).report.decode_steps == report(stage).report.verify_steps == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_an_order_feeds_what_is_committed_and_proposes_what_plain_decoding_would_say(count: int, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=3)
    stage = play([guest(1, sampling=sampling)], [Draft((order(1, START, b"there", count),))])
    assert drafts(stage) == [(ONE, 1, drawn(PROMPT + b"there", count, sampling))]
    assert lost(stage) == []


def test_rounds_go_on_from_what_was_accepted_and_from_what_was_not() -> None:
    first = drawn(PROMPT + b"there", 4)
    length = START + 5
    kept = [*first[:2], ord("!")]  # two stood, the third did not
    text = [*PROMPT, *b"there", *kept]
    second = drawn(text, 4)
    whole = [*text, *second]
    bonus = drawn(whole, 1)
    stage = play(
        [guest(1)],
        [Draft((order(1, START, b"there", 4),))],
        lambda event: [Draft((order(2, length + 2, kept[2:], 4),))],
        lambda event: [Draft((order(3, len(whole) - 1, [second[-1], *bonus], 2),))],  # the last proposal was never fed
    )
    assert [proposed for _, _, proposed in drafts(stage)] == [first, second, drawn([*whole, *bonus], 2)]


def test_an_order_for_a_place_beyond_what_is_held_finds_the_row_lost_and_forgotten() -> None:
    stage = play(
        [guest(1), guest(2)],
        [Draft((order(1, START + 1, b"x", 3), order(1, START, b"x", 3, TWO)))],
        lambda event: [Draft((order(2, 0, b"x", 3),))],  # the worker has nothing of it any more
    )
    assert lost(stage) == [ONE, ONE]
    assert drafts(stage) == [(TWO, 1, drawn(PROMPT + b"x", 3))]
    assert report(stage).report.running == (TWO,)


def test_a_proposal_that_was_drawn_last_is_not_held() -> None:
    stage = play(
        [guest(1)],
        [Draft((order(1, START, b"there", 4),))],
        lambda event: [Draft((order(2, START + 5 + 4, b"x", 1),))],
    )
    assert lost(stage) == [ONE]


def test_an_order_before_the_prompt_is_computed_finds_the_row_lost_and_forgotten() -> None:
    stage = Stage([[Prefill((guest(1),)), Draft((order(1, 3, b"x", 1),)), Inspect(1)]])
    stage.run()
    assert (lost(stage), drafts(stage)) == ([ONE], [])
    assert report(stage).report.prefilling == report(stage).report.running == ()


def test_an_order_that_feeds_nothing_or_names_a_clients_row_or_nobody_is_lost_and_clients_go_on() -> None:
    client = row(2, PROMPT, max_tokens=6, ignore_eos=True)
    orders = (order(1, START, b"", 2), order(1, START, b"x", 2, TWO), order(1, 0, b"x", 2, THREE))
    stage = play([guest(1), client], [Draft(orders)])
    assert sorted(lost(stage)) == [ONE, TWO, THREE]
    assert tuple(tokens_of(stage.channel.events, 2)) == drawn(PROMPT, 6)


# -- again, later, instead --------------------------------------------------------------------------------------


def test_a_repeated_order_is_answered_the_same_and_an_older_one_not_at_all() -> None:
    again = Draft((order(5, START, b"there", 3),))
    older = Draft((order(4, START, b"where", 3),))
    stage = play([guest(1)], [again], lambda event: [older, again])
    first, second = drafts(stage)
    assert first == second == (ONE, 5, drawn(PROMPT + b"there", 3))


def test_an_order_repeated_while_it_runs_is_answered_once() -> None:
    stage = play([guest(1)], [Draft((order(1, START, b"there", 3),))] * 2)
    assert len(drafts(stage)) == 1


def test_a_later_order_replaces_one_that_has_not_begun() -> None:
    stage = play([guest(1)], [Draft((order(1, START, b"there", 6),)), Draft((order(2, START, b"where", 2),))])
    assert drafts(stage) == [(ONE, 2, drawn(PROMPT + b"where", 2))]


@pytest.mark.parametrize("turns_later", [1, 2, 3])
def test_a_later_order_replaces_one_in_the_middle(turns_later: int) -> None:
    stage = Stage([[Prefill((guest(1),))], [], [Draft((order(1, START, b"there", 6),))]])
    stage.channel.turns += [[] for _ in range(turns_later - 1)]
    stage.channel.turns += [[Draft((order(2, START, b"where", 3),))]]
    stage.run()
    assert drafts(stage) == [(ONE, 2, drawn(PROMPT + b"where", 3))]


def test_an_order_of_no_proposals_only_feeds() -> None:
    stage = play(
        [guest(1)],
        [Draft((order(1, START, b" there was", 0),))],
        lambda event: [Draft((order(2, START + 10, b" a", 3),))],
    )
    assert drafts(stage) == [(ONE, 1, ()), (ONE, 2, drawn(PROMPT + b" there was a", 3))]


# -- several at once --------------------------------------------------------------------------------------------


def test_orders_of_two_targets_run_in_the_same_steps_and_each_is_said_when_it_is_done() -> None:
    stage = play([guest(1), guest(2, b"another")], [Draft((order(1, START, b"x", 2),)), Draft((order(9, 7, b"yz", 5, TWO),))])
    assert drafts(stage) == [(ONE, 1, drawn(PROMPT + b"x", 2)), (TWO, 9, drawn(b"anotheryz", 5))]
    assert report(stage).report.draft_steps == 5
    assert [len(rows) for rows in stage.engine.steps[-5:]] == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("turns_later", [0, 1, 2, 3, 4])
def test_nothing_more_is_said_of_a_row_released_in_the_middle_and_the_others_go_on(turns_later: int) -> None:
    orders = Draft((order(1, START, b"x", 4), order(1, START, b"y", 6, TWO)))
    stage = Stage([[Prefill((guest(1), guest(2)))], [], [orders], *[[] for _ in range(turns_later)]])
    stage.channel.turns[-1].append(Release((), (ONE,)))
    stage.run()
    assert all(stage.engine.steps), "a step of nobody"
    assert drafts(stage) == [(TWO, 1, drawn(PROMPT + b"y", 6))]


@pytest.mark.parametrize("turns_later", [0, 1, 2])
def test_a_worker_whose_only_order_is_released_in_the_middle_has_nothing_to_do(turns_later: int) -> None:
    stage = Stage([[Prefill((guest(1),))], [], [Draft((order(1, START, b"x", 6),))], *[[] for _ in range(turns_later)]])
    stage.channel.turns[-1].append(Release((), (ONE,)))
    stage.run()
    assert all(stage.engine.steps), "a step of nobody"
    assert drafts(stage) == []


def test_an_error_in_a_draft_loses_that_row_alone_and_refuses_nobody() -> None:
    script = FakeScript(faults=(Fault("decode", "raise", number=2, sequence_number=1),))
    stage = play([guest(1), guest(2)], [Draft((order(1, START, b"x", 6), order(1, START, b"y", 6, TWO)))], script=script)
    assert lost(stage) == [ONE]
    assert drafts(stage) == [(TWO, 1, drawn(PROMPT + b"y", 6))]
    assert not [event for event in stage.channel.events if isinstance(event, Refused)]
    assert report(stage).report.running == (TWO,)


def test_clients_of_the_drafter_decode_beside_the_orders() -> None:
    client = row(2, b"a question", max_tokens=30, ignore_eos=True)
    stage = play([guest(1), client], [Draft((order(1, START, b"x", 8),))])
    assert drafts(stage) == [(ONE, 1, drawn(PROMPT + b"x", 8))]
    assert tuple(tokens_of(stage.channel.events, 2)) == drawn(b"a question", 30)


def test_a_drafter_that_always_disagrees_proposes_nothing_right() -> None:
    script = FakeScript(disagrees_one_in=1)
    ((_, _, proposed),) = drafts(play([guest(1)], [Draft((order(1, START, b"x", 4),))], script=script))
    assert proposed == drawn(PROMPT + b"x", 4, script=script)
    assert proposed[0] != drawn(PROMPT + b"x", 1)[0]
