"""Who renders and tokenizes prompts beside the running steps? One text thread, replaced when a prompt holds it too long.

Chat templates are programs that come with checkpoints: they may raise, and they may run for ever. After a deadline the
request is refused and a fresh thread takes over; the stuck one is told to end, and only so many may refuse to.

`Prepared`, and `Released` for requests, leave through one sender under one lock, so that no event can name a
request after its release.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from runtime.engine.engine import Tokenizer
from runtime.protocol.channel import ChannelClosed, EventSender
from runtime.protocol.commands import PREPARE_SECONDS, Prompt
from runtime.protocol.events import AnyEvent, Prepared, RefusalCode, Refused, Released
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import RequestId
from runtime.protocol.tokens import TokenIds
from runtime.worker.foreign import Abandoned, interrupt
from runtime.worker.prompts import PromptError, prompt_ids

MAX_STUCK_THREADS: Final = 3
MAX_PREPARING: Final = 8192


@dataclass(slots=True, eq=False)
class _Job:
    request: RequestId
    prompt: Prompt


class _TextThread:
    def __init__(self, desk: TextDesk) -> None:
        self.job: _Job | None = None
        self.started_at = 0.0
        self.is_abandoned = False
        self.thread = threading.Thread(target=desk._work, args=(self,), name="text", daemon=True)


class TextDesk:
    """`sender` belongs to the desk, which closes it. `clock` in seconds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sender: EventSender,
        *,
        deadline_seconds: float = PREPARE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._sender = sender
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[RequestId, _Job] = {}
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._stuck: list[_TextThread] = []
        self._current: _TextThread | None = None
        with self._lock:
            self._start_thread()

    # -- the step thread ----------------------------------------------------------------------------------

    def submit(self, request: RequestId, prompt: Prompt) -> None:
        """Answered by `Prepared` or `Refused`. A request already at work is ignored."""
        with self._lock:
            if request in self._jobs:
                return
            if self._current is None:
                self._refuse(request, "template_error", "this model's chat template hung too often; load the model again")
            elif len(self._jobs) >= MAX_PREPARING:
                self._refuse(request, "not_ready", f"{MAX_PREPARING} prompts are already waiting to be prepared")
            else:
                job = self._jobs[request] = _Job(request, prompt)
                self._queue.put(job)

    def release(self, requests: Sequence[RequestId], step: int) -> None:
        """Forget these and answer `Released`."""
        with self._lock:
            for request in requests:
                self._jobs.pop(request, None)
            self._sender.send(Released(tuple(requests), (), step))

    def preparing(self) -> tuple[RequestId, ...]:
        with self._lock:
            return tuple(self._jobs)

    def close(self) -> None:
        """Nothing is answered from now on."""
        self._queue.put(None)
        with self._lock:
            self._jobs.clear()
            self._sender.close()

    # -- the heartbeat thread -----------------------------------------------------------------------------

    def watch(self) -> None:
        """Call now and then: refuse a prompt that is past its deadline, and replace the thread that is stuck in it."""
        with self._lock:
            self._stuck = [stuck for stuck in self._stuck if stuck.thread.is_alive()]
            current = self._current
            if current is not None and current.job is not None and self._clock() - current.started_at > self._deadline_seconds:
                current.is_abandoned = True
                self._stuck.append(current)
                self._current = None
                if self._jobs.get(current.job.request) is current.job:
                    del self._jobs[current.job.request]
                    what = f"rendering and tokenizing took longer than {self._deadline_seconds:g} s"
                    self._refuse(current.job.request, "template_error", what)
                interrupt(current.thread)
            if self._current is None and len(self._stuck) < MAX_STUCK_THREADS:
                self._start_thread()
            elif self._current is None:
                for request in list(self._jobs):
                    del self._jobs[request]
                    self._refuse(request, "template_error", "this model's chat template hung too often; load the model again")

    # -- the text thread ----------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._current = _TextThread(self)
        self._current.thread.start()

    def _work(self, me: _TextThread) -> None:
        try:
            while True:
                job = self._queue.get()
                if job is None:
                    return
                with self._lock:
                    if self._jobs.get(job.request) is not job:  # released while it waited
                        continue
                    me.job, me.started_at = job, self._clock()
                event = self._prepare(job)
                with self._lock:
                    if me.is_abandoned:
                        return
                    me.job = None
                    if self._jobs.get(job.request) is job:
                        del self._jobs[job.request]
                        self._say(job.request, event)
        except (Abandoned, ChannelClosed):
            return

    def _prepare(self, job: _Job) -> AnyEvent:
        try:
            ids, warnings = prompt_ids(self._tokenizer, job.prompt)
            return Prepared(job.request, TokenIds(ids), warnings)
        except PromptError as error:
            return _refusal(job.request, error.code, str(error))
        except Abandoned:
            raise
        except BaseException as error:  # a checkpoint's tokenizer is foreign code, and a panic in Rust is no Exception
            return _refusal(job.request, "invalid_request", f"the prompt cannot be tokenized: {error!r}")

    def _say(self, request: RequestId, event: AnyEvent) -> None:
        try:
            self._sender.send(event)
        except FrameError as error:
            self._refuse(request, "invalid_request", f"the prompt is too long to be sent: {error}")

    def _refuse(self, request: RequestId, code: RefusalCode, message: str) -> None:
        self._sender.send(_refusal(request, code, message))


def _refusal(request: RequestId, code: RefusalCode, message: str) -> Refused:
    return Refused("prepare", code, message, requests=(request,))
