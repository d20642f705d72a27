"""What a draw will give, while it is still being computed: tokens, which rows were sound, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from runtime.protocol.events import TokenLogprob


class Drawn:
    """Tokens under way. `arrays()` is what has to be evaluated before `logprobs()` or any value is read.

    tokens: int32 [rows]. finite: bool [rows], False where a row's logits hold a NaN, +inf or nothing but -inf; the token of such
    a row means nothing but lies inside the vocabulary.
    """

    __slots__ = ("_other_arrays", "_reports", "finite", "tokens")

    def __init__(
        self, tokens: mx.array, finite: mx.array, reports: Sequence[Report] = (), other_arrays: Sequence[mx.array] = ()
    ) -> None:
        self.tokens = tokens
        self.finite = finite
        self._reports = reports
        self._other_arrays = other_arrays

    def arrays(self) -> list[mx.array]:
        return [self.tokens, self.finite, *self._other_arrays]

    def logprobs(self) -> list[tuple[TokenLogprob, ...]]:
        """One entry per row: its token's log-probability and the best alternatives; empty when not asked for or not finite."""
        rows: list[tuple[TokenLogprob, ...]] = [()] * self.tokens.shape[0]
        if self._reports:
            tokens, finite = _values(self.tokens), _values(self.finite)
            for report in self._reports:
                for row, logprob, ids, values in report.rows():
                    if finite[row]:
                        best = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
                        rows[row] = (TokenLogprob(tokens[row], logprob, tuple(best)),)
        return rows


class Report(NamedTuple):
    """Log-probabilities of one group: chosen [rows]; ids and values [rows, alternatives], or None for none."""

    row_numbers: Sequence[int]
    chosen: mx.array
    ids: mx.array | None
    values: mx.array | None

    def rows(self) -> list[tuple[int, float, list[int], list[float]]]:
        nothing: list[list] = [[] for _ in self.row_numbers]
        ids = _values(self.ids) if self.ids is not None else nothing
        values = _values(self.values) if self.values is not None else nothing
        return list(zip(self.row_numbers, _values(self.chosen), ids, values, strict=True))


def _values(array: mx.array) -> Any:
    return array.tolist()
