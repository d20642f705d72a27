"""How are logits kept from being computed where nobody looks at them?

A model's output layer turns every fed position into a row of logits as wide as the vocabulary: for the last chunk of a prompt
much work and memory (512 positions of a vocabulary of 262144 are half a gigabyte), of which one row is wanted. A tap sits before
the output layer and lets only the wanted positions through. Whether the model's output really goes through it is for the
self-test to prove; a model without a tap computes them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class HeadTap:
    """num_picked: how often something went through while picking; once a forward, if the model is as we think."""

    def __init__(self) -> None:
        self.num_picked = 0
        self._index: tuple[mx.array, mx.array] | None = None

    @contextmanager
    def picking(self, rows: Sequence[int], columns: Sequence[int]) -> Iterator[None]:
        """Forwards inside give logits [len(rows), 1, vocabulary]: those of position columns[i] of row rows[i]."""
        self._index = mx.array(list(rows)), mx.array(list(columns))
        try:
            yield
        finally:
            self._index = None

    def through(self, hidden: mx.array) -> mx.array:
        """hidden: [rows, width, dim], on its way into the output layer."""
        if self._index is None:
            return hidden
        self.num_picked += 1
        return hidden[self._index][:, None]


def install_tap(model: Any) -> HeadTap:
    """Put a tap before the model's `lm_head`, or, where embeddings are tied, before their use as output layer."""
    tap = HeadTap()
    for name, module in model.named_modules():
        if name.split(".")[-1] == "lm_head":
            _divert(module, "__call__", tap)
        elif hasattr(module, "as_linear"):
            _divert(module, "as_linear", tap)
    return tap


def _divert(module: Any, method: str, tap: HeadTap) -> None:
    """By changing the one instance's class: its parameters keep their names, and other modules of its class their behaviour."""
    original = type(module)

    def diverted(self: Any, hidden: mx.array) -> mx.array:
        result: mx.array = getattr(original, method)(self, tap.through(hidden))
        return result

    module.__class__ = type(original.__name__, (original,), {method: diverted})
