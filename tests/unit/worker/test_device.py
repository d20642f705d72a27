"""The device lease between workers, here several in one process: locks of separate open files exclude each other all the same."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.protocol.commands import DeviceLease
from runtime.worker.device import DeviceTimeout, FreeDevice, LeasedDevice, device_of
from runtime.worker.device_queue import MAX_SEATS, DeviceQueue, NoSeat
from runtime.worker.status import Status
from runtime.worker.turns import MAX_OVERTAKES

Maker = Callable[..., LeasedDevice]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    made: list[LeasedDevice] = []

    def make_device(num_slots: int = 1, *, status: Status | None = None, patience_seconds: float = 60.0) -> LeasedDevice:
        lease = DeviceLease(str(tmp_path / "device"), num_slots, patience_seconds)
        made.append(LeasedDevice(lease, status or Status()))
        return made[-1]

    yield make_device
    for device in made:
        device.close()


def take(device: LeasedDevice, *, is_background: bool = False) -> bool:
    return device.take(is_background=is_background)


def test_without_a_lease_everybody_computes() -> None:
    device = device_of(None, Status())
    assert isinstance(device, FreeDevice)
    assert device.take(is_background=True)
    assert not device.is_wanted()


def test_a_lease_of_one_lets_one_in_until_it_gives_back(make: Maker) -> None:
    one, other = make(), make()
    assert take(one)
    assert take(one)  # another step
    assert not take(other)
    assert other.is_waiting
    one.give_back()
    assert take(other)
    assert not other.is_waiting
    assert not take(one)


def test_a_lease_of_two_lets_two_in(make: Maker) -> None:
    devices = [make(2) for _ in range(3)]
    assert [take(device) for device in devices] == [True, True, False]
    devices[0].give_back()
    assert take(devices[2])
    assert not take(devices[0])


def test_a_worker_that_ends_holds_nothing(make: Maker) -> None:
    one, other = make(), make()
    assert take(one)
    one.close()
    one.close()
    assert take(other)


def test_a_holder_hears_that_somebody_waits_and_only_then(make: Maker) -> None:
    one, other = make(), make()
    assert take(one)
    assert not one.is_wanted()
    assert not take(other)
    assert one.is_wanted()
    other.withdraw()
    assert not one.is_wanted()
    assert not other.is_wanted()


def test_who_gives_back_and_comes_again_stands_behind_who_waits(make: Maker) -> None:
    one, other = make(), make()
    assert take(one)
    assert not take(other)
    one.give_back()
    assert not one._queue.is_my_turn()
    assert other._queue.is_my_turn()
    assert take(other)


def test_an_interactive_holder_goes_on_beside_background_work_for_a_bounded_number_of_steps(make: Maker) -> None:
    reader, batch = make(), make()
    assert take(reader)
    assert not take(batch, is_background=True)
    num_steps = 0
    while not reader.is_wanted():
        assert take(reader)
        num_steps += 1
    assert num_steps == MAX_OVERTAKES
    reader.give_back()
    assert take(batch, is_background=True)
    assert not batch.is_wanted()


def test_the_bell_wakes_the_next_one_long_before_its_slice_ends(make: Maker) -> None:
    one, other = make(), make()
    assert take(one)
    assert not take(other)
    one.give_back()
    assert other._queue.sleep(0.0)
    assert not other._queue.sleep(0.0)


def test_a_sleeper_whose_turn_it_is_holds_up_nobody_for_more_than_a_moment(make: Maker) -> None:
    one, sleeper, other = make(), make(), make()
    assert take(one)
    assert not take(sleeper)
    one.give_back()
    tries = 1
    while not take(other):
        tries += 1
    assert tries <= 3
    assert not other.is_wanted()  # it has been struck out
    assert not take(sleeper)  # and has entered again
    assert other.is_wanted()


def test_waits_are_counted_and_said_to_the_heartbeat(make: Maker) -> None:
    status = Status()
    one, other = make(), make(status=status)
    assert take(one)
    assert not take(other)
    assert not take(other)
    assert status.phase == "waiting"
    one.give_back()
    assert take(other)
    assert status.num_device_waits == 1
    assert status.device_wait_seconds > 0


def test_a_wait_is_bounded(make: Maker) -> None:
    one, other = make(), make(patience_seconds=1e-9)
    assert take(one)
    assert not take(other)
    with pytest.raises(DeviceTimeout, match=r"not free within 1e-09 s.*device_lease"):
        take(other)


def test_what_a_dead_worker_left_in_its_seat_is_swept_away_by_the_next_turn(make: Maker) -> None:
    one = make()
    assert take(one)
    one._queue._memory[MAX_SEATS - 1] = 1  # "an interactive worker waits", and nobody is there
    assert one.is_wanted()
    one.give_back()
    tries = 1
    while not take(one):
        tries += 1
    assert tries <= 2
    assert not one.is_wanted()


def test_there_is_an_end_of_seats(tmp_path: Path) -> None:
    queues = [DeviceQueue(tmp_path) for _ in range(MAX_SEATS)]
    assert sorted(queue.seat for queue in queues) == list(range(MAX_SEATS))
    with pytest.raises(NoSeat, match="device_lease=None"):
        DeviceQueue(tmp_path)
    queues[7].close()
    queues[7] = DeviceQueue(tmp_path)
    assert queues[7].seat == 7
    for queue in queues:
        queue.close()


def test_its_files_are_nobody_elses(make: Maker, tmp_path: Path) -> None:
    make()
    assert stat.S_IMODE((tmp_path / "device").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "device").iterdir()} == {0o600}


def test_a_turn_that_nobody_else_wants_costs_next_to_nothing(make: Maker) -> None:
    """The bound is generous, for machines that do something else as well; `benchmarks.device_lease` has the figure."""
    device = make()
    costs = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            take(device)
            device.give_back()
        costs.append((time.perf_counter() - began) / 50)
    assert min(costs) < 100e-6
