"""The follower never counts on a token that the drafter does not hold, whatever messages are lost, late or repeated."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.acceptance import accepted, judge_draft
from runtime.scheduler.rounds import DraftOrder, Follower


def following(order: DraftOrder, proposed: list[int], committed: list[int], length: int, num_held: int = 0) -> Follower:
    follower = Follower(range(length), num_held)
    assert follower.order(order.number) == order
    assert follower.drafted(order.number, proposed)
    follower.commit(length, committed)
    return follower


def test_the_first_order_feeds_everything_the_drafter_does_not_hold() -> None:
    assert Follower([5, 6, 7]).order(1) == DraftOrder(1, 0, (5, 6, 7))
    assert Follower([5, 6, 7], num_held=2).order(1) == DraftOrder(1, 2, (7,))
    assert Follower([5, 6, 7], num_held=3).order(1) == DraftOrder(1, 2, (7,))  # nothing can be proposed without feeding a token
    assert Follower([5, 6, 7], num_held=3).order(1).start == 3


def test_after_a_wholly_accepted_block_two_tokens_are_fed() -> None:
    follower = following(DraftOrder(1, 0, (0, 1, 2)), [3, 4, 5], [3, 4, 5, 6], 3)
    assert follower.order(2) == DraftOrder(2, 5, (5, 6))


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_after_a_rejection_the_drafter_goes_back_to_it_and_is_fed_one_token(num_right: int) -> None:
    follower = following(DraftOrder(1, 0, (0, 1, 2)), [3, 4, 5], [*range(3, 3 + num_right), 99], 3)
    assert follower.order(2) == DraftOrder(2, 3 + num_right, (99,))


def test_an_order_that_was_never_answered_may_be_replaced() -> None:
    follower = following(DraftOrder(1, 0, (0, 1, 2)), [3, 4], [3, 4, 5], 3)
    lost = follower.order(2)
    assert follower.order(3) == DraftOrder(3, lost.base, lost.commit)
    assert not follower.drafted(2, [6, 7]), "the answer to the lost one comes after all"
    assert follower.is_waiting
    assert follower.drafted(3, [6, 7])


def test_an_answer_is_taken_once() -> None:
    follower = Follower([0, 1])
    follower.order(1)
    assert follower.drafted(1, [2, 3])
    assert not follower.drafted(1, [2, 3])
    assert follower.guess == (2, 3)


def test_a_commit_that_comes_twice_changes_nothing_and_a_gap_is_an_error() -> None:
    follower = following(DraftOrder(1, 0, (0, 1)), [2, 3, 4], [2, 3], 2)
    held, guess = follower.num_held, follower.guess
    assert follower.commit(2, [2, 3])
    assert (follower.length, follower.num_held, follower.guess) == (4, held, guess)
    with pytest.raises(ValueError, match="2 are missing"):
        follower.commit(6, [9])


def test_a_hit_of_the_draft_ahead_makes_the_next_draft_free() -> None:
    follower = Follower([0, 1])
    follower.order(1)
    follower.drafted(1, [2, 3])
    assert follower.order(2, ahead=True) == DraftOrder(2, 3, (3,))
    assert follower.drafted(2, [4, 5, 6])
    assert follower.commit(2, [2, 3, 4]), "the target's bonus token is what the drafter guessed"
    assert follower.guess == (5, 6)
    assert follower.order(3, ahead=True) == DraftOrder(3, 6, (6,))


def test_a_miss_of_the_draft_ahead_costs_a_truncate() -> None:
    follower = Follower([0, 1])
    follower.order(1)
    follower.drafted(1, [2, 3])
    follower.order(2, ahead=True)
    assert not follower.commit(2, [2, 9]), "a proposal was rejected while the drafter built on it"
    assert not follower.drafted(2, [4, 5, 6])
    assert follower.order(3) == DraftOrder(3, 3, (9,))


def test_an_answer_overtaken_by_the_target_is_good_for_what_is_left_of_it() -> None:
    follower = Follower([0, 1])
    follower.order(1)
    follower.commit(2, [2, 3])
    assert follower.drafted(1, [2, 3, 4])
    assert follower.guess == (4,)
    late = Follower([0, 1])
    late.order(1)
    late.commit(2, [2, 7])
    assert not late.drafted(1, [2, 3, 4])
    assert late.order(2) == DraftOrder(2, 3, (7,))


def test_round_numbers_only_rise_and_nothing_cannot_be_followed() -> None:
    follower = Follower([0], number=4)
    with pytest.raises(ValueError, match="only rise"):
        follower.order(4)
    for committed, num_held in (([], 0), ([1], 2), ([1], -1)):
        with pytest.raises(ValueError, match="cannot hold"):
            Follower(committed, num_held)


class Drafter:
    """A cache of tokens, and what comes next as a hash that is sometimes the target's."""

    def __init__(self, skill: int) -> None:
        self.cache: list[int] = []
        self.skill = skill
        self.last_number = 0
        self.answer: list[int] = []

    def receive(self, order: DraftOrder, count: int) -> tuple[int, list[int]] | None:
        match judge_draft(order.number, order.base, last_number=self.last_number, length=len(self.cache)):
            case "repeat":
                return order.number, self.answer
            case "stale":
                return None
            case "run":
                pass
            case verdict:
                raise AssertionError(f"{verdict}: base {order.base} with {len(self.cache)} held")
        del self.cache[order.base :]
        self.cache += order.commit
        self.answer, self.last_number = [], order.number
        for number in range(count):
            if number:
                self.cache.append(self.answer[-1])
            token = target(self.cache)
            self.answer.append(token if hash((len(self.cache), self.skill)) % 10 < self.skill else 50)
        return order.number, self.answer


