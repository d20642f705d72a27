"""Every error an app can meet, in one tree.

    TroupeError                 the one class an app needs to catch
    ├── RequestError            this request's own fault; nobody else is affected
    │   ├── InvalidRequest      an option, id or prompt outside its range (names it and the range)
    │   ├── ContextTooLong      prompt does not fit the model's context
    │   ├── DeadlineExceeded    the request's own deadline_seconds passed
    │   └── GenerationFailed    this sequence could not go on (for instance non-finite logits)
    ├── AdmissionError          not now; carries retry_after_seconds
    │   ├── Overloaded          the model's queue is full
    │   ├── TenantLimitReached  this tenant's queue is full
    │   └── MemoryShort         the model does not fit beside the others (says what would help)
    ├── ModelError
    │   ├── ModelNotLoaded      no model of that name is loaded
    │   ├── ModelLoadFailed     the checkpoint or the load is at fault (says what is wrong)
    │   └── ModelUnavailable    its worker died too often; the restart budget is spent
    ├── WorkerError             carries an ExitReport
    │   ├── WorkerCrashed       the worker's process ended
    │   ├── WorkerUnresponsive  the worker missed a deadline and was ended
    │   └── ProtocolMismatch    the worker speaks another protocol version
    ├── FetchFailed             a model could not be fetched or converted
    ├── EraseFailed             a tenant's key could not be removed (names its file)
    ├── RunDirectoryError       no directory can hold the workers' sockets (names what was tried)
    └── RuntimeClosed           the Runtime is closing or closed

Each error carries `code`, a stable snake_case word for programs, and a message for people that names
the value at fault and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

MAX_SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """A value in an error message: as Python writes it, cut short.

    Of what cannot be written (an integer of thousands of digits, an endless nesting, a class whose repr raises) only the type.
    """
    try:
        words = repr(value)
    except Exception:  # foreign code, and about to be refused anyway
        return f"a value of type {type(value).__name__}"
    return words if len(words) <= MAX_SHOWN_CHARACTERS else f"{words[: MAX_SHOWN_CHARACTERS - 3]}..."


@dataclass(frozen=True, slots=True)
class ExitReport:
    """What is known about the end of one worker process.

    `exit_code` is None when a signal ended it, `signal_name` None when none did. `phase` is what the worker
    was doing when last heard ("spawned", "connected", "loading", "idle", "prefill", "decode", ...).
    """

    model: str
    pid: int
    incarnation: int
    exit_code: int | None
    signal_name: str | None
    phase: str
    uptime_seconds: float
    stderr_tail: str

    def describe(self) -> str:
        if self.signal_name is not None:
            end = f"was ended by {self.signal_name}"
        else:
            end = f"exited with code {self.exit_code}"
        text = (
            f"worker of model {self.model!r} (pid {self.pid}, incarnation {self.incarnation}) {end} "
            f"after {self.uptime_seconds:.1f} s while in phase {self.phase!r}"
        )
        tail = self.stderr_tail.strip()
        return f"{text}; its last words:\n{tail}" if tail else text


class TroupeError(Exception):
    """Base of every error this package raises on purpose.

    `partial_text`: what the request had generated before, outside any result; empty for errors of anything else.
    """

    code: ClassVar[str] = "troupe_error"
    partial_text: str = ""

    def fresh(self) -> Self:
        """An equal error without a traceback: one failure told to several callers must not be one shared object."""
        copied = type(self).__new__(type(self))
        copied.args = self.args
        copied.__dict__.update(self.__dict__)
        copied.__cause__ = self.__cause__
        return copied


class RequestError(TroupeError):
    """This request's own fault."""

    code = "request_error"


class InvalidRequest(RequestError):
    """`option` is the name of the value at fault."""

    code = "invalid_request"

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class ContextTooLong(RequestError):
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens but the model's context holds {context_length} "
            "with at least one left to generate; shorten the prompt"
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"


