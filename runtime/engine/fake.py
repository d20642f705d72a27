"""An Engine without a model: deterministic, quick to start, misbehaving on request. For tests of everything else.

Its next token depends on every id fed to the row (`fake_draw.py`). Scripted times run like a device's queue: a step is
ready some time after the one before it, and `result` waits for that. Scripted faults happen in `result`, on the thread
that takes it, as a real engine's would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal

import msgspec

from runtime.engine import fake_draw
from runtime.engine.engine import Loaded, LoadError, Progress, RowError, RowResult, RowStep
from runtime.engine.fake_faults import Faults, Participant, print_garbage
from runtime.engine.fake_text import EOS, EOS_IDS, VOCABULARY_SIZE, FakeTokenizer
from runtime.engine.fake_trace import Trace
from runtime.engine.prefix_parts import Export, PrefixArray, PrefixField, PrefixLayout, PrefixPart, check_chain, cut_part
from runtime.protocol.commands import FakeScript, Fault, Load, Sampling
from runtime.protocol.events import Capabilities, ModelFacts, TokenLogprob
from runtime.protocol.ids import SequenceId

BYTES_PER_TOKEN: Final = 64
LAYOUT: Final = PrefixLayout((PrefixField(0, "entries", "tokens", "U8", (1, fake_draw.ENTRY_BYTES)),))
_LOAD_SLICE_SECONDS = 0.05
_ROW_ACTIONS = ("raise", "nonfinite")


@dataclass(slots=True)
class _Row:
    number: int  # from 1, in order of `add`
    context: fake_draw.Context
    known: Sequence[int]  # feeding below its length is prefill
    prompt_length: int
    key: bytes
    with_position: bool
    num_logprobs: int
    drawn: dict[int, int] = field(default_factory=dict)
    """Tokens drawn, by position. Those behind a truncation's length are forgotten."""


class _FakeStep:
    def __init__(self, engine: FakeEngine, results: list[RowResult], faults: list[Fault], ready_at: float) -> None:
        self._engine = engine
        self._results = results
        self._faults = faults
        self._ready_at = ready_at

    def result(self) -> list[RowResult]:
        """:raises ScriptedFault: a fault "raise" that names no sequence."""
        if self._ready_at:
            time.sleep(max(0.0, self._ready_at - time.monotonic()))
        for fault in self._faults:
            if fault.action in _ROW_ACTIONS and (fault.sequence_number is not None or fault.action == "nonfinite"):
                self._results = [self._engine._fail_row(result, fault) for result in self._results]
            else:
                self._engine.faults.happen(fault)
        if self._engine.trace is not None:
            self._engine.trace.note("end")
        return self._results


