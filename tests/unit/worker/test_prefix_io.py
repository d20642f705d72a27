"""Only rows that need a file wait for the disk, and nothing that happens there ends a worker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine import fake
from runtime.engine.engine import Loaded
from runtime.prefix import publish, restore
from runtime.protocol.commands import AnyCommand, FakeScript, Load
from runtime.protocol.events import AnyEvent, Kept, Restored, SegmentPublished, SegmentRejected, StepDone
from runtime.testing import expected_tokens
from runtime.worker import prefix_io
from runtime.worker.prefix_form import form_of
from tests.support.phases import Phases, ends, publish_all, release, restored, said, segments_of, start

WAIT_SECONDS = 20.0
PROMPT = [32 + (7 * index + index // 95) % 95 for index in range(1300)]


def load_fake() -> Loaded:
    return fake.load(Load("m", "", kind="fake", fake=FakeScript()), lambda stage, done, total: None)


def published(root: Path) -> list[Any]:
    stage = Phases(load_fake(), [start(1, PROMPT)], root=root)
    stage.channel.on_send = publish_all
    form = form_of(load_fake())
    assert form is not None
    return segments_of(stage.run(), form=form, length=len(PROMPT))


def tokens_of(events: list[AnyEvent], sequence: int) -> list[int]:
    return [token for tokens, _ in said(events, sequence) for token in tokens]


def test_other_rows_step_on_while_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = published(tmp_path)
    has_ended = threading.Event()
    read = restore.read

    def slow(*arguments: Any, **options: Any) -> Any:
        assert has_ended.wait(WAIT_SECONDS), "the other row waited for the file"
        return read(*arguments)

    monkeypatch.setattr(restore, "read", slow)
    stage = Phases(load_fake(), [start(1, PROMPT, segments=segments), start(2, PROMPT[:50], max_tokens=30)], root=tmp_path)

    def note(event: AnyEvent) -> list[AnyCommand]:
        if isinstance(event, StepDone) and any(row.finish for row in event.rows):
            has_ended.set()
        return []

    stage.channel.on_send = note
    events = stage.run()
    assert ends(events, 2) == ["length"]
    assert restored(events, 1).length == 1280
    assert restored(events, 1).misses == ()
    assert tokens_of(events, 1) == expected_tokens(PROMPT, max_tokens=4)


@pytest.mark.parametrize("error", [MemoryError("none left"), ValueError("a defect")])
def test_a_read_that_raises_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    segments = published(tmp_path)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(restore, "read", fail)
    events = Phases(load_fake(), [start(1, PROMPT, segments=segments)], root=tmp_path).run()
    assert [miss.reason for miss in restored(events, 1).misses] == ["unreadable"]
    assert tokens_of(events, 1) == expected_tokens(PROMPT, max_tokens=4)


def test_a_write_that_raises_is_a_rejection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(publish, "publish", fail)
    stage = Phases(load_fake(), [start(1, PROMPT)], root=tmp_path)
    stage.channel.on_send = publish_all
    rejected = [event for event in stage.run() if isinstance(event, SegmentRejected)]
    assert [event.reason for event in rejected] == ["io"] * 3
    assert "none left" in rejected[0].detail


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_file_waits_for_room_a_while(is_deleted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_bytes = 1 << 20
    old = tmp_path / "v1" / "other model" / "ab" / f"{'ab' * 32}.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(limit_bytes))
    write, times = publish.publish, [0]

    def writing(*arguments: Any, **options: Any) -> Any:
        times[0] += 1
        if is_deleted and times[0] == 5:
            old.unlink()
        return write(*arguments, **options)

    monkeypatch.setattr(publish, "publish", writing)
    monkeypatch.setattr(prefix_io, "PATIENCE_SECONDS", WAIT_SECONDS if is_deleted else 0.1)
    stage = Phases(load_fake(), [start(1, PROMPT)], root=tmp_path, prefix_disk_bytes=limit_bytes)
    stage.channel.on_send = publish_all
    events = stage.run()
    assert sum(isinstance(event, SegmentPublished) for event in events) == (3 if is_deleted else 0)
    rejected = [event.reason for event in events if isinstance(event, SegmentRejected)]
    assert rejected == ([] if is_deleted else ["over_budget"] * 3)
    assert times[0] > 5


def test_little_may_wait_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_io, "MAX_WAITING_BYTES", 1024 * 16)
    monkeypatch.setattr(prefix_io.PrefixThread, "_work", lambda self: None)  # a disk that never gets to it
    stage = Phases(load_fake(), [start(1, PROMPT)], root=tmp_path)
    stage.channel.on_send = publish_all
    stage.loop._prefixes.patience_seconds = lambda: None  # type: ignore[method-assign]
    assert [event.reason for event in stage.run() if isinstance(event, SegmentRejected)] == ["busy"]


def test_reads_go_before_writes_and_the_file_at_hand_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = published(tmp_path)
    order: list[str] = []
    read, write = restore.read, publish.publish
    has_begun, may_write = threading.Event(), threading.Event()
    ask = prefix_io.PrefixThread.read

    def asking(self: prefix_io.PrefixThread, job: prefix_io.ReadJob) -> None:
        ask(self, job)
        may_write.set()

    def reading(*arguments: Any, **options: Any) -> Any:
        order.append("read")
        return read(*arguments)

    def writing(*arguments: Any, **options: Any) -> Any:
        has_begun.set()
        assert may_write.wait(WAIT_SECONDS)
        order.append("write")
        return write(*arguments, **options)

    monkeypatch.setattr(restore, "read", reading)
    monkeypatch.setattr(publish, "publish", writing)
    monkeypatch.setattr(prefix_io.PrefixThread, "read", asking)
    other = [33, *PROMPT[1:]]
    stage = Phases(load_fake(), [start(1, other)], root=tmp_path)

    def answer(event: AnyEvent) -> list[AnyCommand]:
        if isinstance(event, StepDone) and any(row.finish and row.sequence == 1 for row in event.rows):
            assert has_begun.wait(WAIT_SECONDS)
            return [start(2, PROMPT, segments=segments[:1], keep=False)]
        if isinstance(event, Kept):
            return publish_all(event)
        return []

    stage.channel.on_send = answer
    events = stage.run()
    assert order == ["write", "read", "write", "write"]
    assert restored(events, 2).length == 512
    assert sum(isinstance(event, SegmentPublished) for event in events) == 3


def test_the_rest_is_dropped_when_the_worker_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Phases(load_fake(), [start(1, PROMPT)], root=tmp_path)
    is_closing = threading.Event()
    write, close = publish.publish, prefix_io.PrefixThread.close

    def writing(*arguments: Any, **options: Any) -> Any:
        assert is_closing.wait(WAIT_SECONDS)
        return write(*arguments, **options)

    def closing(self: prefix_io.PrefixThread, grace_seconds: float) -> None:
        threading.Timer(0.05, is_closing.set).start()
        close(self, grace_seconds)

    monkeypatch.setattr(publish, "publish", writing)
    monkeypatch.setattr(prefix_io.PrefixThread, "close", closing)
    stage.channel.on_send = publish_all
    stage.loop._prefixes.patience_seconds = lambda: None  # type: ignore[method-assign]
    events = stage.run()
    assert sum(isinstance(event, SegmentPublished) for event in events) == 1
    assert not [event for event in events if isinstance(event, SegmentRejected)]


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_comes_and_goes_each_row_says_what_it_would_alone(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("prefix")
    segments = published(root)
    phases: list[list[AnyCommand]] = []
    prompts: dict[int, list[int]] = {}
    released = set()
    for _ in range(data.draw(st.integers(1, 4))):
        phase: list[AnyCommand] = []
        for _ in range(data.draw(st.integers(1, 4))):
            number = len(prompts) + 1
            shared = data.draw(st.sampled_from([1, 255, 256, 257, 511, 512, 513, 1000, 1024, 1279, 1280, 1299]))
            prompts[number] = PROMPT[:shared] + data.draw(st.sampled_from([[], [99], [50] * 300]))
            reach = [segment for segment in segments if segment.end <= shared and segment.end < len(prompts[number])]
            phase.append(
                start(
                    number,
                    prompts[number],
                    max_tokens=data.draw(st.integers(1, 20)),
                    keep=data.draw(st.booleans()),
                    pin=data.draw(st.booleans()),
                    segments=reach if data.draw(st.booleans()) else (),
                )
            )
            if data.draw(st.integers(0, 3)) == 0:
                victim = data.draw(st.integers(1, number))
                phase.append(release(victim))
                released.add(victim)
        phases.append(phase)
    budget = data.draw(st.sampled_from([0, 700 * 16, 1500 * 16, 1 << 20]))
    stage = Phases(
        load_fake(), *phases, root=root, prefix_memory_bytes=budget, prefill_chunk_tokens=data.draw(st.integers(50, 700))
    )
    events = stage.run()
    for number, prompt in prompts.items():
        tokens = tokens_of(events, number)
        assert tokens == expected_tokens(prompt, max_tokens=20)[: len(tokens)]
        if number not in released:
            assert ends(events, number) == ["length"]
            found = restored(events, number)
            assert found.length < len(prompt)
            assert found.misses == ()
    before: set[int] = set()
    for event in events:  # the first word on each sequence is where it begins
        if isinstance(event, Restored):
            before.add(event.sequence)
        elif isinstance(event, StepDone):
            assert before >= {row.sequence for row in event.rows}
        elif isinstance(event, Kept):
            assert event.sequence in before
