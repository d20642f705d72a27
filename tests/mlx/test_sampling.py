"""Draws are right (against a slow plain oracle), fair (chi-square), keyed by seed and position, and blind to their batch-mates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from runtime.engine import logit_math
from runtime.engine.engine import RowError
from runtime.engine.sampling import RowSampler, draw
from runtime.protocol.commands import Sampling

NAN, INF = float("nan"), float("inf")


def sampler(vocabulary_size: int, *, prompt: Sequence[int] = (), output: Sequence[int] = (), **options) -> RowSampler:
    return RowSampler(Sampling(**options), vocabulary_size, prompt=prompt, output=output)


def tokens_of(logits: np.ndarray, samplers: Sequence[RowSampler], positions: Sequence[int]) -> list[int]:
    return draw(mx.array(logits), samplers, positions).tokens.tolist()


def draws(logits_row: np.ndarray, one: RowSampler, positions: Sequence[int]) -> np.ndarray:
    """Draws of one sampler without penalties, at many positions."""
    logits = mx.broadcast_to(mx.array(logits_row), (len(positions), len(logits_row)))
    return np.array(draw(logits, [one] * len(positions), positions).tokens)


# -- the oracle: one row, double precision, loops ---------------------------------------------------------------


@dataclasses.dataclass
class Verdict:
    adjusted: np.ndarray
    scaled: np.ndarray
    kept: list[int]
    margin: float
    """Distance of the closest cumulated probability from top_p: below float precision the kept set is a matter of taste."""


def oracle(logits: np.ndarray, options: Sampling, prompt: Sequence[int], output: Sequence[int]) -> Verdict:
    values = logits.astype(np.float64)
    for token, bias in options.logit_bias:
        values[token] += bias
    for token in set(prompt) | set(output):
        values[token] = (
            values[token] / options.repetition_penalty if values[token] > 0 else values[token] * options.repetition_penalty
        )
    for token in set(output):
        values[token] -= options.presence_penalty + options.frequency_penalty * list(output).count(token)
    scaled = (values - values.max()) / max(options.temperature, 1e-6)
    ranked = sorted(range(len(values)), key=lambda token: (-scaled[token], token))
    if options.top_k:
        ranked = ranked[: options.top_k]
    weights = [math.exp(scaled[token]) for token in ranked]
    total, before, kept, margin = sum(weights), 0.0, [], INF
    for token, weight in zip(ranked, weights, strict=True):
        if options.top_p < 1:
            margin = min(margin, abs(before / total - options.top_p))
            if before / total >= options.top_p:
                break
        kept.append(token)
        before += weight
    if options.min_p:
        kept = [token for token in kept if math.exp(scaled[token]) >= options.min_p * (1 - 1e-6)]
        margin = min([margin, *(abs(math.exp(value) - options.min_p) for value in scaled)])
    return Verdict(values, scaled, kept, margin)


def random_options(random: np.random.Generator, vocabulary_size: int) -> Sampling:
    def maybe(value, otherwise):
        return value if random.random() < 0.5 else otherwise

    tokens = random.choice(vocabulary_size, size=3, replace=False)
    return Sampling(
        temperature=maybe(float(random.uniform(0.2, 2.0)), 1.0),
        top_p=maybe(float(random.uniform(0.05, 0.99)), 1.0),
        top_k=maybe(int(random.integers(1, vocabulary_size + 10)), 0),
        min_p=maybe(float(random.uniform(0.001, 0.5)), 0.0),
        repetition_penalty=maybe(float(random.uniform(0.5, 2.0)), 1.0),
        presence_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        logit_bias=maybe(tuple((int(token), float(random.uniform(-5, 5))) for token in tokens), ()),
        seed=int(random.integers(0, 1 << 63)),
    )


@pytest.mark.parametrize("case", range(40))
def test_filters_and_penalties_agree_with_the_oracle_also_where_logits_tie(case: int) -> None:
    random = np.random.default_rng(case)
    vocabulary_size = int(random.integers(4, 90))
    # Rounded to halves: most values are shared by several tokens.
    logits = (np.round(random.normal(0, 3, vocabulary_size) * 2) / 2).astype(np.float32)
    prompt, output = (random.integers(0, vocabulary_size, size).tolist() for size in (7, 9))
    options = random_options(random, vocabulary_size)
    verdict = oracle(logits, options, prompt, output)
    while verdict.margin < 1e-5:
        options = random_options(random, vocabulary_size)
        verdict = oracle(logits, options, prompt, output)
    positions = list(range(60))
    noise = np.array(logit_math.gumbel([logit_math.draw_key(options.seed, position) for position in positions], vocabulary_size))
    for position in positions:
        one = RowSampler(options, vocabulary_size, prompt=prompt, output=output)
        token = tokens_of(logits[None], [one], [position])[0]
        assert token in verdict.kept
        scores = verdict.scaled + noise[position]
        assert scores[token] >= max(scores[kept] for kept in verdict.kept) - 1e-4


def test_top_k_one_and_tiny_top_p_and_full_min_p_and_tiny_temperature_are_the_argmax_with_ties_to_the_lowest_id() -> None:
    logits = np.array([1.0, 5.0, 5.0, 2.0, 5.0, -3.0], np.float32)
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        assert set(draws(logits, sampler(6, temperature=1.0, seed=5, **options), range(200))) == {1}
    assert set(draws(logits, sampler(6, temperature=1.0, min_p=1.0), range(200))) == {1, 2, 4}
    assert set(draws(logits, sampler(6, temperature=1e-7), range(200))) == {1, 2, 4}
    distinct = np.random.default_rng(0).normal(size=500).astype(np.float32)
    for temperature in (0.0, 1e-300, 1e-7, 1e-6):
        assert set(draws(distinct, sampler(500, temperature=temperature), range(50))) == {int(distinct.argmax())}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    """Four equal tokens have exactly a quarter each: two of them reach a half, and a hair more takes a third."""
    for top_p, kept in ((0.25, {0}), (0.26, {0, 1}), (0.5, {0, 1}), (0.51, {0, 1, 2}), (0.75, {0, 1, 2}), (0.999, {0, 1, 2, 3})):
        assert set(draws(np.zeros(4, np.float32), sampler(4, temperature=1.0, top_p=top_p), range(200))) == kept


def test_top_k_keeps_exactly_k_of_equal_tokens_those_of_the_lowest_ids() -> None:
    assert set(draws(np.zeros(300, np.float32), sampler(300, temperature=1.0, top_k=5), range(400))) == set(range(5))


def test_a_top_k_beyond_the_vocabulary_and_neutral_filters_change_nothing() -> None:
    logits = np.random.default_rng(1).normal(size=40).astype(np.float32)
    plain = draws(logits, sampler(40, temperature=0.8, seed=9), range(100))
    for options in ({"top_k": 40}, {"top_k": 999_999}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert draws(logits, sampler(40, temperature=0.8, seed=9, **options), range(100)).tolist() == plain.tolist()


# -- fairness ---------------------------------------------------------------------------------------------------

CHI_SQUARE_9999_OF_19 = 50.8
"""Quantile 0.9999 of chi-square with 19 degrees of freedom."""


def chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 7, (1 << 64) - 1])
def test_draws_follow_the_softmax(seed: int) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, 20).astype(np.float32)
    temperature = 0.9
    weights = np.exp(logits.astype(np.float64) / temperature)
    drawn = draws(logits, sampler(20, temperature=temperature, seed=seed), range(20_000))
    observed = np.bincount(drawn, minlength=20)
    assert chi_square(observed, weights / weights.sum()) < CHI_SQUARE_9999_OF_19
    assert chi_square(observed, np.full(20, 0.05)) > 1000  # the test can tell


def test_draws_of_many_seeds_at_one_position_follow_the_softmax_too() -> None:
    logits = np.zeros((4000, 20), np.float32)
    samplers = [sampler(20, temperature=1.0, seed=seed) for seed in range(4000)]
    observed = np.bincount(tokens_of(logits, samplers, [17] * 4000), minlength=20)
    assert chi_square(observed, np.full(20, 0.05)) < CHI_SQUARE_9999_OF_19


def test_a_long_tail_of_unlikely_tokens_gets_its_share() -> None:
    """One token holds half of the probability, 4,095 share the rest: unfair noise in the tail would show here."""
    logits = np.zeros(4096, np.float32)
    logits[0] = math.log(4095)
    share = float((draws(logits, sampler(4096, temperature=1.0, seed=1), range(4000)) == 0).mean())
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(4000)


def test_noise_is_gumbel_finite_and_the_same_for_vocabularies_padded_differently() -> None:
    keys = [logit_math.draw_key(3, position) for position in range(8)]
    noise = np.array(logit_math.gumbel(keys, 49_000))
    assert np.isfinite(noise).all()
    ordered = np.sort(noise, axis=None)
    theory = np.exp(-np.exp(-ordered))
    assert np.abs(theory - np.arange(1, ordered.size + 1) / ordered.size).max() * math.sqrt(ordered.size) < 1.95
    assert (np.array(logit_math.gumbel(keys, 49_152))[:, :49_000] == noise).all()


# -- keys -------------------------------------------------------------------------------------------------------


def test_another_seed_or_another_position_draws_otherwise_and_the_same_ones_draw_the_same() -> None:
    logits = np.zeros(1000, np.float32)
    first = draws(logits, sampler(1000, temperature=1.0, seed=1), range(50)).tolist()
    assert draws(logits, sampler(1000, temperature=1.0, seed=1), range(50)).tolist() == first
    assert len(set(first)) > 40
    for seed in (0, 2, 1 << 32, (1 << 64) - 1, 1 | 1 << 63):
        other = draws(logits, sampler(1000, temperature=1.0, seed=seed), range(50)).tolist()
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_drawing_leaves_the_global_generator_alone_and_is_not_moved_by_it() -> None:
    logits = np.zeros(100, np.float32)
    mx.random.seed(1)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(1)
    first = draws(logits, sampler(100, temperature=1.0), range(20)).tolist()
    assert mx.random.uniform(shape=(3,)).tolist() == expected
    assert draws(logits, sampler(100, temperature=1.0), range(20)).tolist() == first


# -- the law: a row is blind to its batch-mates -------------------------------------------------------------------


def mixed_rows(num_rows: int, vocabulary_size: int, seed: int) -> list[tuple[Sampling, list[int], list[int]]]:
    random = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        options = Sampling() if index % 3 == 0 else random_options(random, vocabulary_size)
        if index % 5 == 1:
            options = Sampling(frequency_penalty=0.7, repetition_penalty=1.3)
        if index % 4 == 2:
            options = Sampling(temperature=0.7, seed=index, logprobs=index % 7)
        rows.append((options, *(random.integers(0, vocabulary_size, 5).tolist() for _ in range(2))))
    return rows


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 13, 21, 32])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_each_row_of_a_mixed_batch_draws_what_it_draws_alone_step_after_step(num_rows: int, dtype: mx.Dtype) -> None:
    vocabulary_size = 263
    rows = mixed_rows(num_rows, vocabulary_size, seed=num_rows)
    together = [RowSampler(options, vocabulary_size, prompt=p, output=o) for options, p, o in rows]
    alone = [RowSampler(options, vocabulary_size, prompt=p, output=o) for options, p, o in rows]
    random = np.random.default_rng(99)
    for step in range(4):
        logits = mx.array(random.normal(0, 4, (num_rows, vocabulary_size)).astype(np.float32)).astype(dtype)
        positions = [10 + step + 3 * row for row in range(num_rows)]
        batch = draw(logits, together, positions)
        single = [draw(logits[row : row + 1], [alone[row]], [positions[row]]) for row in range(num_rows)]
        assert batch.tokens.dtype == mx.int32
        assert batch.tokens.tolist() == [one.tokens.item() for one in single]
        assert batch.logprobs() == [one.logprobs()[0] for one in single]
        order = random.permutation(num_rows)
        shuffled = [RowSampler(o, vocabulary_size, prompt=p, output=[]) for o, p, _ in (rows[row] for row in order)]
        again = [RowSampler(o, vocabulary_size, prompt=p, output=[]) for o, p, _ in rows]
        moved = draw(logits[mx.array(order)], shuffled, [positions[row] for row in order]).tokens.tolist()
        unmoved = draw(logits, again, positions).tokens.tolist()
        assert moved == [unmoved[row] for row in order]


def test_rows_of_a_large_vocabulary_are_blind_too() -> None:
    random = np.random.default_rng(5)
    logits = random.normal(0, 3, (6, 50_257)).astype(np.float32)
    options = [
        Sampling(),
        Sampling(temperature=0.8, seed=1),
        Sampling(temperature=1.2, top_p=0.9, seed=2),
        Sampling(temperature=0.7, top_k=40, top_p=0.95, min_p=0.02, seed=3),
        Sampling(temperature=0.7, top_k=700, top_p=0.9, seed=4),
        Sampling(temperature=1.0, repetition_penalty=1.2, logprobs=20, seed=5),
    ]
    batch = draw(mx.array(logits), [RowSampler(o, 50_257, prompt=[1, 2], output=[3]) for o in options], range(6))
    for row, option in enumerate(options):
        one = draw(mx.array(logits[row : row + 1]), [RowSampler(option, 50_257, prompt=[1, 2], output=[3])], [row])
        assert one.tokens.item() == batch.tokens.tolist()[row]
        assert one.logprobs()[0] == batch.logprobs()[row]


def test_a_row_may_change_its_batch_mates_from_step_to_step() -> None:
    """What is remembered about a batch must not outlive it, also when the first row and the number of rows stay."""
    logits = np.random.default_rng(8).normal(0, 2, (2, 80)).astype(np.float32)
    first, greedy, sampled, biased = (
        sampler(80),
        sampler(80),
        sampler(80, temperature=1.0, seed=3),
        sampler(80, logit_bias=((9, 99.0),)),
    )
    alone = [tokens_of(logits[1:], [mate], [5])[0] for mate in (greedy, sampled, biased)]
    for _ in range(2):
        assert [tokens_of(logits, [first, mate], [5, 5])[1] for mate in (greedy, sampled, biased)] == alone
    assert len(set(alone)) == 3


# -- history ------------------------------------------------------------------------------------------------------


def test_penalties_count_tokens_that_are_still_being_computed() -> None:
    """Four steps are built before any is evaluated; a strong frequency penalty must still move on to the next best each time."""
    logits = np.array([[4.0, 3.0, 2.0, 1.0, 0.0]], np.float32)
    one = sampler(5, frequency_penalty=10.0)
    steps = [draw(mx.array(logits), [one], [position]) for position in range(5)]
    assert [step.tokens.item() for step in steps] == [0, 1, 2, 3, 4]


def test_rewind_forgets_thrown_away_tokens() -> None:
    logits = np.array([[4.0, 3.0, 2.0, 1.0]], np.float32)
    one = sampler(4, prompt=[3], frequency_penalty=10.0)
    assert tokens_of(logits, [one], [1]) == [0]
    assert tokens_of(logits, [one], [2]) == [1]
    one.rewind([0])
    assert tokens_of(logits, [one], [2]) == [1]
    one.rewind([])
    assert tokens_of(logits, [one], [1]) == [0]


def test_positions_drawn_in_one_go_with_presumed_tokens_draw_what_they_draw_one_by_one() -> None:
    """Two sequences of different numbers of positions beside one without penalties; then each goes on from its last draw."""
    logits = np.random.default_rng(8).normal(size=(8, 40)).astype(np.float32)
    options: list[dict] = [
        {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.7, "seed": 4, "logprobs": 2},
        {"temperature": 0.9, "seed": 9},
        {"repetition_penalty": 1.7, "frequency_penalty": 2.0},
    ]
    said, proposed = [7, 7, 3], [3, 3, 11]
    blocks = [(0, 4), (4, 1), (5, 2)]  # first row of logits, number of positions
    together = [sampler(40, prompt=[1, 2], output=said, **one) for one in options]
    drawn = draw(
        mx.array(logits[:7]),
        [one for one, (_, num) in zip(together, blocks, strict=True) for _ in range(num)],
        [5 + ahead for _, num in blocks for ahead in range(num)],
        [proposed[:ahead] for _, num in blocks for ahead in range(num)],
    )
    for one, own, (first, num) in zip(together, options, blocks, strict=True):
        for ahead in range(num):
            alone = sampler(40, prompt=[1, 2], output=said + proposed[:ahead], **own)
            expected = draw(mx.array(logits[first + ahead : first + ahead + 1]), [alone], [5 + ahead])
            assert drawn.tokens.tolist()[first + ahead] == expected.tokens.item()
            assert drawn.logprobs()[first + ahead] == expected.logprobs()[0]
        assert tokens_of(logits[7:], [one], [5 + num]) == tokens_of(logits[7:], [alone], [5 + num])


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not() -> None:
    logits = np.array([[2.0, 1.9, -1.0, -1.1]], np.float32)
    assert tokens_of(logits, [sampler(4, prompt=[0, 0], presence_penalty=5.0, frequency_penalty=5.0)], [2]) == [0]
    assert tokens_of(logits, [sampler(4, prompt=[0], output=[], repetition_penalty=1.2)], [1]) == [1]
    assert tokens_of(logits, [sampler(4, output=[0], repetition_penalty=1.2)], [1]) == [1]
    # A negative logit is multiplied, not divided: it falls.
    assert tokens_of(np.array([[-1.0, -1.1]], np.float32), [sampler(2, prompt=[0], repetition_penalty=1.2)], [1]) == [1]


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_penalised_distribution_before_temperature_with_the_best_alternatives() -> None:
    logits = np.array([0.5, 2.0, 2.0, -1.0, 2.0], np.float32)
    one = sampler(5, temperature=0.3, seed=4, logit_bias=((3, 4.0),), output=[3], presence_penalty=0.5, logprobs=3)
    adjusted = logits.astype(np.float64)
    adjusted[3] += 4.0 - 0.5
    expected = adjusted - np.log(np.exp(adjusted).sum())
    drawn = draw(mx.array(logits[None]), [one], [8])
    (report,) = drawn.logprobs()[0]
    assert report.token == drawn.tokens.item()
    assert report.logprob == pytest.approx(expected[report.token], abs=1e-5)
    assert [token for token, _ in report.top] == [3, 1, 2]
    assert [value for _, value in report.top] == pytest.approx(expected[[3, 1, 2]], abs=1e-5)


def test_the_smallest_allowed_penalty_leaves_logits_and_log_probabilities_finite() -> None:
    one = sampler(4, prompt=[0, 1], repetition_penalty=5e-324, logprobs=3, temperature=1.0)
    (report,) = draw(mx.array([[30.0, -30.0, 1.0, 0.0]]), [one], [8]).logprobs()[0]
    assert report.token == 0
    assert all(math.isfinite(value) for value in (report.logprob, *(value for _, value in report.top)))


def test_only_rows_that_asked_get_logprobs() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 30)).astype(np.float32)
    drawn = draw(mx.array(logits), [sampler(30), sampler(30, logprobs=0), sampler(30, logprobs=30 - 10)], [0, 0, 0])
    mx.eval(drawn.arrays())
    none, chosen, best = drawn.logprobs()
    assert none == ()
    assert chosen[0].token == int(logits[1].argmax())
    assert chosen[0].top == ()
    assert len(best[0].top) == 20
    assert best[0].top[0] == (best[0].token, best[0].logprob)
    assert [value for _, value in best[0].top] == sorted((value for _, value in best[0].top), reverse=True)


def test_a_vocabulary_smaller_than_the_alternatives_asked_for_reports_all_of_it() -> None:
    (report,) = draw(mx.zeros((1, 4)), [sampler(4, logprobs=20)], [0]).logprobs()[0]
    assert report.top == tuple((token, pytest.approx(-math.log(4))) for token in range(4))


# -- bad rows ---------------------------------------------------------------------------------------------------------

POISONS = {
    "one NaN": lambda row: row.__setitem__(5, NAN),
    "first NaN": lambda row: row.__setitem__(0, NAN),
    "all NaN": lambda row: row.__setitem__(slice(None), NAN),
    "plus infinity": lambda row: row.__setitem__(7, INF),
    "nothing but minus infinity": lambda row: row.__setitem__(slice(None), -INF),
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 1.0, "top_p": 0.5, "top_k": 9, "min_p": 0.1, "presence_penalty": 1.0},
    ],
)
def test_a_row_without_finite_logits_is_reported_stays_in_range_and_harms_nobody(poison: str, options: dict) -> None:
    logits = np.random.default_rng(2).normal(size=(3, 50)).astype(np.float32)
    healthy = [draw(mx.array(logits[row : row + 1]), [sampler(50, **options)], [row]).tokens.item() for row in (0, 2)]
    POISONS[poison](logits[1])
    drawn = draw(mx.array(logits), [sampler(50, **options) for _ in range(3)], [0, 1, 2])
    mx.eval(drawn.arrays())
    assert drawn.finite.tolist() == [True, False, True]
    tokens = drawn.tokens.tolist()
    assert [tokens[0], tokens[2]] == healthy
    assert 0 <= tokens[1] < 50
    assert drawn.logprobs()[1] == ()


def test_tokens_forbidden_by_minus_infinity_are_fine_and_never_drawn() -> None:
    logits = np.full(60, -INF, np.float32)
    logits[[7, 9]] = 0.0
    for options in ({}, {"top_p": 0.999}, {"top_k": 30}, {"min_p": 0.01}, {"repetition_penalty": 1.5}):
        samplers = [sampler(60, temperature=1.5, prompt=[7, 8], **options) for _ in range(64)]
        drawn = draw(mx.array(np.tile(logits, (64, 1))), samplers, range(64))
        assert set(drawn.tokens.tolist()) == {7, 9}
        assert all(drawn.finite.tolist())


BAD_VALUES = [
    *((name, bad) for name in ("temperature", "top_p", "min_p", "repetition_penalty") for bad in (NAN, INF, -INF, -0.1, True, "1")),
    *((name, bad) for name in ("presence_penalty", "frequency_penalty") for bad in (NAN, INF, -10.1, 10.1, None)),
    ("temperature", 10.5),
    ("top_p", 0.0),
    ("top_p", 1.0001),
    ("min_p", 1.0001),
    ("repetition_penalty", 0.0),
    *(("top_k", bad) for bad in (-1, 1.0, True, 1_000_001)),
    *(("seed", bad) for bad in (-1, 1 << 64, 0.5)),
    *(("logprobs", bad) for bad in (-2, 21, 1.5)),
    *(
        ("logit_bias", bad)
        for bad in (((100, 1.0),), ((-1, 1.0),), ((3, NAN),), ((3, 10_001.0),), ((3, 1.0), (3, 2.0)), ((1.5, 0.0),))
    ),
]


@pytest.mark.parametrize(("option", "bad"), BAD_VALUES)
def test_every_bad_value_is_refused_by_name_value_and_range(option: str, bad: object) -> None:
    with pytest.raises(RowError, match=f"{option}.*got .*; allowed: ") as caught:
        RowSampler(Sampling(**{option: bad}), 100, prompt=[], output=[])
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("bad", [-1, 100, 1 << 31, 1 << 40])
@pytest.mark.parametrize("where", ["prompt", "output"])
def test_ids_outside_the_vocabulary_are_refused_with_their_place(bad: int, where: str) -> None:
    ids = {"prompt": [1, 2], "output": [3]}
    ids[where] = [0, 99, bad]
    with pytest.raises(RowError, match=rf"{where}: token id {bad} at index 2 is outside the vocabulary; allowed: 0 to 99"):
        RowSampler(Sampling(), 100, **ids)
    one = sampler(100)
    with pytest.raises(RowError, match="output: token id"):
        one.rewind([bad])