class FakeEngine:
    """See the `Engine` protocol. `context_length`: tokens a row may hold."""

    def __init__(self, script: FakeScript, faults: Faults, context_length: int) -> None:
        self.faults = faults
        self.trace = None if script.trace is None else Trace(script.trace)
        self._script = script
        self._reply = None if script.reply is None else script.reply.encode()
        self._context_length = context_length
        self._rows: dict[SequenceId, _Row] = {}
        self._num_added = 0
        self._ready_at = 0.0
        self._peak_bytes = 0

    def add(self, sequence: SequenceId, sampling: Sampling, *, prompt_length: int, context: Sequence[int], max_length: int) -> None:
        if sequence in self._rows:
            raise ValueError(f"sequence {sequence} is already in the engine")
        if len(context) > self._context_length or max_length > self._context_length:
            length = max(len(context), max_length)
            raise RowError("context_length_exceeded", f"{length} tokens do not fit in a context of {self._context_length}")
        if context and not 0 <= min(context) <= max(context) < VOCABULARY_SIZE:
            raise RowError(
                "invalid_request", f"prompt: token id {max(context)} is outside the vocabulary; allowed: 0 to {VOCABULARY_SIZE - 1}"
            )
        _check_sampling(sampling)
        self._num_added += 1
        self._rows[sequence] = _Row(
            number=self._num_added,
            context=fake_draw.Context(),
            known=context,
            prompt_length=prompt_length,
            key=fake_draw.settings_key(sampling),
            with_position=sampling.temperature > 0,
            num_logprobs=sampling.logprobs,
        )

    def step(self, rows: Sequence[RowStep]) -> _FakeStep:
        if self.trace is not None:
            self.trace.note("begin")
        faults, duration_seconds = self._foresee(rows)
        if duration_seconds:
            self._ready_at = max(self._ready_at, time.monotonic()) + duration_seconds
        return _FakeStep(self, [self._advance(row) for row in rows], faults, self._ready_at)

    def _advance(self, step: RowStep) -> RowResult:
        row = self._rows[step.sequence]
        tokens = step.tokens
        if tokens is None:
            sampled_last = row.drawn.get(len(row.context.ids))
            if sampled_last is None:
                raise ValueError(f"sequence {step.sequence} has no sampled token to feed")
            tokens = (sampled_last,)
        num_unsampled = len(tokens) - step.num_samples + 1
        if not 0 < len(tokens) >= step.num_samples:
            raise ValueError(f"sequence {step.sequence}: {step.num_samples} samples of {len(tokens)} fed tokens")
        if not step.num_samples:
            row.context.feed(tokens)
            return RowResult(step.sequence)
        row.context.feed(tokens[:num_unsampled])
        sampled = [self._draw(row)]
        for token in tokens[num_unsampled:]:
            row.context.feed((token,))
            sampled.append(self._draw(row))
        logprobs: tuple[TokenLogprob, ...] = ()
        if row.num_logprobs >= 0:
            logprobs = tuple(row.context.logprobs(token, row.num_logprobs) for token in sampled)
        return RowResult(step.sequence, tuple(sampled), logprobs)

    def _draw(self, row: _Row) -> int:
        position = len(row.context.ids)
        said = position - row.prompt_length
        if self._reply is None:
            token = row.context.draw(row.key, with_position=row.with_position, eos_one_in=self._script.eos_one_in)
        else:
            token = self._reply[said] if said < len(self._reply) else EOS
        if row.context.disagrees(self._script.disagrees_one_in):
            token = fake_draw.another(token)
        row.drawn[position] = token
        return token

    def _fail_row(self, result: RowResult, fault: Fault) -> RowResult:
        row = self._rows.get(result.sequence)
        if row is None or fault.sequence_number not in (None, row.number):
            return result
        del self._rows[result.sequence]
        what = "its logits are not finite" if fault.action == "nonfinite" else "scripted fault"
        return RowResult(result.sequence, error=RowError("generation_failed", f"{what} (sequence {result.sequence})"))

    def _foresee(self, rows: Sequence[RowStep]) -> tuple[list[Fault], float]:
        """This step's faults, counted, and its scripted seconds."""
        kind, participants, seconds = self._describe(rows)
        return self.faults.due(kind, participants) if self._script.faults else [], seconds

    def _describe(self, rows: Sequence[RowStep]) -> tuple[Literal["prefill", "decode"], list[Participant], float]:
        mine = [self._rows[row.sequence] for row in rows]
        is_prefill = any(len(row.context.ids) < len(row.known) for row in mine)
        if is_prefill:
            num_tokens = sum(1 if row.tokens is None else len(row.tokens) for row in rows)
            seconds = self._script.prefill_seconds_per_token * num_tokens
        else:
            seconds = self._script.decode_seconds_per_step * math.ceil(len(rows) / self._script.max_batch_rows)
        return (
            "prefill" if is_prefill else "decode",
            [Participant(row.number, row.known[: row.prompt_length]) for row in mine],
            seconds,
        )

    def promised_seconds(self, rows: Sequence[RowStep]) -> float:
        """Scripted times, and the sleeps scripted for prefill (those of decode are not declared)."""
        kind, participants, seconds = self._describe(rows)
        if kind == "prefill" and self._script.faults:
            seconds += self.faults.sleep_seconds_ahead("prefill", participants)
        return seconds

    def length(self, sequence: SequenceId) -> int:
        return len(self._rows[sequence].context.ids)

    def truncate(self, sequence: SequenceId, length: int) -> None:
        row = self._rows[sequence]
        row.context = fake_draw.Context(row.context.ids[:length])
        row.drawn = {position: token for position, token in row.drawn.items() if position <= length}

    def layout(self) -> PrefixLayout:
        return LAYOUT

    def export(self, sequence: SequenceId, start: int, end: int) -> Export:
        row = self._row(sequence)
        num_fed = len(row.context.ids)
        if not 0 <= start < end <= num_fed:
            raise RowError("invalid_request", f"cannot export [{start}, {end}) of sequence {sequence}: {num_fed} tokens are fed")
        (field,) = LAYOUT.fields
        data = bytes(row.context.entries[start * fake_draw.ENTRY_BYTES : end * fake_draw.ENTRY_BYTES])
        array = PrefixArray(field.layer, field.name, field.dtype, field.shape_in(start, end), data)
        return Export(PrefixPart(start, end, (array,)))

    def adopt(self, part: PrefixPart, start: int | None = None, end: int | None = None) -> PrefixPart:
        return cut_part(LAYOUT, part, start, end)

    def restore(self, sequence: SequenceId, parts: Sequence[PrefixPart]) -> None:
        row = self._row(sequence)
        if row.context.ids:
            raise RowError("conflict", f"sequence {sequence} has begun already; only a row of length 0 can be restored")
        check_chain(LAYOUT, parts, len(row.known))
        entries = b"".join(array.buffer() for part in parts for array in part.arrays)
        row.context = fake_draw.Context.restored(row.known[: parts[-1].end], entries)

    def _row(self, sequence: SequenceId) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            raise RowError("invalid_request", f"sequence {sequence} is not in the engine")
        return row

    def release(self, sequences: Sequence[SequenceId]) -> None:
        self.faults.reach("release")
        for sequence in sequences:
            self._rows.pop(sequence, None)

    def cache_bytes(self) -> int:
        return BYTES_PER_TOKEN * sum(len(row.context.ids) for row in self._rows.values())

    def active_bytes(self) -> int:
        num_bytes = self.cache_bytes()
        self._peak_bytes = max(self._peak_bytes, num_bytes)
        return num_bytes

    def peak_bytes(self) -> int:
        self.active_bytes()
        return self._peak_bytes

    def set_compute_threads(self, threads: int) -> None:
        """Nothing here computes with threads."""

    def close(self) -> None:
        self.faults.reach("shutdown")
        self._rows.clear()


