"""The draft length comes near the best there is, follows what changes, and never costs much: in a simulated, noisy pairing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from runtime.scheduler.draft_costs import Acceptance, CostTable, Mean, expected_tokens
from runtime.scheduler.draft_worth import RowRound
from runtime.scheduler.drafting import MAX_DRAFT_TOKENS, DraftLength

RATIOS = [1 / 8, 1 / 3, 1.0]
SEEDS = range(6)
WIRE = 0.02


@dataclass
class Pairing:
    """A target whose forward costs 1 + slope for each token beyond the first, and a drafter at `ratio` of its cost."""

    acceptance: float
    ratio: float
    num_rows: int
    slope: float
    seed: int
    seconds: float = 0.0
    tokens_per_row: float = 0.0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def forward(self, num_tokens: int) -> float:
        return 1 + self.slope * (num_tokens - 1)

    def costs(self, length: int) -> tuple[float, float, float]:
        return self.ratio * self.forward(self.num_rows) * length, self.forward(self.num_rows * (length + 1)), WIRE

    def rate(self, length: int) -> float:
        """Tokens of a row a second, without noise, if the draft length is always the same."""
        if length == 0:
            return 1 / self.forward(self.num_rows)
        return sum(self.acceptance**number for number in range(length + 1)) / sum(self.costs(length))

    def best_rate(self) -> float:
        return max(self.rate(length) for length in range(MAX_DRAFT_TOKENS + 1))

    def noisy(self, seconds: float) -> float:
        """One in fifty is held up by something else; on average as long as given."""
        factor = max(0.5, self.random.gauss(1.0, 0.1)) * (2.5 if self.random.random() < 0.02 else 1.0)
        return seconds * factor / 1.03

    def run(self, control: DraftLength, until_tokens: float) -> float:
        """Tokens a second on the way there."""
        seconds, tokens = self.seconds, self.tokens_per_row
        while self.tokens_per_row < until_tokens:
            self.step(control)
        return (self.tokens_per_row - tokens) / (self.seconds - seconds)

    def step(self, control: DraftLength) -> None:
        length = control.choose(self.num_rows)
        if length == 0:
            spent = self.noisy(self.forward(self.num_rows))
            control.note_plain(self.num_rows, spent)
            self.seconds += spent
            self.tokens_per_row += 1
            return
        draft, verify, wire = (self.noisy(seconds) for seconds in self.costs(length))
        rows = [RowRound(length, length, self.num_matched(length)) for _ in range(self.num_rows)]
        control.note_round(length, rows, draft_seconds=draft, verify_seconds=verify, wire_seconds=wire)
        self.seconds += draft + verify + wire
        self.tokens_per_row += 1 + sum(row.num_matched for row in rows) / self.num_rows

    def num_matched(self, length: int) -> int:
        number = 0
        while number < length and self.random.random() < self.acceptance:
            number += 1
        return number


@pytest.mark.parametrize("slope", [0.02, 0.1], ids=["memory-bound", "compute-bound"])
@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("ratio", RATIOS, ids=["eighth", "third", "same"])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_after_a_short_learning_it_is_within_five_percent_of_the_best_length(
    acceptance: float, ratio: float, num_rows: int, slope: float
) -> None:
    shares = []
    for seed in SEEDS:
        pairing, control = Pairing(acceptance, ratio, num_rows, slope, seed), DraftLength()
        pairing.run(control, 100)
        shares.append(pairing.run(control, 1100) / pairing.best_rate())
    assert sum(shares) / len(shares) > 0.95, shares


@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("ratio", RATIOS, ids=["eighth", "third", "same"])
def test_a_drafter_that_is_never_right_costs_less_than_five_percent_from_the_first_token_on(ratio: float, num_rows: int) -> None:
    rates = [Pairing(0.0, ratio, num_rows, 0.02, seed).run(DraftLength(), 500) for seed in SEEDS]
    plain = Pairing(0.0, ratio, num_rows, 0.02, 0).rate(0)
    assert sum(rates) / len(rates) > 0.95 * plain


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("ratio", RATIOS[:2], ids=["eighth", "third"])
def test_it_stops_when_the_drafter_fails_and_recovers_when_it_is_right_again(ratio: float, num_rows: int) -> None:
    shares = []
    for seed in SEEDS:
        pairing, control = Pairing(0.9, ratio, num_rows, 0.02, seed), DraftLength()
        pairing.run(control, 400)
        assert control.stats()[0].state in ("on", "checking")
        pairing.acceptance = 0.0
        assert pairing.run(control, 900) > 0.94 * pairing.rate(0)
        (stats,) = control.stats()
        assert stats.state in ("off", "probing")
        pairing.acceptance = 0.9
        pairing.run(control, 1500)
        shares.append(pairing.run(control, 1900) / pairing.best_rate())
    assert sum(shares) / len(shares) > 0.95, shares


def test_probes_come_farther_and_farther_apart() -> None:
    pairing, control = Pairing(0.0, 1 / 8, 1, 0.02, 1), DraftLength()
    probes: list[float] = []
    while pairing.tokens_per_row < 4000:
        before = control.stats()[0].num_probes if control.stats() else 0
        pairing.step(control)
        if control.stats()[0].num_probes > before:
            probes.append(pairing.tokens_per_row)
    distances = [later - earlier for earlier, later in pairwise(probes)]
    assert distances[0] < 40 < 200 < distances[-1] < 300
    (stats,) = control.stats()
    assert stats.lost_seconds < 0.02 * pairing.seconds + 10


def test_the_guard_stops_a_drafter_that_fails_after_long_success_before_it_has_cost_fifteen_steps() -> None:
    for seed in SEEDS:
        pairing, control = Pairing(1.0, 1 / 8, 1, 0.02, seed), DraftLength()
        pairing.run(control, 2000)
        pairing.acceptance = 0.0
        begin, tokens = pairing.seconds, pairing.tokens_per_row
        while control.choose(1):
            pairing.step(control)
        assert pairing.seconds - begin - (pairing.tokens_per_row - tokens) < 15


def test_a_length_given_by_the_user_is_never_changed() -> None:
    pairing, control = Pairing(0.0, 1.0, 4, 0.1, 0), DraftLength(fixed=5)
    for _ in range(200):
        assert control.choose(4) == 5
        pairing.step(control)
    control.note_plain(4, 1.0)
    assert control.choose(4) == control.choose(1) == 5
    (stats,) = control.stats()
    assert (stats.state, stats.num_draft_tokens, stats.num_rounds) == ("fixed", 5, 200)
    assert len(stats.acceptance) == 5
    assert stats.expected_gain < -0.5


@pytest.mark.parametrize("choice", [{"fixed": 0}, {"fixed": -1}, {"max_tokens": 0}])
def test_a_length_below_one_is_refused(choice: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        DraftLength(**choice)


def test_a_step_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DraftLength().choose(0)


def test_asking_changes_nothing_and_a_batch_size_never_seen_decodes_plainly_first() -> None:
    control = DraftLength()
    assert [control.choose(rows) for rows in (1, 1, 3, 64)] == [0, 0, 0, 0]
    assert control.stats() == ()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_it_never_asks_for_more_than_the_greatest_length(most: int) -> None:
    pairing, control = Pairing(1.0, 1 / 8, 1, 0.0, 0), DraftLength(max_tokens=most)
    for _ in range(100):
        assert control.choose(1) <= most
        pairing.step(control)
    assert control.stats()[0].num_draft_tokens == most


def test_a_batch_size_seen_later_needs_no_second_apprenticeship() -> None:
    control = DraftLength()
    Pairing(0.0, 1 / 3, 1, 0.02, 3).run(control, 200)
    crowd = Pairing(0.0, 1 / 3, 8, 0.02, 4)
    for _ in range(5):
        crowd.step(control)
    _, stats = control.stats()
    assert (stats.num_rows, stats.num_rounds, stats.num_plain_steps) == (8, 0, 5)


def test_batch_sizes_that_start_at_the_same_time_do_not_wait_for_each_other() -> None:
    control = DraftLength()
    for rows in (1, 2, 4, 8):
        for _ in range(3):
            control.note_plain(rows, 1.0)
        assert control.choose(rows) > 0


def test_the_stats_tell_what_was_measured() -> None:
    pairing, control = Pairing(0.8, 1 / 8, 4, 0.02, 5), DraftLength()
    pairing.run(control, 600)
    (stats,) = control.stats()
    draft, verify, wire = pairing.costs(stats.num_draft_tokens)
    assert stats.num_rows == 4
    assert stats.plain_seconds == pytest.approx(pairing.forward(4), rel=0.1)
    assert stats.draft_seconds == pytest.approx(draft, rel=0.15)
    assert stats.verify_seconds == pytest.approx(verify, rel=0.15)
    assert stats.wire_seconds == pytest.approx(wire, rel=0.15)
    assert stats.acceptance[0] == pytest.approx(0.8, abs=0.15)
    assert stats.expected_gain == pytest.approx(pairing.rate(stats.num_draft_tokens) / pairing.rate(0) - 1, rel=0.4)
    assert stats.num_rounds + stats.num_plain_steps < 600


# -- the parts ------------------------------------------------------------------------------------------------


def test_expected_tokens_is_the_published_formula_when_all_positions_are_alike() -> None:
    for rate in (0.0, 0.3, 0.9):
        expected = expected_tokens([rate] * 6)
        assert expected == pytest.approx([(1 - rate ** (length + 1)) / (1 - rate) for length in range(7)])
    assert expected_tokens([1.0, 0.5]) == [1.0, 2.0, 2.5]


def test_acceptance_is_conditional_on_the_positions_before() -> None:
    acceptance = Acceptance(3)
    for number in range(600):
        acceptance.note(3, 0 if number % 2 else 2)
    first, second, third = acceptance.by_position()
    assert first == pytest.approx(0.5, abs=0.05)
    assert second > 0.9
    assert third < 0.1


def test_proposals_that_were_not_asked_for_are_not_held_against_the_drafter() -> None:
    cut, empty = Acceptance(2), Acceptance(2)
    for _ in range(100):
        cut.note(1, 1)
        empty.note(2, 1)
    assert cut.by_position()[1] > 0.9
    assert empty.by_position()[1] < 0.1


def test_positions_never_tried_are_believed_to_be_like_the_last_that_was() -> None:
    acceptance = Acceptance(8)
    for _ in range(100):
        acceptance.note(2, 2)
    assert min(acceptance.by_position()) > 0.95


def test_a_mean_is_not_moved_far_by_one_that_was_held_up() -> None:
    mean = Mean()
    for seconds in (1.0, 30.0, 1.1, 0.9, 1.0, 30.0, 1.0):
        mean.note(seconds)
    assert mean.value == pytest.approx(1.0, abs=0.15)


def test_sizes_never_measured_are_read_off_a_line_and_measured_ones_mostly_not() -> None:
    table = CostTable()
    for size in (1, 5, 9):
        for _ in range(20):
            table.note(size, 1 + 0.1 * size)
    assert table.estimates([3, 13, 40]) == pytest.approx([1.3, 2.3, 5.0])
    for _ in range(20):
        table.note(13, 4.0)
    assert table.estimates([13])[0] == pytest.approx(4.0, rel=0.1)


def test_from_one_size_alone_cost_is_taken_to_grow_with_size() -> None:
    table = CostTable()
    table.note(2, 1.0)
    assert table.estimates([4]) == pytest.approx([2.0])
    assert table.estimates([4], anchor=(1, 1.0)) == pytest.approx([1.0])


def test_nothing_measured_is_nothing_known() -> None:
    with pytest.raises(ValueError, match="measure one size first"):
        CostTable().estimates([1])


@pytest.mark.parametrize("num_late", [1, 3])
def test_a_drafter_that_is_late_before_anything_was_measured_is_tried_again_within_the_account(num_late: int) -> None:
    controller = DraftLength()
    num_tries = 0
    for _ in range(3000):
        if controller.choose(1) == 0:
            controller.note_plain(1, 0.1)
        elif num_tries < num_late:
            num_tries += 1
            controller.note_late(1, 0.5)
        else:
            controller.note_round(
                controller.choose(1), [RowRound(1, 1, 1)], draft_seconds=0.01, verify_seconds=0.1, wire_seconds=0.001
            )
    assert num_tries == num_late
    assert controller.choose(1) > 0
    assert controller.stats()[0].lost_seconds == pytest.approx(0.5 * num_late, abs=0.5)
