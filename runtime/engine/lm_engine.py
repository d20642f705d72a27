"""The Engine on mlx and mlx-lm: how does a step of rows become forwards of the model?

Where rows live is `placing`'s business, which rows may share a forward follows from what the self-test proved.

Everything is lazy until `result`: a step may be built on tokens that are still being computed, and while it is, rows may
join, leave and be truncated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from runtime.engine import blas
from runtime.engine.batch import Batch
from runtime.engine.costs import StepCosts
from runtime.engine.drawing import drawn_part
from runtime.engine.engine import PendingStep, RowError, RowStep
from runtime.engine.forward import Group, feed_array, sampled_logits, split
from runtime.engine.grouping import FORWARD_TOKENS
from runtime.engine.head import HeadTap
from runtime.engine.layers import Kind
from runtime.engine.pending import LmPendingStep, Part
from runtime.engine.placing import Places
from runtime.engine.prefix_layout import Prefixes
from runtime.engine.prefix_parts import Export, PrefixLayout, PrefixPart
from runtime.engine.rows import Row
from runtime.engine.sampling import RowSampler
from runtime.protocol.commands import Sampling
from runtime.protocol.events import Capabilities
from runtime.protocol.ids import SequenceId

_CLEAR_EVERY_STEPS = 256
"""Steps between returns of MLX's buffer cache to the system: shapes change as rows grow, and old buffers fit nothing any more."""

_LONGEST_OWED = 16
"""Tokens that a row may owe and yet verify. While blocks are rejected in part, a replaying row keeps coming back to the same
state, and owes more each time; feeding that again costs little up to about here, then a forward of its own is cheaper."""


