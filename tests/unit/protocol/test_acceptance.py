"""A block of proposals adds to a sequence exactly what one token at a time would have added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.acceptance import Block, accepted, judge_draft, judge_verify, num_proposable, rebase, settle

EOS = 0


@pytest.mark.parametrize(
    ("proposed", "sampled", "num_accepted", "committed"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3, (5, 6, 7, 8)),  # all, and the bonus
        ([5, 6, 7], [5, 9, 7, 8], 1, (5, 9)),  # what follows the first difference was sampled after a wrong token
        ([5, 6, 7], [4, 6, 7, 8], 0, (4,)),
        ([], [3], 0, (3,)),  # nothing proposed: a plain step
    ],
)
def test_proposals_stand_while_they_equal_their_samples(
    proposed: list[int], sampled: list[int], num_accepted: int, committed: tuple[int, ...]
) -> None:
    assert accepted(proposed, sampled) == (num_accepted, committed)


@pytest.mark.parametrize("sampled", [[], [5, 6], [5, 6, 7, 8]])
def test_a_wrong_number_of_samples_is_refused(sampled: list[int]) -> None:
    with pytest.raises(ValueError, match="2 proposals need 3 samples"):
        accepted([5, 6], sampled)


def cut(sampled: list[int], *, max_length: int = 100, limit: int = 100, stop_length: int | None = None) -> Block:
    """A wholly accepted block at base 10."""
    return settle(10, sampled[:-1], sampled, eos_ids={EOS}, max_length=max_length, limit=limit, stop_length=stop_length)


def test_the_end_token_inside_an_accepted_block_ends_it_there_and_is_not_listed() -> None:
    assert cut([5, EOS, 7, 8]) == Block(10, (5,), 3, "stop")
    assert cut([5, EOS, 7, 8]).length == 11
    assert cut([5, EOS, 7, 8]).num_accepted == 1


def test_an_end_token_that_is_to_be_ignored_is_a_token() -> None:
    assert settle(10, [5, EOS], [5, EOS, 7], eos_ids=(), max_length=100, limit=100) == Block(10, (5, EOS, 7), 2)


def test_the_greatest_length_ends_it_and_a_limit_only_pauses_it() -> None:
    assert cut([5, 6, 7, 8], max_length=12) == Block(10, (5, 6), 3, "length")
    assert cut([5, 6, 7, 8], limit=12) == Block(10, (5, 6), 3, None)
    assert cut([5, 6, 7, 8], limit=10) == Block(10, (), 3, None)


def test_an_end_token_behind_the_greatest_length_is_never_reached() -> None:
    assert cut([5, 6, EOS, 8], max_length=12) == Block(10, (5, 6), 3, "length")
    assert cut([5, 6, EOS, 8], limit=12) == Block(10, (5, 6), 3, None)


def test_the_token_that_completes_a_stop_string_is_committed_and_ends_it_even_at_the_greatest_length() -> None:
    assert cut([5, 6, 7, 8], stop_length=12, max_length=12) == Block(10, (5, 6), 3, "stop")
    assert cut([5, 6, 7, 8], stop_length=12, limit=11) == Block(10, (5,), 3, None)


class Plain:
    """Decoding one token at a time: `draw` is what the model says after a context."""

    def __init__(self, draw: Callable[[list[int]], int], max_length: int, stop_length: int | None) -> None:
        self.draw, self.max_length, self.stop_length = draw, max_length, stop_length
        self.tokens: list[int] = [1]
        self.finish: str | None = None

    def step(self, limit: int) -> bool:
        if self.finish is not None or len(self.tokens) >= min(limit, self.max_length):
            return False
        token = self.draw(self.tokens)
        if token == EOS:
            self.finish = "stop"
            return False
        self.tokens.append(token)
        if len(self.tokens) == self.stop_length:
            self.finish = "stop"
        elif len(self.tokens) == self.max_length:
            self.finish = "length"
        return self.finish is None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_rounds_of_any_proposals_say_what_plain_decoding_says(data: st.DataObject) -> None:
    seed, eos_one_in = data.draw(st.integers(0, 99)), data.draw(st.integers(3, 30))

    def draw(context: list[int]) -> int:
        mixed = hash((seed, *context[-3:], len(context)))
        return EOS if mixed % eos_one_in == 0 else 1 + mixed % 4

    max_length = data.draw(st.integers(2, 30))
    stop_length = data.draw(st.none() | st.integers(2, 30))
    plain = Plain(draw, max_length, stop_length)
    tokens, finish = [1], None
    for limit in [*sorted(data.draw(st.lists(st.integers(1, 30), max_size=4))), max_length]:
        while plain.step(limit):
            pass
        while finish is None and len(tokens) < min(limit, max_length):
            base = len(tokens)
            asked = min(data.draw(st.integers(0, 8)), num_proposable(base, max_length=max_length, limit=limit))
            proposed: list[int] = []
            for _ in range(asked):
                is_good = data.draw(st.integers(0, 3)) > 0
                proposed.append(draw([*tokens, *proposed]) if is_good else data.draw(st.integers(0, 4)))
            sampled = [draw([*tokens, *proposed[:number]]) for number in range(asked + 1)]
            block = settle(base, proposed, sampled, eos_ids={EOS}, max_length=max_length, limit=limit, stop_length=stop_length)
            assert block.tokens or block.finish, "a round always gets on"
            assert 0 <= block.num_accepted <= block.num_matched <= asked
            tokens += block.tokens
            finish = block.finish
            assert block.length == len(tokens) <= limit
        assert (tokens, finish) == (plain.tokens, plain.finish)


@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 20), st.integers(0, 8))
def test_proposals_are_asked_for_only_where_they_can_be_committed(base: int, max_length: int, limit: int, extra: int) -> None:
    asked = num_proposable(base, max_length=max_length, limit=limit)
    useful = settle(base, [5] * asked, [5] * (asked + 1), eos_ids=(), max_length=max_length, limit=limit)
    more = asked + extra
    assert useful.num_accepted == asked or asked == 0
    if base < min(limit, max_length):
        assert len(useful.tokens) == asked + 1
        assert len(settle(base, [5] * more, [5] * (more + 1), eos_ids=(), max_length=max_length, limit=limit).tokens) == asked + 1


def test_a_late_draft_is_good_for_what_was_not_decided_without_it() -> None:
    assert rebase(10, [5, 6, 7], 10, []) == (5, 6, 7)
    assert rebase(10, [5, 6, 7], 12, [5, 6]) == (7,)
    assert rebase(10, [5, 6, 7], 12, [5, 9]) == ()
    assert rebase(10, [5, 6, 7], 14, [5, 6, 7, 8]) == ()
    with pytest.raises(ValueError, match="do not reach"):
        rebase(10, [5], 12, [5])


def test_a_target_runs_each_round_once_and_only_at_its_own_length() -> None:
    assert judge_verify(4, 20, last_number=3, length=20) == "run"
    assert judge_verify(3, 17, last_number=3, length=20) == "repeat"
    assert judge_verify(2, 20, last_number=3, length=20) == "stale"
    assert judge_verify(4, 18, last_number=3, length=20) == "behind"
    assert judge_verify(4, 21, last_number=3, length=20) == "gap"


def test_a_drafter_runs_each_round_once_and_never_over_a_hole() -> None:
    assert judge_draft(4, 18, last_number=3, length=20) == "run"
    assert judge_draft(4, 20, last_number=3, length=20) == "run"
    assert judge_draft(3, 18, last_number=3, length=20) == "repeat"
    assert judge_draft(2, 18, last_number=3, length=20) == "stale"
    assert judge_draft(4, 21, last_number=3, length=20) == "gap"
