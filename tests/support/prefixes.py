"""Rows whose prefixes are computed, exported and restored, step by awaited step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from runtime.engine.engine import Engine, RowStep
from runtime.engine.layers import kinds_of
from runtime.engine.lm_engine import LmEngine
from runtime.engine.prefix_parts import PrefixPart
from runtime.engine.selftest import prove
from runtime.protocol.commands import Sampling
from runtime.protocol.events import TokenLogprob
from runtime.protocol.ids import SequenceId
from tests.support.crowd import Guest, add
from tests.support.tiny import VOCABULARY_SIZE

BLOCK = 8
GREEDY = Sampling(logprobs=2)
PENALISED = Sampling(
    temperature=0.9, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4, top_p=0.95, seed=77, logprobs=2
)
NUM_TOKENS = 8
A, B, C, D = SequenceId(1), SequenceId(2), SequenceId(3), SequenceId(4)

Said = list[tuple[int, TokenLogprob]]


def prompt_of(length: int, seed: int = 3) -> list[int]:
    return [(seed * index * index + 7 * index + seed) % 256 for index in range(length)]


def guest(sequence: SequenceId, length: int, sampling: Sampling = GREEDY, seed: int = 3) -> Guest:
    return Guest(sequence, prompt_of(length, seed), sampling, NUM_TOKENS)


def feed(engine: Engine, sequence: SequenceId, tokens: Sequence[int] | None, num_samples: int = 0) -> Said:
    (result,) = engine.step([RowStep(sequence, tokens, num_samples)]).result()
    assert result.error is None, result.error
    return list(zip(result.tokens, result.logprobs, strict=True))


def finish(engine: Engine, one: Guest) -> Said:
    """Feed what is left of the prompt and decode, alone; tokens with their log-probabilities, which show every bit."""
    said = feed(engine, one.sequence, one.prompt[engine.length(one.sequence) :], 1)
    while len(said) < one.num_tokens:
        said += feed(engine, one.sequence, None, 1)
    engine.release([one.sequence])
    return said


def computed(engine: Engine, one: Guest, ends: Sequence[int]) -> list[PrefixPart]:
    """Feed the prompt in chunks up to each of `ends`, and export each when the row stands there."""
    add(engine, one)
    parts: list[PrefixPart] = []
    for end in ends:
        start = parts[-1].end if parts else 0
        feed(engine, one.sequence, one.prompt[start:end])
        export = engine.export(one.sequence, start, end)
        assert export.missing == ()
        parts.append(export.part)
    return parts


def as_from_file(part: PrefixPart) -> PrefixPart:
    """What a reader brings: plain bytes."""
    return replace(part, arrays=tuple(replace(array, data=bytes(array.buffer())) for array in part.arrays))


def engine_of(model: Any) -> LmEngine:
    kinds = kinds_of(model)
    proof = prove(model, kinds, VOCABULARY_SIZE)
    return LmEngine(
        model,
        kinds,
        proof.capabilities,
        vocabulary_size=VOCABULARY_SIZE,
        context_length=2048,
        tap=proof.tap,
        layout=proof.layout,
    )
