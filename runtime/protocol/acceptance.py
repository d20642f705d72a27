"""What becomes of a block of proposed tokens? The arithmetic that target, drafter and host must agree on; ids and positions only.

Acceptance is by sample match: the target samples at every position of the block, with the draw that position has in plain
decoding, and keeps proposals while they are what it sampled. The first sample that differs, or the one after the last
proposal (the bonus), is right in any case. So what is committed is what plain decoding would have sampled, whatever was proposed.

A block's `base` is the sequence's committed length: proposed[i] and sampled[i] are for absolute position base + i. The target
feeds the token at base - 1 and the proposals, and samples after each: one sample more than proposals.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.protocol.events import FinishReason

Verdict = Literal["run", "repeat", "stale", "behind", "gap"]


@dataclass(frozen=True, slots=True)
class Block:
    """What one verify adds to a sequence.

    tokens: committed, from position `base`; an end-of-sequence token is never among them. num_matched: proposals equal to
    their samples, also beyond a cut: the measure of the drafter. num_accepted: proposals among `tokens`: the measure of use.
    """

    base: int
    tokens: tuple[int, ...]
    num_matched: int
    finish: FinishReason | None = None

    @property
    def length(self) -> int:
        """Committed length afterwards, to which the target truncates itself; its last token need not stay fed."""
        return self.base + len(self.tokens)

    @property
    def num_accepted(self) -> int:
        return min(self.num_matched, len(self.tokens))


def accepted(proposed: Sequence[int], sampled: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How many proposals stand, and the tokens to commit: those and the target's own next one.

    :raises ValueError: not exactly one sample more than proposals.
    """
    if len(sampled) != len(proposed) + 1:
        raise ValueError(f"{len(proposed)} proposals need {len(proposed) + 1} samples, not {len(sampled)}")
    num_matched = num_common(proposed, sampled)
    return num_matched, tuple(sampled[: num_matched + 1])


def settle(
    base: int,
    proposed: Sequence[int],
    sampled: Sequence[int],
    *,
    eos_ids: Collection[int],
    max_length: int,
    limit: int,
    stop_length: int | None = None,
) -> Block:
    """Accept, then cut where plain decoding would have ended or paused: whichever comes first.

    eos_ids: empty when they are ignored. max_length: absolute length that finishes with "length". limit: granted absolute
    length; reaching it is no finish, the sequence waits there. stop_length: absolute length with which a stop string is complete
    (the token that completes it is committed). A token that does both ends with "stop".

    :raises ValueError: see `accepted`.
    """
    num_matched, tokens = accepted(proposed, sampled)
    room = max(0, min(max_length, limit) - base)
    finish: FinishReason | None = None
    for number, token in enumerate(tokens[:room]):
        if token in eos_ids:
            return Block(base, tokens[:number], num_matched, "stop")
        if base + number + 1 == stop_length:
            return Block(base, tokens[: number + 1], num_matched, "stop")
    tokens = tokens[:room]
    if base + len(tokens) >= max_length:
        finish = "length"
    return Block(base, tokens, num_matched, finish)


def num_proposable(base: int, *, max_length: int, limit: int) -> int:
    """How many proposals can be of use at `base`: the sample after the last one must still be within what is granted.

    0 means a plain step, or none when nothing is granted (`limit` or `max_length` is reached).
    """
    return max(0, min(max_length, limit) - base - 1)


def rebase(base: int, proposed: Sequence[int], length: int, committed_since: Sequence[int]) -> tuple[int, ...]:
    """What is left of proposals for `base` on, now that the sequence has `length` tokens; the first is for position `length`.

    committed_since: the tokens at positions base..length-1. Empty when they are not what was proposed. The same question for
    a draft that comes late (the target went on alone) and for one made ahead (from the drafter's guess of the bonus token).

    :raises ValueError: `committed_since` does not reach from `base` to `length`.
    """
    if base + len(committed_since) != length:
        raise ValueError(f"{len(committed_since)} tokens do not reach from position {base} to {length}")
    if num_common(proposed, committed_since) < len(committed_since):
        return ()
    return tuple(proposed[len(committed_since) :])


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    number = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        number += 1
    return number


def judge_verify(number: int, base: int, *, last_number: int, length: int) -> Verdict:
    """What a target does with round `number` for a sequence of committed `length`; `last_number` is the last it ran (0: none).

    "run": verify. "repeat": that round is done, send its answer again. "stale": an older round, drop it. "behind": a new round
    for an old position, because the target went on alone; `rebase` says what is left of it. "gap": about tokens the target
    has not got; the sender is wrong, refuse it.
    """
    if number <= last_number:
        return "repeat" if number == last_number else "stale"
    if base == length:
        return "run"
    return "behind" if base < length else "gap"


def judge_draft(number: int, base: int, *, last_number: int, length: int) -> Verdict:
    """What a drafter whose cache holds `length` tokens does with round `number`, truncating to `base`; never "behind".

    "gap": it lost what the sender thinks it holds (a new incarnation, an evicted row); refused, so that the sender starts over.
    """
    if number <= last_number:
        return "repeat" if number == last_number else "stale"
    return "run" if base <= length else "gap"
