"""How does each row of a batch draw its next token?

The law: a row's token depends on its own logits, sampling, position and history alone, bit for bit, whatever the other rows
are. So noise comes from a key of (seed, position), never from a generator with a state, and every operation treats each row by
itself. Sampling is Gumbel-max: the argmax of scaled logits plus Gumbel noise is a draw from their softmax.

Order: logit_bias, penalties, temperature, top_k, top_p, min_p. Rows of one recipe share one pass; a row pays only for what its
own options need. Everything is lazy: a step may be built on the tokens of one that is still running.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from runtime.engine import logit_math
from runtime.engine.drawn import Drawn, Report
from runtime.engine.sampling_options import check_sampling, checked_ids
from runtime.protocol.commands import Sampling

__all__ = ["Drawn", "Recipe", "RowSampler", "draw"]

_MIN_TEMPERATURE = 1e-6
"""Lower ones draw as this one does, which already is the argmax unless two logits agree to seven digits."""

_MIN_REPETITION_PENALTY = 1e-6
"""Lower ones would divide by a 32-bit zero or overflow, and infinite logits have no log-probabilities."""

_serials = itertools.count()


class Recipe(NamedTuple):
    """What has to be done to a row's logits. Rows of one recipe are drawn in one pass.

    sorted_width: how many of a row's best values its top_k or top_p must see in order, 0 for none. It depends on the row's own
    options alone, so that sums over it are the same in every batch.
    """

    biased: bool = False
    penalised: bool = False
    sampled: bool = False
    sorted_width: int = 0
    top_p: bool = False
    min_p: bool = False
    num_logprobs: int = -1


class RowSampler:
    """One sequence's sampling options and, for penalties, what it has said so far.

    `draw` counts each token it draws, also before the token's value is known. After tokens were thrown away (a truncate, or a
    look-ahead past a pause) call `rewind` before the next draw.

    :raises RowError: "invalid_request": an option outside its range, an id outside the vocabulary.
    """

    __slots__ = ("_bias", "_counts", "_in_prompt", "_plan", "recipe", "sampling", "serial", "vocabulary_size")

    def __init__(self, sampling: Sampling, vocabulary_size: int, *, prompt: Sequence[int], output: Sequence[int]) -> None:
        """vocabulary_size: width of the logits. prompt, output: the known context, for validation and penalties."""
        check_sampling(sampling, vocabulary_size)
        prompt_ids = checked_ids("prompt", prompt, vocabulary_size)
        self.sampling = sampling
        self.vocabulary_size = vocabulary_size
        self.recipe = _recipe(sampling, vocabulary_size)
        self.serial = next(_serials)
        self._plan: _Plan | None = None
        self._bias: np.ndarray | None = None
        self._in_prompt: np.ndarray | None = None
        self._counts: mx.array | None = None
        if self.recipe.biased:
            self._bias = np.zeros(vocabulary_size, dtype=np.float32)
            for token, bias in sampling.logit_bias:
                self._bias[token] = bias
        if self.recipe.penalised:
            self._in_prompt = np.zeros(vocabulary_size, dtype=bool)
            self._in_prompt[prompt_ids] = True
        self.rewind(output)

    def rewind(self, output: Sequence[int]) -> None:
        """From now on the row's output is exactly `output`.

        :raises RowError: an id outside the vocabulary.
        """
        ids = checked_ids("output", output, self.vocabulary_size)
        if self.recipe.penalised:
            counts = np.bincount(ids, minlength=self.vocabulary_size)
            self._counts = mx.array(counts.astype(np.float32))

    def counts(self) -> mx.array:
        """Times each token is in the output, float [vocabulary]; exists for penalised rows only."""
        assert self._counts is not None
        return self._counts

    def set_counts(self, counts: mx.array) -> None:
        self._counts = counts


def draw(
    logits: mx.array,
    samplers: Sequence[RowSampler],
    positions: Sequence[int],
    presumed: Sequence[Sequence[int]] | None = None,
) -> Drawn:
    """Draw row i's token from logits[i] ([rows, vocabulary]) for absolute position positions[i]. Lazy.

    presumed: tokens that stand before row i's position beyond those that its sampler has counted; None for none anywhere. With
    them a sampler may stand for several positions of one sequence, in rising order: afterwards it has counted what was presumed
    for the last of them, and the token drawn there. Without, one with penalties stands for one row only.
    """
    plan = _plan_for(samplers)
    largest = mx.max(logits, axis=-1)
    finite = (largest - largest) == 0  # false for NaN and both infinities; a third of isfinite's cost
    if plan.greedy:
        return Drawn(mx.argmax(logits, axis=-1).astype(mx.int32), finite)
    tokens: list[mx.array] = []
    reports: list[Report] = []
    other_arrays: list[mx.array] = []
    for group in plan.groups:
        tokens.append(group.draw(logits, finite, samplers, positions, presumed, reports, other_arrays))
    drawn = tokens[0] if plan.order is None else mx.concatenate(tokens)[plan.order]
    return Drawn(drawn, finite, reports, other_arrays)


# -- plans: what stays the same from step to step while a batch keeps its rows ------------------------------------


class _Plan:
    """Groups of a batch's rows by recipe. `order` puts their concatenated tokens back into row order (None: already so)."""

    __slots__ = ("greedy", "groups", "order", "serials")

    def __init__(self, samplers: Sequence[RowSampler], serials: tuple[int, ...]) -> None:
        self.serials = serials
        by_recipe: dict[Recipe, list[int]] = {}
        for row, sampler in enumerate(samplers):
            by_recipe.setdefault(sampler.recipe, []).append(row)
        self.greedy = set(by_recipe) == {Recipe()}
        self.groups = [_Group(recipe, rows, samplers) for recipe, rows in by_recipe.items()]
        order = np.argsort(np.concatenate(list(by_recipe.values())))
        self.order = None if len(by_recipe) == 1 else mx.array(order.astype(np.int32))


