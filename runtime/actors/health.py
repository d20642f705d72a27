"""Is this worker still well, and may it be started again? Deadlines and the restart budget; pure, the caller brings the clock.

A worker is judged by what it says, never by how long its work takes: a heartbeat carries the expected seconds of the running step,
and that promise is added to every deadline. Three things count as silence:

    no message at all           its process hangs, or is stopped
    a step that never ends      the beats go on, but the same step of a busy phase stands still
    a command never answered    `Prepare`, `Release` and `Inspect` are always answered (and `Shutdown`, which the ladder watches);
                                a prompt may take its worker as long as it is allowed to, however short the silence

The caller must take in whatever has already arrived before it asks for a verdict: while its loop was blocked, silence was its own.
"""

from __future__ import annotations

from collections import deque

from runtime.protocol.commands import PREPARE_SECONDS, AnyCommand, Inspect, Prepare, Release
from runtime.protocol.events import AnyEvent, Heartbeat, Inspected, Prepared, Refused, Released, StepDone

ANSWER_SECONDS = 5.0
"""Within these a worker notices that a prompt is past its deadline, and says so."""
RESTART_FIRST_SECONDS = 0.5
RESTART_MOST_SECONDS = 30.0
RESTART_WINDOW_SECONDS = 600.0

_BUSY = ("prefill", "decode", "verify", "draft")


class Vigil:
    """Watches over one worker from its `Ready` on. Times are seconds of one monotonic clock."""

    def __init__(self, silence_seconds: float, now: float, *, prepare_seconds: float = PREPARE_SECONDS + ANSWER_SECONDS) -> None:
        """prepare_seconds: what a single prompt may take."""
        self._silence = silence_seconds
        self._heard = now
        self._prepare_allowance = max(0.0, prepare_seconds - silence_seconds)
        self._promise = 0.0
        self._step = (-1, "idle")
        self._progress = now
        self._owed: dict[tuple[str, int], float] = {}

    @property
    def phase(self) -> str:
        return self._step[1]

    def asked(self, command: AnyCommand, now: float) -> None:
        """A command went out. A repeated one does not extend the deadline of the first."""
        match command:
            case Prepare(request=request):
                self._owe("prepare", request, now + self._prepare_allowance)
            case Release(requests=requests, sequences=sequences):
                for request in requests:
                    self._owe("release request", request, now)
                for sequence in sequences:
                    self._owe("release", sequence, now)
            case Inspect(number=number):
                self._owe("inspect", number, now)
            case _:
                pass

    def _owe(self, what: str, number: int, now: float) -> None:
        self._owed.setdefault((what, number), now)

    def heard(self, event: AnyEvent, now: float) -> None:
        self._heard = now
        if isinstance(event, StepDone):  # first, being by far the most frequent
            self._progress = now
            return
        match event:
            case Heartbeat(step=step, phase=phase, promised_seconds=promised):
                self._promise = max(0.0, promised)
                if (step, phase) != self._step:
                    self._step = (step, phase)
                    self._progress = now
            case Prepared(request=request):
                self._answered("prepare", (request,), now)
            case Released(requests=requests, sequences=sequences):
                self._answered("release request", requests, now)
                self._answered("prepare", requests, now)
                self._answered("release", sequences, now)
                self._progress = now
            case Refused(requests=requests):
                self._answered("prepare", requests, now)
            case Inspected(number=number):
                self._answered("inspect", (number,), now)
                self._progress = now
            case _:
                self._progress = now

    def excuse(self, now: float) -> None:
        """The machine slept, and everybody with it: all waits begin anew."""
        self._heard = self._progress = now
        self._owed = {key: now + (self._prepare_allowance if key[0] == "prepare" else 0.0) for key in self._owed}

    def _answered(self, what: str, numbers: tuple[int, ...], now: float) -> None:
        found = [number for number in numbers if self._owed.pop((what, number), None) is not None]
        if found:
            # They are answered one after another: an answer is progress for those waiting behind it.
            for key in self._owed:
                if key[0] == what:
                    self._owed[key] = now + (self._prepare_allowance if what == "prepare" else 0.0)

    def deadline(self) -> float:
        """When `verdict` could first complain, if nothing more is heard or asked."""
        return self._earliest()[0] + self._silence + self._promise

    def verdict(self, now: float) -> str | None:
        """What is wrong, in words for the error; None while all is well."""
        since, what = self._earliest()
        allowed = self._silence + self._promise
        if now < since + allowed:
            return None
        return f"{what} for {now - since:.1f} s (allowed: {allowed:.1f} s, of which {self._promise:.1f} s were promised)"

    def _earliest(self) -> tuple[float, str]:
        waits = [(self._heard, "sent no message")]
        step, phase = self._step
        if phase in _BUSY:
            waits.append((self._progress, f"made no progress in {phase} step {step}"))
        waits.extend((since, f"gave no answer to {what!r} of {number}") for (what, number), since in self._owed.items())
        return min(waits)


class RestartBudget:
    """Back-off between restarts, and when to give up."""

    def __init__(self, max_restarts: int) -> None:
        """max_restarts: in any `RESTART_WINDOW_SECONDS`."""
        self._deaths: deque[float] = deque(maxlen=max_restarts + 1)
        self._next = 0.0

    def died(self, now: float) -> float | None:
        """Take note of a death. Seconds to wait before the next start, or None when the budget is spent.

        The first is followed at once, since streams wait for it; then the wait doubles with each. It begins anew once a whole
        window passed without one.
        """
        if self._deaths and now - self._deaths[-1] >= RESTART_WINDOW_SECONDS:
            self._next = 0.0
        self._deaths.append(now)
        if len(self._deaths) == self._deaths.maxlen and now - self._deaths[0] < RESTART_WINDOW_SECONDS:
            return None
        wait = self._next
        self._next = min(max(2 * wait, RESTART_FIRST_SECONDS), RESTART_MOST_SECONDS)
        return wait
