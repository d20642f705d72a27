"""Drives an engine with rows that verify proposals, rows that decode plainly and prompts in chunks, all in the same steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.engine.engine import Engine, PendingStep, RowResult, RowStep
from runtime.protocol.events import TokenLogprob
from runtime.protocol.ids import SequenceId
from tests.support.crowd import Guest, add

Propose = Callable[[random.Random, Sequence[int], int], list[int]]
"""(random source, the tokens that will be right, how many) → proposals."""


def perfect(rng: random.Random, right: Sequence[int], num: int) -> list[int]:
    return list(right[:num])


def at_random(rng: random.Random, right: Sequence[int], num: int) -> list[int]:
    return [rng.randrange(256) for _ in range(num)]


def partly_right(rng: random.Random, right: Sequence[int], num: int) -> list[int]:
    num_right = rng.randint(0, num)
    return [*right[:num_right], *at_random(rng, right, num)][:num]


@dataclass
class Said:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, result: RowResult, num: int) -> None:
        self.tokens += result.tokens[:num]
        self.logprobs += result.logprobs[:num]


@dataclass
class Evening:
    """What everyone said; how many blocks were verified, tokens proposed and accepted; blocks and rows in the fullest step."""

    said: dict[SequenceId, Said] = field(default_factory=dict)
    num_blocks: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    most_blocks_at_once: int = 0
    most_rows_at_once: int = 0


def say_alone(engine: Engine, guest: Guest) -> Said:
    """Plain decoding: nobody else there, every result awaited."""
    add(engine, guest)
    said = Said()
    step = RowStep(guest.sequence, guest.prompt, 1)
    while len(said.tokens) < guest.num_tokens:
        (result,) = engine.step([step]).result()
        assert result.error is None, result.error
        said.add(result, 1)
        step = RowStep(guest.sequence, None, 1)
    engine.release([guest.sequence])
    return said


class Host:
    """Everybody comes and goes at random; who is here verifies or decodes at random, with a look-ahead of one step.

    right: what each says alone, and beyond, for proposals. A row whose block is under way takes no part in the next step.
    """

    def __init__(
        self, engine: Engine, guests: Sequence[Guest], right: dict[SequenceId, Said], seed: int, propose: Propose, *, most: int = 8
    ) -> None:
        self.evening = Evening({guest.sequence: Said() for guest in guests})
        self._engine, self._right, self._propose, self._most = engine, right, propose, most
        self._rng = random.Random(seed)
        self._waiting = list(guests)
        self._here: dict[SequenceId, Guest] = {}
        self._num_fed: dict[SequenceId, int] = {}
        self._verifying: dict[SequenceId, list[int]] = {}
        self._ahead: set[SequenceId] = set()

    def run(self) -> Evening:
        pending: PendingStep | None = None
        while self._waiting or self._here or pending is not None:
            self._let_in()
            if pending is not None and self._rng.random() < 0.5:
                self._listen(pending)
                pending = None
            steps = self._steps()
            following = self._engine.step(steps) if steps else None
            if pending is not None:
                self._listen(pending)
            pending = following
        return self.evening

    def _let_in(self) -> None:
        if len(self._here) < self._most and self._rng.random() < 0.5:
            count = self._rng.randint(1, self._most - len(self._here))
            for guest in self._waiting[:count]:
                add(self._engine, guest)
                self._here[guest.sequence], self._num_fed[guest.sequence] = guest, 0
            del self._waiting[:count]

    def _steps(self) -> list[RowStep]:
        self._ahead, under_way = set(), self._ahead
        steps = [step for guest in self._here.values() if (step := self._step(guest, under_way)) is not None]
        self._rng.shuffle(steps)
        self.evening.most_rows_at_once = max(self.evening.most_rows_at_once, len(steps))
        num_blocks = sum(step.num_samples > 1 for step in steps)
        self.evening.most_blocks_at_once = max(self.evening.most_blocks_at_once, num_blocks)
        self._ahead |= {step.sequence for step in steps if step.num_samples == 1}
        return steps

    def _step(self, guest: Guest, under_way: set[SequenceId]) -> RowStep | None:
        sequence, rng = guest.sequence, self._rng
        num_fed, num_prompt = self._num_fed[sequence], len(guest.prompt)
        said = self.evening.said[sequence].tokens
        if sequence in self._verifying or rng.random() < 0.1:
            return None
        if num_fed < num_prompt:
            chunk = guest.prompt[num_fed : num_fed + rng.randint(1, 30)]
            self._num_fed[sequence] += len(chunk)
            return RowStep(sequence, chunk, int(num_fed + len(chunk) == num_prompt))
        if rng.random() < 0.3 or num_prompt + len(said) != self._engine.length(sequence) + 1:
            return RowStep(sequence, None, 1)  # perhaps a second one under way
        right = self._right[sequence].tokens[len(said) :]
        proposed = self._propose(rng, right, rng.randint(1, 8))
        self._verifying[sequence] = proposed
        self.evening.num_blocks += 1
        self.evening.num_proposed += len(proposed)
        return RowStep(sequence, [said[-1], *proposed], len(proposed) + 1)

    def _listen(self, pending: PendingStep) -> None:
        for result in pending.result():
            sequence = result.sequence
            guest, said = self._here.get(sequence), self.evening.said[sequence]
            if guest is None:
                continue  # a look-ahead of one who has left
            assert result.error is None, result.error
            proposed = self._verifying.pop(sequence, None)
            if proposed is None:
                said.add(result, 1)
            else:
                self._accept(guest, said, proposed, result)
            if len(said.tokens) >= guest.num_tokens:
                del said.tokens[guest.num_tokens :], said.logprobs[guest.num_tokens :]
                del self._here[sequence]
                self._engine.release([sequence])

    def _accept(self, guest: Guest, said: Said, proposed: list[int], result: RowResult) -> None:
        assert len(result.tokens) == len(proposed) + 1
        num_accepted = 0
        while num_accepted < len(proposed) and result.tokens[num_accepted] == proposed[num_accepted]:
            num_accepted += 1
        self.evening.num_accepted += num_accepted
        said.add(result, num_accepted + 1)
        if num_accepted < len(proposed) or self._rng.random() < 0.3:
            self._engine.truncate(guest.sequence, len(guest.prompt) + len(said.tokens) - 1)