class GenerationFailed(RequestError):
    code = "generation_failed"


class AdmissionError(TroupeError):
    """Not now. Trying again after `retry_after_seconds` is reasonable."""

    code = "admission_error"

    def __init__(self, message: str, *, retry_after_seconds: float, depth: int, limit: int) -> None:
        super().__init__(f"{message} ({depth} waiting, limit {limit}); retry in {retry_after_seconds:.1f} s")
        self.retry_after_seconds = retry_after_seconds
        self.depth = depth
        self.limit = limit


class Overloaded(AdmissionError):
    code = "overloaded"


class TenantLimitReached(AdmissionError):
    code = "tenant_limit_reached"


class MemoryShort(AdmissionError):
    """A model does not fit into the memory budget now. Trying again after `retry_after_seconds` is reasonable where the remedy says
    that somebody may go."""

    code = "memory_short"

    def __init__(
        self, model: str, *, needed_bytes: int, free_bytes: int, budget_bytes: int, remedy: str, retry_after_seconds: float
    ) -> None:
        TroupeError.__init__(
            self,
            f"model {model!r} needs {needed_bytes >> 20} MiB to load, {max(0, free_bytes) >> 20} of {budget_bytes >> 20} MiB "
            f"(memory_budget_bytes) are free; {remedy}",
        )
        self.depth = self.limit = 0
        self.model = model
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.budget_bytes = budget_bytes
        self.retry_after_seconds = retry_after_seconds


class ModelError(TroupeError):
    code = "model_error"

    def __init__(self, model: str, message: str) -> None:
        super().__init__(f"model {model!r}: {message}")
        self.model = model


class ModelNotLoaded(ModelError):
    code = "model_not_loaded"


class ModelLoadFailed(ModelError):
    """`reason` is a stable word: see `LoadFailure` in `runtime.protocol.events`."""

    code = "model_load_failed"

    def __init__(self, model: str, message: str, *, reason: str = "error") -> None:
        super().__init__(model, message)
        self.reason = reason


class ModelUnavailable(ModelError):
    code = "model_unavailable"


class WorkerError(TroupeError):
    code = "worker_error"

    def __init__(self, report: ExitReport, message: str | None = None) -> None:
        super().__init__(message or report.describe())
        self.report = report


class WorkerCrashed(WorkerError):
    code = "worker_crashed"


class WorkerUnresponsive(WorkerError):
    code = "worker_unresponsive"


class ProtocolMismatch(WorkerError):
    code = "protocol_mismatch"


class FetchFailed(TroupeError):
    """`reason` is a stable word: see `FetchReason` in `runtime.fetch`."""

    code = "fetch_failed"

    def __init__(self, name: str, message: str, *, reason: str = "error") -> None:
        super().__init__(f"fetching {name!r}: {message}")
        self.name = name
        self.reason = reason


class EraseFailed(TroupeError):
    """Nothing has been erased. `path`: of the tenant's key."""

    code = "erase_failed"

    def __init__(self, tenant: str, path: str, message: str) -> None:
        super().__init__(
            f"erasing tenant {tenant!r}: its key {path!r} cannot be removed: {message}; remove that file and erase again"
        )
        self.tenant = tenant
        self.path = path


class RunDirectoryError(TroupeError):
    """`tried` holds (directory, why not) pairs."""

    code = "run_directory"

    def __init__(self, tried: tuple[tuple[str, str], ...]) -> None:
        listing = "; ".join(f"{directory}: {why}" for directory, why in tried)
        super().__init__(f"no directory can hold the workers' sockets ({listing}); set TMPDIR to a short, writable one")
        self.tried = tried


class RuntimeClosed(TroupeError):
    code = "runtime_closed"

    def __init__(self) -> None:
        super().__init__("the Runtime is not open, and each opens once; use a new one inside 'async with runtime.Runtime() as rt:'")
