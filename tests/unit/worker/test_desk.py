"""The text desk answers each prompt once, forgets what is released, and gets over templates that never end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Queue

import pytest

from runtime.engine.fake_text import FakeTokenizer
from runtime.protocol.commands import TextPrompt
from runtime.protocol.events import AnyEvent, Prepared, Refused, Released
from runtime.protocol.ids import RequestId
from runtime.protocol.tokens import TokenIds
from runtime.testing import text_tokens
from runtime.worker.desk import MAX_STUCK_THREADS, TextDesk


class Events:
    """A sender whose events a test takes with a deadline."""

    def __init__(self) -> None:
        self.queue: Queue[AnyEvent] = Queue()

    def send(self, event: AnyEvent) -> None:
        self.queue.put(event)

    def close(self) -> None: ...

    def take(self) -> AnyEvent:
        return self.queue.get(timeout=10)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Panic(BaseException):
    """What a panic in a library written in Rust becomes."""


class Gate:
    """Holds the text thread inside `encode`: "hang" in Python for ever, "block" in C until `opened`."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()
        self.mode = "pass"

    def __call__(self) -> None:
        mode = self.mode
        if mode == "raise":
            raise ValueError("scripted")
        if mode == "panic":
            raise Panic("scripted")
        if mode == "hang":
            self.reached.release()
            while True:
                pass
        if mode == "block":
            self.reached.release()
            self.opened.wait()


Desk = tuple[TextDesk, Events, Clock, Gate]


@pytest.fixture
def desk() -> Iterator[Desk]:
    events, clock, gate = Events(), Clock(), Gate()
    made = TextDesk(FakeTokenizer(on_encode=gate), events, deadline_seconds=5.0, clock=clock)
    yield made, events, clock, gate
    gate.opened.set()
    made.close()


def submit(desk: TextDesk, *numbers: int) -> None:
    for number in numbers:
        desk.submit(RequestId(number), TextPrompt(f"prompt {number}"))


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")


def test_prompts_are_answered_in_order(desk: Desk) -> None:
    made, events, _, _ = desk
    submit(made, 1, 2, 3)
    answers = [events.take() for _ in range(3)]
    assert [answer.request for answer in answers if isinstance(answer, Prepared)] == [1, 2, 3]
    assert made.preparing() == ()


def test_a_request_already_at_work_is_answered_once(desk: Desk) -> None:
    made, events, _, gate = desk
    gate.mode = "block"
    submit(made, 1, 1, 1)
    gate.opened.set()
    assert isinstance(events.take(), Prepared)
    submit(made, 2)
    assert events.take() == Prepared(RequestId(2), TokenIds(text_tokens("prompt 2")))


@pytest.mark.parametrize("mode", ["raise", "panic"])
def test_an_error_of_the_tokenizer_is_that_requests_alone(desk: Desk, mode: str) -> None:
    made, events, _, gate = desk
    gate.mode = mode
    submit(made, 1)
    refused = events.take()
    assert isinstance(refused, Refused)
    assert (refused.code, refused.requests) == ("invalid_request", (1,))
    gate.mode = "pass"
    submit(made, 2)
    assert isinstance(events.take(), Prepared)


def test_nothing_names_a_request_after_its_release(desk: Desk) -> None:
    made, events, _, gate = desk
    gate.mode = "block"
    submit(made, 1, 2, 3)
    assert gate.reached.acquire(timeout=10)
    made.release((RequestId(1), RequestId(2), RequestId(99)), 7)
    assert events.take() == Released((RequestId(1), RequestId(2), RequestId(99)), (), 7)
    gate.opened.set()
    answer = events.take()
    assert isinstance(answer, Prepared)
    assert answer.request == 3


def test_a_template_that_never_ends_is_refused_after_the_deadline_and_the_next_prompt_works(desk: Desk) -> None:
    made, events, clock, gate = desk
    gate.mode = "hang"
    submit(made, 1, 2)
    assert gate.reached.acquire(timeout=10)
    gate.mode = "pass"
    made.watch()
    assert events.queue.empty()
    clock.now = 5.1
    made.watch()
    refused = events.take()
    assert isinstance(refused, Refused)
    assert (refused.code, refused.requests) == ("template_error", (1,))
    answer = events.take()
    assert isinstance(answer, Prepared)
    assert answer.request == 2


def test_a_thread_stuck_in_python_code_is_ended(desk: Desk) -> None:
    made, events, clock, gate = desk
    gate.mode = "hang"
    submit(made, 1)
    assert gate.reached.acquire(timeout=10)
    stuck = made._current
    assert stuck is not None
    clock.now = 5.1
    made.watch()
    assert isinstance(events.take(), Refused)
    stuck.thread.join(10)
    assert not stuck.thread.is_alive()


def test_only_so_many_threads_may_be_stuck_and_the_desk_recovers_when_they_end(desk: Desk) -> None:
    made, events, clock, gate = desk
    gate.mode = "block"
    for number in range(MAX_STUCK_THREADS):
        submit(made, number)
        assert gate.reached.acquire(timeout=10)
        clock.now += 5.1
        made.watch()
        assert isinstance(events.take(), Refused)
    submit(made, 50)
    refused = events.take()
    assert isinstance(refused, Refused)
    assert "hung too often" in refused.message
    gate.mode = "pass"
    gate.opened.set()
    wait_until(lambda: made.watch() is None and made._current is not None)
    submit(made, 51)
    assert isinstance(events.take(), Prepared)
