"""What can this model's caches really do? Tried out at load, on a few made-up tokens.

Several model families look as if their rows could share a forward, and silently compute something else when they do (a padded
row of mamba, for one). So nothing is believed of a model that it has not shown here: each proof feeds three sequences of
different lengths in some manner and compares the logits with those of the whole sequence fed alone, in one piece, with the
model's own caches. What fails is switched off with a note; one row at a time with the model's own caches always remains.

Where a matrix product gives a row the same bits in any company (the canary) and all layers are attention, equality must be
exact, elsewhere within a tolerance far below what a wrong mask or a foreign state does.

Proved: joining, leaving, padding, chunks, going back, verifying, copying a row out and in, and the sight limit of windows up
to `LONGEST_PROVED_WINDOW` positions. A larger window's edge lies beyond what may be spent at load.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from runtime.engine import blas
from runtime.engine.batch import Batch, RaggedBatch
from runtime.engine.costs import StepCosts
from runtime.engine.head import HeadTap, install_tap
from runtime.engine.layers import Attention, Kind, Unknown, flattened
from runtime.engine.own_batch import OwnBatch
from runtime.engine.prefix_layout import exported, layout_of, restored
from runtime.engine.prefix_parts import PrefixLayout
from runtime.engine.rows import Row
from runtime.engine.trial import Disproof, Trial
from runtime.protocol.events import Capabilities

LONGEST_PROVED_WINDOW = 128
"""Sliding windows up to this are passed by the longest sequence."""

MOST_REJECTED = 16
"""Proposals of one block that must be possible to take back."""

_NUM_CONTINUED = 8
"""Tokens each sequence goes on after its prompt."""


@dataclass(frozen=True, slots=True)
class Proof:
    capabilities: Capabilities
    logits_width: int
    tap: HeadTap | None
    layout: PrefixLayout | None
    """Of what may be exported; None when that is not proved."""


class NothingButNoise(Exception):
    """The model gives no usable logits for any prompt: its weights or its config are wrong."""


def prove(
    model: Any,
    kinds: Sequence[Kind],
    vocabulary_size: int,
    costs: StepCosts | None = None,
    *,
    between: Callable[[], None] = lambda: None,
) -> Proof:
    """Run all proofs. Takes about 19 forwards of a few tokens; `costs` learns what they took. `between` is called before each
    proof, when nothing is being computed.

    :raises NothingButNoise: no logits are finite.
    :raises Exception: whatever the model raises when it runs a single row with its own caches.
    """
    return _SelfTest(model, kinds, vocabulary_size, costs or StepCosts(), between).run()


class _SelfTest:
    def __init__(
        self, model: Any, kinds: Sequence[Kind], vocabulary_size: int, costs: StepCosts, between: Callable[[], None]
    ) -> None:
        self._model = model
        self._between = between
        self._kinds = kinds
        self._costs = costs
        flat = flattened(kinds)
        self._unknown = [kind.name for kind in flat if isinstance(kind, Unknown)]
        self._is_exact = all(isinstance(kind, Attention) for kind in flat) and blas.is_exact_over_batch_shapes()
        windows = [kind.window for kind in flat if isinstance(kind, Attention) and kind.window is not None]
        passed = [window for window in windows if window <= LONGEST_PROVED_WINDOW]
        generator = random.Random(20)
        self._num_prompt = (7, max([12, *(window + 9 for window in passed)]), 4)
        self._ids = [[generator.randrange(vocabulary_size) for _ in range(num + _NUM_CONTINUED)] for num in self._num_prompt]
        self._expected: list[mx.array] = []
        self._proved: RaggedBatch | None = None
        self._layout: PrefixLayout | None = None

    def run(self) -> Proof:
        self._expected = [self._alone(ids)[0] for ids in self._ids]
        if not any(mx.isfinite(logits[-1].max()).item() for logits in self._expected):
            raise NothingButNoise(
                "its logits are not finite for any prompt; the weights, or config values such as rope_theta, are wrong"
            )
        self._trial = Trial(self._model, self._ids, self._expected, self._is_exact, self._costs)
        notes: list[str] = []
        batched = chunked = padded = keeps = goes_back = verifies = False
        if self._unknown:
            notes.append(f"runs one row at a time: no batched form of cache class {self._unknown[0]}")
        else:
            chunked = self._holds("chunked prefill of a batched row", self._prove_chunked, notes)
            batched = self._holds("batched decode", self._prove_batched, notes)
        if batched and chunked:
            keeps = self._holds("keeping prefixes", self._prove_prefix, notes)
        if batched:
            padded = self._holds("right-padded prefill", self._prove_padded, notes)
            goes_back = self._holds("rollback", lambda: self._prove_rollback(padded), notes)
            if goes_back and chunked:
                verifies = self._holds("verifying proposed tokens", lambda: self._prove_verify(padded), notes)
        else:
            # Rows then run in the model's own caches, so chunks have to be proved with these.
            chunked = self._holds("chunked prefill", self._prove_chunked_alone, notes)
        tap = install_tap(self._model)
        is_tapped = self._holds("leaving out logits nobody looks at", lambda: self._prove_tap(tap), notes)
        rollback: Literal["free", "replay", "none"] = "none"
        if goes_back:
            rollback = "free" if all(isinstance(kind, Attention) for kind in flattened(self._kinds)) else "replay"
        capabilities = Capabilities(
            batched_decode=batched,
            padded_prefill=padded,
            chunked_prefill=chunked,
            rollback=rollback,
            notes=tuple(notes),
            prefix=keeps,
            verify=verifies,
        )
        return Proof(capabilities, self._expected[0].shape[-1], tap if is_tapped else None, self._layout if keeps else None)

    def _holds(self, what: str, proof: Callable[[], None], notes: list[str]) -> bool:
        self._between()
        try:
            proof()
        except Disproof as disproof:
            notes.append(f"{what} is off: {disproof}")
        except Exception as error:  # a model that raises here still runs without the feature
            notes.append(f"{what} is off: the model raised {type(error).__name__}: {error}")
        else:
            return True
        return False

    def _alone(self, ids: Sequence[int]) -> mx.array:
        began = time.perf_counter()
        logits: mx.array = self._model(mx.array([ids]), cache=make_prompt_cache(self._model))
        mx.eval(logits)
        self._costs.note(1, len(ids), time.perf_counter() - began)
        return logits

    # -- proofs: each leaves its rows in `self._proved` for the next to go on with (forwards are dear) -------------------

    def _prove_chunked(self) -> None:
        """The longest prompt in two chunks."""
        row = self._trial.row(1)
        batch = self._batch_of([row])
        self._feed_in_chunks(batch, row)
        self._proved = batch

    def _prove_chunked_alone(self) -> None:
        row = self._trial.row(1)
        self._feed_in_chunks(OwnBatch(self._model, row), row)

    def _feed_in_chunks(self, batch: Batch, row: Row) -> None:
        first = self._num_prompt[1] // 2
        self._trial.feed(batch, {row: first})
        self._trial.feed(batch, {row: self._num_prompt[1] - first})

    def _prove_batched(self) -> None:
        """Two rows decode together, a third joins them, one leaves, one pauses: all as if alone."""
        late_batch, self._proved = self._proved, None
        if late_batch is None:
            late_batch = self._batch_of([self._trial.row(1)])
            self._trial.feed(late_batch, {late_batch.rows[0]: self._num_prompt[1]})
        late = late_batch.rows[0]
        stage = RaggedBatch(self._kinds)
        early = [self._trial.row(0), self._trial.row(2)]
        for row in early:
            batch = self._batch_of([row])
            self._trial.feed(batch, {row: self._num_prompt[row.sequence]})
            stage.take([row], batch)
        self._trial.feed(stage, dict.fromkeys(early, 1))
        stage.take([late], late_batch)
        self._trial.feed(stage, dict.fromkeys([*early, late], 1))
        stage.remove([early[0]])
        self._trial.feed(stage, {late: 1})
        self._trial.feed(stage, {late: 1, early[1]: 1})
        self._proved = stage

    def _prove_prefix(self) -> None:
        """The longest row, copied out of its batch in two parts; two rows made of them go on side by side as that row would."""
        batch = self._proved
        assert batch is not None
        (original,) = [row for row in batch.rows if row.sequence == 1]
        end, middle = original.num_cached, self._num_prompt[1] // 2
        layout = self._layout = layout_of(batch)
        exports = [exported(batch, original, layout, *span) for span in ((0, middle), (middle, end))]
        for layer, reason in exports[-1].missing:
            raise Disproof(f"layer {layer} cannot be copied out: {reason}")
        rows = [self._trial.row(1), self._trial.row(1)]
        for row in rows:
            row.context = self._ids[1]
            restored(self._kinds, row, layout, [export.part for export in exports])
        together = RaggedBatch(self._kinds)
        for row in rows:
            assert isinstance(row.batch, RaggedBatch)
            together.take([row], row.batch)
        self._trial.feed(together, dict.fromkeys(rows, len(self._ids[1]) - end))

    def _prove_padded(self) -> None:
        """Three prompts of different lengths in one forward, padded on the right, then blocks of different widths."""
        rows = [self._trial.row(number) for number in range(3)]
        batch = self._batch_of(rows)
        self._trial.feed(batch, {row: self._num_prompt[row.sequence] - 1 for row in rows})
        self._trial.feed(batch, {rows[0]: 3, rows[1]: 1, rows[2]: 2})
        self._proved = batch

    def _prove_rollback(self, is_padded: bool) -> None:
        """Feed rows tokens that do not belong to them, go back by different counts, and go on as if they had never been fed."""
        batch = self._proved
        assert batch is not None
        kept = {row: index for index, row in enumerate(batch.rows)}
        self._feed_and_take_back(batch, dict.fromkeys(kept, 3), kept, is_padded)

    def _prove_verify(self, is_padded: bool) -> None:
        """Two blocks of different widths side by side, right at the start, where all logits count, and wrong from there on.

        Any further row pauses. Sliding layers first drop all that they may, so that rows then stand behind what is still held.
        """
        batch = self._proved
        assert batch is not None
        batch.forget_unseen()
        widths = dict(zip(batch.rows, (1 + MOST_REJECTED, 5), strict=False))
        kept = dict(zip(batch.rows, (1, 2), strict=False))
        self._feed_and_take_back(batch, widths, kept, is_padded)

    def _feed_and_take_back(self, batch: RaggedBatch, widths: dict[Row, int], kept: dict[Row, int], is_padded: bool) -> None:
        lengths = {row: row.length + num_kept for row, num_kept in kept.items()}
        self._trial.feed(batch, widths, is_padded=is_padded, wrong_from=kept)
        for row, length in lengths.items():
            owed = batch.rewind(row, length)
            if owed is None:
                raise Disproof(f"a row could not go back from {row.length} to {length} tokens")
            row.owed = owed
            row.cut(length)
        self._trial.feed(batch, dict.fromkeys(batch.rows, 1), is_padded=is_padded)

    def _prove_tap(self, tap: HeadTap) -> None:
        """Only the last three positions' logits, and the same ones."""
        last = len(self._ids[2])
        with tap.picking([0, 0, 0], range(last - 3, last)):
            logits = self._alone(self._ids[2])
        if tap.num_picked != 1 or logits.shape[:2] != (3, 1):
            raise Disproof(f"the output layer was met {tap.num_picked} times and gave logits of shape {logits.shape}")
        self._trial.compare(self._expected[2][-3:], logits[:, 0], "the last positions only")

    def _batch_of(self, rows: Sequence[Row]) -> RaggedBatch:
        batch = RaggedBatch(self._kinds)
        batch.add_fresh(rows)
        return batch