def target(context: list[int]) -> int:
    return hash((*context[-2:], len(context))) % 4


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_is_lost_late_or_repeated_the_drafter_holds_what_is_counted_on(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    follower, drafter = Follower(tokens), Drafter(data.draw(st.sampled_from([0, 5, 8, 10])))
    number, on_the_way, answers, said = 0, list[tuple[DraftOrder, int]](), list[tuple[int, list[int]]](), list[tuple[int, int]]()
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["order", "ahead", "arrive", "repeat", "answer", "verify", "plain", "lose", "again"])):
            case "order" | "ahead" as kind:
                number += 1
                on_the_way.append((follower.order(number, ahead=kind == "ahead"), data.draw(st.integers(0, 4))))
            case "arrive" if on_the_way:
                answer = drafter.receive(*on_the_way.pop(0))
                answers += [answer] if answer else []
            case "repeat" if on_the_way:
                answer = drafter.receive(*on_the_way[data.draw(st.integers(0, len(on_the_way) - 1))])
                answers += [answer] if answer else []
            case "answer" if answers:
                answer = answers.pop(data.draw(st.integers(0, len(answers) - 1)))
                if data.draw(st.booleans()):
                    answers.append(answer)
                follower.drafted(*answer)
            case "lose":
                del (on_the_way if data.draw(st.booleans()) else answers)[:1]
            case "verify":
                proposed = follower.guess[: data.draw(st.integers(0, 4))]
                sampled = [target([*tokens, *proposed[:count]]) for count in range(len(proposed) + 1)]
                committed = accepted(proposed, sampled)[1]
                said.append((len(tokens), len(committed)))
                tokens += committed
                follower.commit(said[-1][0], committed)
            case "plain":
                tokens.append(target(tokens))
                follower.commit(len(tokens) - 1, tokens[-1:])
            case "again" if said:
                index, count = data.draw(st.sampled_from(said))
                follower.commit(index, tokens[index : index + count])
        text = [*tokens, *follower.guess]
        assert follower.length == len(tokens)
        assert follower.num_held <= len(text)
        assert drafter.cache[: follower.num_held] == text[: follower.num_held]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_perfect_drafter_is_never_rejected_and_holds_no_wrong_token(count: int) -> None:
    tokens, drafter = [0, 1, 2], Drafter(10)
    follower = Follower(tokens)
    for number in range(1, 30):
        answer = drafter.receive(follower.order(number), count)
        assert answer is not None
        assert follower.drafted(*answer)
        assert len(follower.guess) == count
        proposed = follower.guess
        num_accepted, committed = accepted(proposed, [target([*tokens, *proposed[:taken]]) for taken in range(count + 1)])
        assert num_accepted == count
        follower.commit(len(tokens), committed)
        tokens += committed
        assert drafter.cache == tokens[: len(drafter.cache)]
