"""Why did an incarnation end, and which error do its callers get for that?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.errors import (
    ExitReport,
    ModelLoadFailed,
    ModelUnavailable,
    ProtocolMismatch,
    TroupeError,
    WorkerCrashed,
    WorkerError,
    WorkerUnresponsive,
)

Cause = Literal["asked", "killed", "unborn", "exit", "silence", "breach", "version", "refused", "late"]
"""Why an incarnation ended.

asked, killed: by us, orderly or at once. unborn: it could not be started. exit: its process ended by itself. silence: it missed a
deadline. breach: it said what the protocol does not allow, or takes no commands any more. version: it speaks another protocol.
refused: it said why it cannot load. late: Hello or Ready did not come in time.
"""


@dataclass(frozen=True, slots=True)
class Ending:
    """`detail`: in words, empty when the report says all. `reason`: the load failure's code when `cause` is "refused"."""

    cause: Cause
    detail: str
    report: ExitReport
    reason: str = "error"

    @property
    def may_be_repeated(self) -> bool:
        """Whether another start might go better: not when the checkpoint or the installation is at fault."""
        return self.cause not in ("refused", "version")


def worker_error(model: str, ending: Ending) -> WorkerError:
    """What the callers of a worker get that was ready, or was being restarted."""
    if ending.cause == "version":
        return ProtocolMismatch(ending.report, f"worker of model {model!r}: {ending.detail}; reinstall mlx-troupe")
    if ending.cause == "unborn":
        return WorkerCrashed(ending.report, f"worker of model {model!r}: {ending.detail}")
    if ending.cause in ("silence", "late", "breach"):
        return WorkerUnresponsive(
            ending.report, f"worker of model {model!r} was ended because {ending.detail}. {ending.report.describe()}"
        )
    return WorkerCrashed(ending.report, f"{ending.report.describe()}\n{ending.detail}" if ending.detail else None)


def load_error(model: str, ending: Ending) -> TroupeError:
    """What the callers of a first load get. Its cause carries the report."""
    error = worker_error(model, ending)
    match ending.cause:
        case "version":
            return error
        case "refused":
            failed = ModelLoadFailed(model, ending.detail, reason=ending.reason)
        case "late" | "silence":
            failed = ModelLoadFailed(model, str(error), reason="timeout")
        case _:
            failed = ModelLoadFailed(model, f"the worker ended before the model was ready: {error}", reason="crashed")
    failed.__cause__ = error
    return failed


def last_error(model: str, ending: Ending) -> TroupeError:
    """What the callers of a model get that is not started again."""
    if not ending.may_be_repeated:
        return load_error(model, ending)
    error = worker_error(model, ending)
    unavailable = ModelUnavailable(model, f"its worker died too often and is not restarted; load it again. The last time: {error}")
    unavailable.__cause__ = error
    return unavailable