class LmEngine:
    """See `runtime.engine.engine.Engine` for what each method promises.

    kinds: the caches the model wants. vocabulary_size: ids below it are valid to feed and may be drawn. costs: what is known of
    this model's forwards so far. tap: keeps logits that no row samples from being computed. layout: of exported rows; None when the
    self-test could not prove that these can be restored.
    """

    def __init__(
        self,
        model: Any,
        kinds: Sequence[Kind],
        capabilities: Capabilities,
        *,
        vocabulary_size: int,
        context_length: int,
        costs: StepCosts | None = None,
        tap: HeadTap | None = None,
        layout: PrefixLayout | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._capabilities = capabilities
        self._vocabulary_size = vocabulary_size
        self._context_length = context_length
        self._clock = clock
        self._rows: dict[SequenceId, Row] = {}
        self._places = Places(model, kinds, is_batched=capabilities.batched_decode)
        self._prefixes = Prefixes(kinds, layout)
        self._costs = costs or StepCosts()
        self._tap = tap
        self._num_steps = 0
        self._last_end = 0.0
        # A decode step of the same rows as the one before reuses its groups, unless something moved in between.
        self._repeatable: tuple[list[SequenceId], int, list[Group]] | None = None

    # -- rows ---------------------------------------------------------------------------------------------------------

    def add(self, sequence: SequenceId, sampling: Sampling, *, prompt_length: int, context: Sequence[int], max_length: int) -> None:
        if sequence in self._rows:
            raise RowError("conflict", f"sequence {sequence} is already in this engine; release it first")
        if not len(context):
            raise RowError("invalid_request", "the context is empty; a sequence needs at least one token to begin with")
        if len(context) >= self._context_length:
            raise RowError(
                "context_length_exceeded",
                f"{len(context)} tokens, but the model's context holds {self._context_length} with at least one left to generate",
            )
        prompt, output = context[:prompt_length], context[prompt_length:]
        sampler = RowSampler(sampling, self._vocabulary_size, prompt=prompt, output=output)
        self._rows[sequence] = Row(sequence, sampler, prompt_length, context)

    def length(self, sequence: SequenceId) -> int:
        return self._rows[sequence].length

    def truncate(self, sequence: SequenceId, length: int) -> None:
        row = self._row(sequence)
        if not 0 <= length <= row.length:
            raise RowError("invalid_request", f"cannot truncate to {length}: {row.length} tokens are fed")
        row.settle()
        if length < row.num_cached:
            if row.batch is None or self._capabilities.rollback == "none":
                raise RowError("generation_failed", "this model's caches cannot go back (rollback is 'none')")
            owed = row.batch.rewind(row, length)
            if owed is None:
                raise RowError(
                    "generation_failed", f"cannot go back from {row.length} to {length} tokens: that state is no longer kept"
                )
            row.owed = owed
        else:
            del row.owed[length - row.num_cached :]
        row.cut(length)
        self._places.moves += 1

    def release(self, sequences: Sequence[SequenceId]) -> None:
        leaving = [row for sequence in sequences if (row := self._rows.pop(sequence, None)) is not None]
        self._let_go(leaving)

    def _row(self, sequence: SequenceId) -> Row:
        row = self._rows.get(sequence)
        if row is None:
            raise RowError("invalid_request", f"sequence {sequence} is not in this engine")
        return row

    def _fail(self, row: Row, error: RowError) -> None:
        row.error = error
        if self._rows.get(row.sequence) is row:
            del self._rows[row.sequence]
            self._let_go([row])

    def _let_go(self, rows: Sequence[Row]) -> None:
        if rows:
            self._places.leave(rows)
            self._repeatable = None  # it would hold on to their batch

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def layout(self) -> PrefixLayout | None:
        return self._prefixes.layout

    def export(self, sequence: SequenceId, start: int, end: int) -> Export:
        return self._prefixes.export(self._row(sequence), start, end)

    def adopt(self, part: PrefixPart, start: int | None = None, end: int | None = None) -> PrefixPart:
        return self._prefixes.adopt(part, start, end)

    def restore(self, sequence: SequenceId, parts: Sequence[PrefixPart]) -> None:
        self._prefixes.restore(self._row(sequence), parts)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, rows: Sequence[RowStep]) -> PendingStep:
        began = self._clock()
        self._num_steps += 1
        errors: dict[int, RowError] = {}
        groups = self._groups(rows, errors)
        feeding: dict[Batch, list[Row]] = {}
        for group in groups:
            feeding.setdefault(group.batch, []).extend(group.rows)
        for batch, members in feeding.items():
            batch.begin_step(members)
        parts: list[Part] = []
        for group in groups:
            parts += self._run(group, errors)
        scheduled = [array for part in parts for array in part.arrays()]
        if scheduled:
            mx.async_eval(scheduled)
        if self._num_steps % _CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        num_tokens = sum(1 if row.tokens is None else len(row.tokens) for row in rows)
        return LmPendingStep(self, rows, parts, errors, began, num_tokens)

    def _groups(self, rows: Sequence[RowStep], errors: dict[int, RowError]) -> list[Group]:
        plain = all(step.tokens is None and step.num_samples == 1 for step in rows)
        sequences = [step.sequence for step in rows]
        if plain and self._repeatable is not None and self._repeatable[:2] == (sequences, self._places.moves):
            return self._repeatable[2]
        places: dict[Row, int] = {}
        feeds: dict[Row, list[int] | None] = {}
        for place, step in enumerate(rows):
            try:
                row, feed = self._checked(step)
                if row in places:
                    raise RowError("invalid_request", f"sequence {step.sequence} is twice in one step")
            except RowError as error:
                errors[place] = error
                known = self._rows.get(step.sequence)
                if known is not None and known not in places:
                    self._fail(known, error)
                continue
            if feed is not None and step.num_samples == 0 and not self._capabilities.chunked_prefill:
                row.owed += feed  # until the last chunk is there: this model must see a prompt in one piece
                continue
            places[row], feeds[row] = place, feed
        groups: list[Group] = []
        nums_samples = {row: rows[place].num_samples for row, place in places.items()}
        worth = FORWARD_TOKENS if self._capabilities.padded_prefill else 0
        for batch, members in self._places.place(feeds):
            late: dict[Row, list[int] | None] = {
                row: [] for row in members if len(row.owed) > _LONGEST_OWED and nums_samples[row] > 1
            }
            for replay in split(batch, places, late, dict.fromkeys(late, 0), worth):
                self._run(replay, errors)
            alive = {row: feeds[row] for row in members if row.error is None}
            groups += split(batch, places, alive, nums_samples, worth)
        if plain and not errors and len(groups) == 1 and all(feed is None for feed in feeds.values()):
            self._places.arrange(groups[0])
            self._repeatable = (sequences, self._places.moves, groups)
        return groups

    def _checked(self, step: RowStep) -> tuple[Row, list[int] | None]:
        """The row and what it feeds (None: the token it drew last), owed tokens included."""
        row = self._row(step.sequence)
        num_fed = 1 if step.tokens is None else len(step.tokens)
        if step.num_samples > max(1, num_fed):
            raise RowError("invalid_request", f"{step.num_samples} samples after {num_fed} tokens; one a token at most")
        if step.num_samples > 1 and not self._capabilities.verify:
            raise RowError("invalid_request", "this model cannot verify several tokens at once (capabilities.verify is false)")
        if step.tokens is None:
            if row.next_draw() is not None and not row.owed and not row.must_rewind:
                return row, None
            row.settle()
            if len(row.known) <= row.length:
                raise RowError("invalid_request", f"sequence {step.sequence} has drawn no token yet; say which to feed")
            tokens = [row.known[row.length]]
        else:
            tokens = list(step.tokens)
            if not tokens:
                raise RowError("invalid_request", f"sequence {step.sequence} feeds no token")
            if min(tokens) < 0 or max(tokens) >= self._vocabulary_size:
                outside = min(tokens) if min(tokens) < 0 else max(tokens)
                raise RowError("invalid_request", f"token id {outside} is outside the vocabulary, 0 to {self._vocabulary_size - 1}")
        row.note_fed(tokens)
        return row, tokens

    def _run(self, group: Group, errors: dict[int, RowError]) -> list[Part]:
        """One forward of the group; if the model raises, one of each row by itself, so that only the culprit falls."""
        self._places.arrange(group)
        try:
            logits = self._forward(group)
        except Exception as error:
            if len(group.rows) == 1:
                failure = RowError("generation_failed", f"the model failed on this sequence: {type(error).__name__}: {error}")
                errors[group.places[0]] = failure
                self._fail(group.rows[0], failure)
                return []
            return [part for single in group.singles() for part in self._run(single, errors)]
        return [drawn_part(group, logits, self._vocabulary_size)]

    def _forward(self, group: Group) -> mx.array:
        """Logits [samples, vocabulary], lazy."""
        rows = group.rows
        tokens = feed_array(rows) if group.widths is None else mx.array(group.padded())
        if self._tap is not None and group.samplers and tokens.shape[1] > 1:
            with self._tap.picking(*group.sampled_positions()):
                logits = group.batch.forward(self._model, len(rows), tokens, group.real_widths)[:, 0]
        else:
            logits = group.batch.forward(self._model, len(rows), tokens, group.real_widths)
            logits = sampled_logits(logits, group)
        for row in rows:
            row.owed = []
        return logits

    def finish(self, step: LmPendingStep) -> None:
        """Called by a step whose result has arrived."""
        now = self._clock()
        self._costs.note(len(step.rows), step.num_tokens, now - max(step.began, self._last_end))
        self._last_end = now

    def fail(self, row: Row, error: RowError) -> None:
        """Called by a step that found a row's logits not finite."""
        self._fail(row, error)

    # -- the engine as a whole ----------------------------------------------------------------------------------------

    def promised_seconds(self, rows: Sequence[RowStep]) -> float:
        return self._costs.promise(len(rows), sum(1 if row.tokens is None else len(row.tokens) for row in rows))

    def cache_bytes(self) -> int:
        batches = {id(row.batch): row.batch for row in self._rows.values() if row.batch is not None}
        return sum(batch.nbytes() for batch in batches.values())

    def active_bytes(self) -> int:
        return int(mx.get_active_memory())

    def peak_bytes(self) -> int:
        return int(mx.get_peak_memory())

    def set_compute_threads(self, threads: int) -> None:
        blas.set_compute_threads(threads)

    def close(self) -> None:
        self._rows.clear()
        self._repeatable = None
        self._model = None
        mx.clear_cache()