def _check_sampling(sampling: Sampling) -> None:
    checks = (
        ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty, 0 < sampling.repetition_penalty < math.inf, "above 0"),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "finite"),
        ("frequency_penalty", sampling.frequency_penalty, math.isfinite(sampling.frequency_penalty), "finite"),
        ("logprobs", sampling.logprobs, -1 <= sampling.logprobs < VOCABULARY_SIZE, f"-1 to {VOCABULARY_SIZE - 1}"),
    )
    for option, value, is_allowed, allowed in checks:
        if not is_allowed:
            raise RowError("invalid_request", f"{option}: got {value!r}; allowed: {allowed}")
    for token, _ in sampling.logit_bias:
        if not 0 <= token < VOCABULARY_SIZE:
            raise RowError("invalid_request", f"logit_bias: token id {token} is not below the vocabulary's size {VOCABULARY_SIZE}")


def load(load: Load, progress: Progress, *, incarnation: int = 1, send_garbage: Callable[[], None] = print_garbage) -> Loaded:
    """A `Loader`. `incarnation` picks the faults; `send_garbage` is what the fault action "garbage" does.

    :raises LoadError: the command carries no script.
    """
    script = load.fake
    if script is None:
        raise LoadError("error", f"model {load.name!r} has kind 'fake' but no script; give ModelSpec(fake=FakeScript(...))")
    started = time.monotonic()
    faults = Faults(script.faults, incarnation, send_garbage)
    progress("imports", 0, 1)
    faults.reach("import")
    num_slices = math.ceil(script.load_seconds / _LOAD_SLICE_SECONDS)
    for done in range(num_slices):
        progress("weights", done, num_slices)
        time.sleep(script.load_seconds / num_slices)
    faults.reach("load")
    progress("weights", num_slices, num_slices)
    context_length = min(script.context_length, load.max_context_tokens or script.context_length)
    facts = ModelFacts(
        kind="fake",
        model_type="fake",
        fingerprint=_fingerprint(script),
        vocabulary_digest=script.vocabulary,
        vocabulary_size=VOCABULARY_SIZE,
        context_length=context_length,
        bytes_per_token=BYTES_PER_TOKEN,
        weights_bytes=script.weight_bytes,
        eos_ids=tuple(sorted(EOS_IDS)),
        chat_template="checkpoint" if script.chat_template else "fallback",
        chat_restrictions=(),
        capabilities=Capabilities(True, True, True, "free", prefix=True, verify=True),
        blas="none",
        load_seconds=time.monotonic() - started,
    )
    tokenizer = FakeTokenizer(has_chat_template=script.chat_template, on_encode=lambda: faults.reach("prepare"))
    return Loaded(FakeEngine(script, faults, context_length), tokenizer, facts, numerics="fake")


def _fingerprint(script: FakeScript) -> str:
    """Of what decides the tokens: not of times and faults."""
    what = (script.context_length, script.eos_one_in, script.reply, script.chat_template, script.disagrees_one_in)
    return "fake-" + blake2b(msgspec.msgpack.encode(what), digest_size=8).hexdigest()