def _plan_for(samplers: Sequence[RowSampler]) -> _Plan:
    """Kept with the batch's first sampler. It knows the others by serial number only, so it keeps no row alive."""
    serials = tuple([sampler.serial for sampler in samplers])
    first = samplers[0]
    plan = first._plan
    if plan is None or plan.serials != serials:
        plan = first._plan = _Plan(samplers, serials)
    return plan


class _Group:
    """Rows of one recipe with their parameters as arrays of [rows, 1] or [rows, vocabulary]."""

    def __init__(self, recipe: Recipe, row_numbers: list[int], samplers: Sequence[RowSampler]) -> None:
        self.recipe = recipe
        self.row_numbers = row_numbers
        self.take = None if len(row_numbers) == len(samplers) else mx.array(row_numbers, dtype=mx.int32)
        self.rank = mx.arange(len(row_numbers), dtype=mx.int32)
        members = [samplers[row] for row in row_numbers]
        options = [member.sampling for member in members]
        width = members[0].vocabulary_size
        self.temperature = _column([max(option.temperature, _MIN_TEMPERATURE) for option in options])
        self.top_k = _column([option.top_k if 0 < option.top_k < width else width for option in options], mx.int32)
        self.top_p = _column([option.top_p for option in options])
        self.log_min_p = _column([math.log(option.min_p) if option.min_p else -math.inf for option in options])
        self.penalties = (
            _column([max(option.repetition_penalty, _MIN_REPETITION_PENALTY) for option in options]),
            _column([option.presence_penalty for option in options]),
            _column([option.frequency_penalty for option in options]),
        )
        self.seeds = [option.seed for option in options]
        self.bias = _stack([member._bias for member in members]) if recipe.biased else None
        self.in_prompt = _stack([member._in_prompt for member in members]) if recipe.penalised else None

    def draw(
        self,
        logits: mx.array,
        finite: mx.array,
        samplers: Sequence[RowSampler],
        positions: Sequence[int],
        presumed: Sequence[Sequence[int]] | None,
        reports: list[Report],
        other_arrays: list[mx.array],
    ) -> mx.array:
        """Tokens int32 [rows of the group]; adds what else must be evaluated, and counts the tokens for penalties."""
        recipe = self.recipe
        if self.take is not None:
            logits, finite = logits[self.take], finite[self.take]
        if recipe == Recipe():
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = logits.astype(mx.float32)
        if recipe.sorted_width or recipe.num_logprobs > 0:
            # No backend promises how it orders NaN; a row that has one is lost anyway.
            logits = mx.where(finite[:, None], logits, 0.0)
        counts = None
        if self.bias is not None:
            logits = logits + self.bias
        if self.in_prompt is not None:
            counts = mx.stack([samplers[row].counts() for row in self.row_numbers])
            if presumed is not None:
                counts = _with_presumed(counts, [presumed[row] for row in self.row_numbers])
            logits = logit_math.penalised(logits, counts, self.in_prompt, *self.penalties)
        scores = self._noisy(logits, positions) if recipe.sampled else logits
        tokens = mx.argmax(scores, axis=-1).astype(mx.int32)
        if counts is not None:
            counts = counts.at[self.rank, tokens].add(1.0)
            for index, row in enumerate(self.row_numbers):
                samplers[row].set_counts(counts[index])
            other_arrays.append(counts)
        if recipe.num_logprobs >= 0:
            reports.append(self._report(logits, tokens))
            other_arrays.extend(array for array in reports[-1][1:] if array is not None)
        return tokens

    def _noisy(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        recipe = self.recipe
        scores = logit_math.scaled(logits, self.temperature)
        noise = logit_math.gumbel(
            [logit_math.draw_key(seed, positions[row]) for seed, row in zip(self.seeds, self.row_numbers, strict=True)],
            logits.shape[-1],
        )
        noisy = scores + noise
        if recipe.sorted_width:
            best = logit_math.best_first(scores, recipe.sorted_width)
            num_kept = logit_math.kept_counts(best, self.top_k, self.top_p if recipe.top_p else None)
            noisy = mx.where(logit_math.keep_best(scores, best, num_kept), noisy, -mx.inf)
        if recipe.min_p:
            noisy = mx.where(scores >= self.log_min_p, noisy, -mx.inf)
        return noisy

    def _report(self, logits: mx.array, tokens: mx.array) -> Report:
        logprobs = logit_math.log_probabilities(logits)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        if self.recipe.num_logprobs == 0:
            return Report(self.row_numbers, chosen, None, None)
        ids = logit_math.best_ids(logprobs, self.recipe.num_logprobs)
        return Report(self.row_numbers, chosen, ids, mx.take_along_axis(logprobs, ids, axis=-1))


def _recipe(sampling: Sampling, vocabulary_size: int) -> Recipe:
    sampled = sampling.temperature > 0
    limits_count = 0 < sampling.top_k < vocabulary_size
    sorted_width = 0
    if sampled and limits_count:
        sorted_width = min(vocabulary_size, max(16, 1 << (sampling.top_k - 1).bit_length()))
    elif sampled and sampling.top_p < 1:
        sorted_width = vocabulary_size
    return Recipe(
        biased=bool(sampling.logit_bias),
        penalised=sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0,
        sampled=sampled,
        sorted_width=sorted_width,
        top_p=sampled and sampling.top_p < 1,
        min_p=sampled and sampling.min_p > 0,
        num_logprobs=min(sampling.logprobs, vocabulary_size),
    )


def _with_presumed(counts: mx.array, presumed: Sequence[Sequence[int]]) -> mx.array:
    rows = [row for row, tokens in enumerate(presumed) for _ in tokens]
    if not rows:
        return counts
    return counts.at[mx.array(rows), mx.array([token for tokens in presumed for token in tokens])].add(1.0)


def _stack(rows: list[np.ndarray | None]) -> mx.array:
    return mx.array(np.stack([row for row in rows if row is not None]))


def _column(values: list, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(values, dtype=dtype)[:, None]
