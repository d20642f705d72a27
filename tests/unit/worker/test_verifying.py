"""A verify step commits what plain decoding would, whatever was proposed, and what a round says is said once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runtime.engine.fake_text import EOS, VOCABULARY_SIZE
from runtime.protocol.commands import AnyCommand, FakeScript, Grant, Prefill, Resume, Sampling
from runtime.protocol.events import AnyEvent
from tests.unit.worker.rounds import ONE, PROMPT, REPLY, START, WRONG, output, play, right, rounds, said, verify
from tests.unit.worker.stage import Stage, row, tokens_of


def test_right_proposals_stand_and_one_token_more_is_the_targets_own() -> None:
    (one,) = rounds(play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, length, right(length, 4))]))
    assert (one.number, one.num_proposed, one.num_matched) == (1, 4, 4)
    assert bytes(one.step.tokens) == right(one.step.index, 5) == one.step.text.encode()
    assert one.step.finish is None


@pytest.mark.parametrize("num_right", range(4))
def test_nothing_stands_from_the_first_wrong_proposal_on(num_right: int) -> None:
    def answer(length: int) -> list[AnyCommand]:
        proposed = bytearray(right(length, 4))
        proposed[num_right] = WRONG
        return [verify(1, length, proposed)]

    (one,) = rounds(play(row(1, PROMPT, max_tokens=40), answer))
    assert (one.num_proposed, one.num_matched) == (4, num_right)
    assert bytes(one.step.tokens) == right(one.step.index, num_right + 1)


def test_without_proposals_a_round_is_a_plain_step() -> None:
    (one,) = rounds(play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, length)]))
    assert (one.num_proposed, one.num_matched, bytes(one.step.tokens)) == (0, 0, right(one.step.index, 1))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_any_proposals_give_the_tokens_text_and_logprobs_of_plain_decoding(temperature: float, num_tokens: int) -> None:
    script = FakeScript(eos_one_in=60)
    start = row(1, PROMPT, max_tokens=50, sampling=Sampling(temperature=temperature, seed=5, logprobs=2), stop=("~}",))
    plain = Stage([[Prefill((start,))]], script=script).run()
    whole = tokens_of(plain, 1)
    assert len(whole) > 10

    def answer(length: int) -> list[AnyCommand]:
        proposed = whole[length - START :][:num_tokens]
        if length % 3 == 0 and proposed:
            proposed[length % len(proposed)] = WRONG
        return [verify(length, length, proposed)]  # the length rises too

    events = play(start, *[answer] * 50, script=script)
    assert len(rounds(events)) > 3

    def content(found: Sequence[AnyEvent]) -> Any:
        rows = said(found)
        tokens = [token for one in rows for token in one.tokens]
        logprobs = [entry for one in rows for entry in one.logprobs]
        return tokens, "".join(one.text for one in rows), logprobs, rows[-1].finish, rows[-1].matched_stop

    assert content(events) == content(plain)


def test_each_token_of_a_block_has_its_logprobs() -> None:
    start = row(1, PROMPT, max_tokens=40, sampling=Sampling(logprobs=3))
    (one,) = rounds(play(start, lambda length: [verify(1, length, right(length, 2) + b"#")]))
    assert [entry.token for entry in one.step.logprobs] == list(one.step.tokens)
    assert len(one.step.tokens) == 3
    assert all(len(entry.top) == 3 for entry in one.step.logprobs)


# -- proposals for another place --------------------------------------------------------------------------------


def test_proposals_of_a_sequence_that_went_on_lose_what_is_committed() -> None:
    (one,) = rounds(play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, START, right(START, length - START + 3))]))
    assert one.step.index > START
    assert (one.num_proposed, one.num_matched) == (3, 3)
    assert bytes(one.step.tokens) == right(one.step.index, 4)


@pytest.mark.parametrize("base", [START, START - 3, -5])
def test_proposals_that_what_was_committed_contradicts_are_none(base: int) -> None:
    (one,) = rounds(play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, base, b"#" * 12)]))
    assert (one.num_proposed, bytes(one.step.tokens)) == (0, right(one.step.index, 1))


def test_proposals_behind_a_gap_are_none_and_the_sequence_goes_on() -> None:
    (one,) = rounds(play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, length + 1, right(length + 1, 3))]))
    assert (one.num_proposed, bytes(one.step.tokens)) == (0, right(one.step.index, 1))


def test_a_repeated_round_is_answered_the_same_and_an_older_one_not_at_all() -> None:
    def again(length: int) -> list[AnyCommand]:
        return [verify(7, length, right(length, 3)), verify(6, length, right(length, 3))]

    events = play(row(1, PROMPT, max_tokens=40), lambda length: [verify(7, length, right(length, 3))], again)
    first, second = rounds(events)
    assert first == second
    assert REPLY.startswith(bytes(token for one in said(events)[:-1] for token in one.tokens))


def test_neither_a_repeated_nor_an_older_round_holds_what_was_resumed() -> None:
    def resume(length: int) -> list[AnyCommand]:
        return [Resume((ONE,)), verify(7, length), verify(6, length)]

    events = play(row(1, PROMPT, max_tokens=40), lambda length: [verify(7, length)], resume)
    assert [one.number for one in rounds(events)] == [7, 7]
    assert said(events)[-1].finish == "stop"


def test_a_round_asked_for_twice_before_its_step_is_run_once() -> None:
    events = play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, length, right(length, 2))] * 2)
    assert len(rounds(events)) == 1


# -- what may be proposed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [VOCABULARY_SIZE, -1, 1 << 40])
def test_nothing_is_fed_from_the_first_foreign_id_on(foreign: int) -> None:
    def answer(length: int) -> list[AnyCommand]:
        first, second = right(length, 2)
        return [verify(1, length, (first, foreign, second))]

    (one,) = rounds(play(row(1, PROMPT, max_tokens=40), answer))
    assert (one.num_proposed, one.num_matched, len(one.step.tokens)) == (1, 1, 2)


def test_a_round_ends_at_the_limit_and_the_next_waits_for_a_grant() -> None:
    limit = START + 6
    start = row(1, PROMPT, max_tokens=40, limit=limit)
    events = play(
        start,
        lambda length: [verify(1, length, right(length, 10))],
        lambda length: [verify(2, length, right(length, 3))],
    )
    (one,) = rounds(events)
    assert one.step.index + len(one.step.tokens) == limit
    assert one.num_proposed == one.num_matched == len(one.step.tokens) - 1
    granted = play(
        start,
        lambda length: [verify(1, length, right(length, 10))],
        lambda length: [verify(2, length, right(length, 3)), Grant(((ONE, limit + 3),))],
    )
    assert [one.number for one in rounds(granted)] == [1, 2]
    assert (rounds(granted)[1].num_proposed, output(granted)) == (2, REPLY[:9])


def test_a_round_ends_with_length_where_the_sequence_does() -> None:
    events = play(row(1, PROMPT, max_tokens=7), lambda length: [verify(1, length, right(length, 10))])
    (one,) = rounds(events)
    assert (one.step.finish, output(events)) == ("length", REPLY[:7])
    assert one.num_proposed == one.num_matched == len(one.step.tokens) - 1


def test_an_end_token_inside_a_block_ends_the_sequence_and_what_is_right_behind_it_counts_as_matched() -> None:
    script = FakeScript(reply="one two")
    proposed = [*REPLY[:7], EOS, EOS]
    events = play(row(1, PROMPT, max_tokens=40), lambda length: [verify(1, length, proposed[length - START :])], script=script)
    (one,) = rounds(events)
    assert (one.step.finish, one.step.matched_stop, output(events)) == ("stop", None, b"one two")
    assert one.num_matched == one.num_proposed == len(one.step.tokens) + 2


def test_an_ignored_end_token_is_one_like_others() -> None:
    script = FakeScript(reply="one two")
    start = row(1, PROMPT, max_tokens=12, ignore_eos=True)
    proposed = [*REPLY[:7], EOS, EOS]
    (one,) = rounds(play(start, lambda length: [verify(1, length, proposed[length - START :])], script=script))
    assert one.step.tokens[-3:] == (EOS, EOS, EOS)
    assert one.step.finish is None


def test_a_stop_string_inside_a_block_ends_the_sequence_with_the_token_that_completes_it() -> None:
    events = play(row(1, PROMPT, max_tokens=40, stop=("two",)), lambda length: [verify(1, length, right(length, 12))])
    (one,) = rounds(events)
    assert (one.step.finish, one.step.matched_stop) == ("stop", "two")
    assert output(events) == b"one two"
    assert "".join(part.text for part in said(events)) == "one "
    assert one.num_matched == one.num_proposed == 12
