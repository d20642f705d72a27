"""Where on this disk is the checkpoint that a load names? A directory, or a hub id through the hub library's own cache."""

from __future__ import annotations

import io
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from runtime.engine.checkpoint_config import describe
from runtime.engine.engine import LoadError, Progress
from runtime.protocol.commands import Load

WANTED_FILES = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
"""What mlx-lm itself fetches, so that both find each other's snapshots complete."""

_REPORT_SECONDS = 0.2


def resolve(load: Load, progress: Progress) -> Path:
    """The checkpoint's directory, downloaded if need be (progress stage "download", in bytes).

    :raises LoadError: "not_found".
    """
    if load.is_hub_id:
        return _download(load.path, load.revision, progress)
    directory = Path(load.path)
    try:
        is_directory, exists = directory.is_dir(), directory.exists()
    except (OSError, ValueError) as error:  # a name too long, a NUL, no permission
        raise LoadError("not_found", f"cannot open {load.path!r}: {describe(error)}") from error
    if not is_directory:
        what = "is a file" if exists else "does not exist"
        raise LoadError(
            "not_found", f"{load.path!r} {what}; give a checkpoint's directory, a hub id (\"owner/name\") or a fetched model's name"
        )
    return directory.absolute()


def _download(repository: str, revision: str | None, progress: Progress) -> Path:
    meter = _Meter()
    outcome: Future[str] = Future()
    # The library counts on its own threads, but progress may be reported on the caller's alone; so the download runs beside it.
    thread = threading.Thread(target=_run, args=(repository, revision, meter, outcome), name="hub-download", daemon=True)
    thread.start()
    progress("download", 0, 0)
    while not wait([outcome], timeout=_REPORT_SECONDS).done:
        progress("download", meter.done, meter.total)
    error = outcome.exception()
    if error is not None:
        raise _not_found(repository, revision, error) from error
    progress("download", meter.total, meter.total)
    return Path(outcome.result())


def _run(repository: str, revision: str | None, meter: _Meter, outcome: Future[str]) -> None:
    try:
        import huggingface_hub

        outcome.set_result(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=list(WANTED_FILES), tqdm_class=meter.bar_class()
            )
        )
    except BaseException as error:
        outcome.set_exception(error)


class _Meter:
    """Bytes done and to do over all files of a download."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0

    def bar_class(self) -> type:
        """A progress bar for the hub library that draws nothing and counts here."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        meter = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                options.pop("name", None)
                options.update(file=io.StringIO(), disable=False)
                self._counts_bytes = options.get("unit") == "B"
                super().__init__(*args, **options)

            def update(self, n: float | None = 1) -> Any:
                shown = super().update(n)
                # Two bars count bytes, those received and those written to disk; the second is ahead when files were there before.
                if self._counts_bytes and self.n >= meter.done:
                    meter.done, meter.total = int(self.n), max(int(self.total or 0), int(self.n))
                return shown

            def display(self, *args: Any, **options: Any) -> None:
                pass

        return Bar


def _not_found(repository: str, revision: str | None, error: BaseException) -> LoadError:
    from huggingface_hub import errors

    where = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    match error:
        case errors.GatedRepoError():
            advice = "access is restricted: accept its terms on the hub, then log in with 'hf auth login'"
        case errors.RepositoryNotFoundError():
            advice = "the hub does not know it (or it is private): check the name, or log in with 'hf auth login'"
        case errors.RevisionNotFoundError():
            advice = "the hub knows the model but not this revision: check its name"
        case errors.HFValidationError():
            advice = 'this is no hub id; expected "owner/name"'
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() | ConnectionError():
            advice = (
                "it is not in the local cache and the hub cannot be reached: go online (HF_HUB_OFFLINE unset), or give a directory"
            )
        case OSError() if not isinstance(error, errors.HfHubHTTPError):
            advice = "it could not be written to the local cache: check the disk's space and permissions"
        case _:
            advice = "the hub could not deliver it: try again, or give a directory"
    return LoadError("not_found", f"cannot get {where} from the hub; {advice} ({describe(error)})")
