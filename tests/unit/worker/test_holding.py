"""Held sequences: rounds of one's own proposals, and what hold, resume, release and errors do to a round."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from runtime.protocol.commands import AnyCommand, FakeScript, Fault, Hold, Prefill, Release, Resume, Verify, VerifyRow
from runtime.protocol.events import AnyEvent, Held, Refused, Released, Verified
from runtime.protocol.ids import SequenceId
from tests.unit.worker.rounds import ONE, PROMPT, REPLY, SAYS, START, TWO, WRONG, output, play, right, rounds, said, verify
from tests.unit.worker.stage import Stage, row


def test_a_row_without_proposals_makes_its_own_from_what_it_said_before() -> None:
    prompt = b"one two three. say it: "

    def answer(length: int) -> list[AnyCommand]:
        return [verify(length, length, lookup=4)]

    events = play(row(1, prompt, max_tokens=13), *[answer] * 13)
    assert output(events) == REPLY[:13]
    assert any(one.num_matched == 4 for one in rounds(events))
    assert all(one.num_proposed <= 4 for one in rounds(events))


def test_proposals_that_are_given_go_before_ones_own() -> None:
    (one,) = rounds(play(row(1, b"one two one ", max_tokens=13), lambda length: [verify(1, length, [WRONG], lookup=4)]))
    assert (one.num_proposed, one.num_matched) == (1, 0)


# -- hold, resume, release --------------------------------------------------------------------------------------


def test_a_held_sequence_waits_and_a_resumed_one_goes_on_to_its_end() -> None:
    held = play(row(1, PROMPT, max_tokens=40))
    assert output(held) == REPLY[: len(output(held))] != REPLY
    (told,) = [event for event in held if isinstance(event, Held)]
    assert told.rows == ((ONE, START + len(output(held))),)
    resumed = play(row(1, PROMPT, max_tokens=40), lambda length: [Resume((ONE,))])
    assert (output(resumed), said(resumed)[-1].finish) == (REPLY, "stop")


def test_a_hold_said_twice_is_answered_once_while_a_step_is_under_way_and_again_later() -> None:
    stage = Stage(
        [[Prefill((row(1, PROMPT, max_tokens=40),))], [], [Hold((ONE,)), Hold((ONE,))], [], [], [Hold((ONE, TWO))]], script=SAYS
    )
    answers = [event.rows for event in stage.run() if isinstance(event, Held)]
    assert [len(rows) for rows in answers] == [1, 1]
    assert answers[0] == answers[1]


def test_a_sequence_that_ends_in_its_last_free_step_is_not_said_to_be_held() -> None:
    stage = Stage([[Prefill((row(1, PROMPT, max_tokens=2),))], [], [Hold((ONE,))]], script=SAYS)
    events = stage.run()
    assert output(events) == REPLY[:2]
    assert not [event for event in events if isinstance(event, Held)]


def test_resume_drops_a_round_that_has_not_begun() -> None:
    events = play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, length, right(length, 4)), Resume((ONE,))])
    assert rounds(events) == []
    assert output(events) == REPLY


def test_a_sequence_verified_without_a_hold_takes_its_free_step_first_and_is_held_then() -> None:
    turns: list[list[AnyCommand]] = [[Prefill((row(1, PROMPT, max_tokens=40),))], [], [verify(1, START, right(START, 6))]]
    events = Stage(turns, script=SAYS).run()
    (one,) = rounds(events)
    assert one.num_matched == one.num_proposed == 6 - (one.step.index - START)
    assert output(events) == REPLY[:7]


@pytest.mark.parametrize("turns_later", [0, 1])
def test_nothing_is_said_of_a_sequence_released_in_its_round(turns_later: int) -> None:
    stage = Stage([[Prefill((row(1, PROMPT, max_tokens=40), row(2, PROMPT, max_tokens=40)))], [], [Hold((ONE, TWO))]], script=SAYS)

    def reply(event: AnyEvent) -> Sequence[AnyCommand]:
        if not isinstance(event, Held):
            return []
        asked = Verify(tuple(VerifyRow(sequence, 1, length, tuple(right(length, 3))) for sequence, length in event.rows))
        stage.channel.turns = [[], [asked], *[[] for _ in range(turns_later)]]
        stage.channel.turns[1 + turns_later].append(Release((), (ONE,)))
        return []

    stage.channel.on_send = reply
    events = stage.run()
    assert [(one.step.sequence, one.num_matched) for one in rounds(events)] == [(TWO, 3)]
    assert [event.sequences for event in events if isinstance(event, Released)] == [(ONE,)]
    assert len(stage.engine.steps[-1]) == 2 - (turns_later == 0)


def test_an_error_of_one_row_in_a_round_ends_that_row_alone() -> None:
    fault = Fault("decode", "raise", number=3, sequence_number=1)
    script = FakeScript(reply=REPLY.decode(), faults=(fault,))
    stage = Stage(
        [[Prefill((row(1, PROMPT, max_tokens=40), row(2, PROMPT, max_tokens=40)))], [], [Hold((ONE, TWO))]], script=script
    )
    numbers = itertools.count(1)

    def reply(event: AnyEvent) -> Sequence[AnyCommand]:
        lengths: dict[SequenceId, int] = {}
        if isinstance(event, Held):
            lengths = dict(event.rows)
        elif isinstance(event, Verified):
            lengths = {one.step.sequence: one.step.index + len(one.step.tokens) for one in event.rows}
        number = next(numbers)
        rows = tuple(VerifyRow(sequence, number, length, tuple(right(length, 2))) for sequence, length in lengths.items())
        return [Verify(rows)] if rows and number < 30 else []

    stage.channel.on_send = reply
    events = stage.run()
    (refused,) = [event for event in events if isinstance(event, Refused)]
    assert (refused.command, refused.code, refused.sequences) == ("verify", "generation_failed", (ONE,))
    assert output(events, TWO) == REPLY
    assert REPLY.startswith(output(events, ONE))


def test_rounds_for_the_unknown_and_the_ended_are_passed_over() -> None:
    def answer(length: int) -> list[AnyCommand]:
        return [verify(1, length, right(length, 40)), verify(1, 3, sequence=TWO)]

    events = play(row(1, PROMPT, max_tokens=40), answer, lambda length: [verify(2, length)])
    assert [one.step.finish for one in rounds(events)] == ["stop"]
