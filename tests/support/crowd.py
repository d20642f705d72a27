"""Drives an engine as a worker does, with a crowd of rows that join and leave at random, and one row alone as plainly as can be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.engine import lm
from runtime.engine.engine import Engine, Loaded, PendingStep, RowStep
from runtime.protocol.commands import Load, Sampling
from runtime.protocol.ids import SequenceId


@dataclass(frozen=True)
class Guest:
    """One sequence: its prompt, its options, and how many tokens it stays for."""

    sequence: SequenceId
    prompt: list[int]
    sampling: Sampling
    num_tokens: int


@dataclass
class Evening:
    """What everyone said, and how full the house was at most."""

    said: dict[SequenceId, list[int]] = field(default_factory=dict)
    most_at_once: int = 0


def load_engine(directory: Path, **options: object) -> Loaded:
    return lm.load(Load("tiny", str(directory), **options), lambda stage, done, total: None)  # type: ignore[arg-type]


def make_guests(seed: int, num_guests: int, lengths: Sequence[int], *, greedy: bool = False, num_tokens: int = 24) -> list[Guest]:
    rng = random.Random(seed)
    guests = []
    for number in range(num_guests):
        sampling = Sampling() if greedy or rng.random() < 0.3 else _sampling(rng)
        prompt = [rng.randrange(256) for _ in range(rng.choice(lengths))]
        guests.append(Guest(SequenceId(number), prompt, sampling, rng.randint(1, num_tokens)))
    return guests


def _sampling(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.6, 1.0]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        logit_bias=rng.choice([(), ((65, 3.0),)]),
        seed=rng.getrandbits(64),
        logprobs=rng.choice([-1, -1, 2]),
    )


def add(engine: Engine, guest: Guest) -> None:
    engine.add(
        guest.sequence,
        guest.sampling,
        prompt_length=len(guest.prompt),
        context=guest.prompt,
        max_length=len(guest.prompt) + guest.num_tokens,
    )


def run_alone(engine: Engine, guest: Guest) -> list[int]:
    """The whole prompt in one step, then token by token, nobody else there, every result awaited before the next step."""
    add(engine, guest)
    said: list[int] = []
    step = RowStep(guest.sequence, guest.prompt, 1)
    while len(said) < guest.num_tokens:
        (result,) = engine.step([step]).result()
        assert result.error is None, result.error
        said += result.tokens
        step = RowStep(guest.sequence, None, 1)
    engine.release([guest.sequence])
    return said


def run_crowd(engine: Engine, guests: Sequence[Guest], seed: int, *, longest_chunk: int, pausing: float = 0.1) -> Evening:
    """Everybody at random times, prompts in random chunks, decoding with a look-ahead of one step and random pauses."""
    rng = random.Random(seed)
    evening = Evening({guest.sequence: [] for guest in guests})
    waiting = list(guests)
    fed: dict[SequenceId, int] = {}
    here: dict[SequenceId, Guest] = {}
    decoding: list[SequenceId] = []
    pending: PendingStep | None = None
    while waiting or fed or decoding or pending is not None:
        if waiting and rng.random() < 0.5:
            count = rng.randint(1, 8)
            for guest in waiting[:count]:
                add(engine, guest)
                here[guest.sequence], fed[guest.sequence] = guest, 0
            waiting = waiting[count:]
            evening.most_at_once = max(evening.most_at_once, len(fed) + len(decoding))
        chunks = [_next_chunk(here[sequence], fed, rng.randint(1, longest_chunk)) for sequence in list(fed) if rng.random() < 0.9]
        if chunks:
            _listen(engine.step(chunks), here, evening)
            decoding += [chunk.sequence for chunk in chunks if chunk.num_samples]
        active = [sequence for sequence in decoding if rng.random() > pausing]
        following = engine.step([RowStep(sequence, None, 1) for sequence in active]) if active else None
        if pending is not None:
            _listen(pending, here, evening)
        pending = following
        done = [sequence for sequence in decoding if len(evening.said[sequence]) >= here[sequence].num_tokens]
        if done:
            engine.release(done)  # also while a look-ahead of theirs is under way
            decoding = [sequence for sequence in decoding if sequence not in done]
    return evening


def _next_chunk(guest: Guest, fed: dict[SequenceId, int], width: int) -> RowStep:
    begin = fed[guest.sequence]
    chunk = guest.prompt[begin : begin + width]
    fed[guest.sequence] += len(chunk)
    is_last = fed[guest.sequence] == len(guest.prompt)
    if is_last:
        del fed[guest.sequence]
    return RowStep(guest.sequence, chunk, int(is_last))


def _listen(pending: PendingStep, here: dict[SequenceId, Guest], evening: Evening) -> None:
    for result in pending.result():
        assert result.error is None, result.error
        said = evening.said[result.sequence]
        if len(said) < here[result.sequence].num_tokens:
            said += result.tokens
            for token, logprob in zip(result.tokens, result.logprobs, strict=False):
                assert logprob.token == token
