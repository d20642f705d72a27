"""Where do fetched models live, and how do they get there and away whole or not at all?

    <home>/models/<name>/     config.json, model.safetensors, tokenizer files and the manifest troupe.json
    <home>/tmp/<name>.<pid>.<random>/   a fetch under way; becomes a model by one rename
    <home>/downloads/         verified source files, so that a second form of a model needs no second download
    <home>/locks/<key>.lock   flock: who works on a name; the kernel releases it when its holder dies

Who holds the lock of a name owns everything under tmp/ that begins with it, hence a leftover is recognised by a lock
that can be had, whatever became of the process that left it. All functions block, for milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from runtime.errors import InvalidRequest

MANIFEST = "troupe.json"
FORMAT_VERSION = 1
DOWNLOAD_LOCK = ".downloads"  # no model can have this name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a fetched model was made of. `created` is ISO 8601 in UTC."""

    format: int
    name: str
    form: str
    source: str
    source_sha256: str
    license: str
    created: str


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """One fetched model. `num_bytes` counts its files."""

    manifest: Manifest
    path: Path
    num_bytes: int


def is_name(name: str) -> bool:
    """Whether `name` may name a fetched model: one plain path component, which cannot leave the directory."""
    return _NAME.fullmatch(name) is not None


def manifest_now(*, name: str, form: str, source: str, source_sha256: str, license: str) -> Manifest:
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Manifest(
        format=FORMAT_VERSION, name=name, form=form, source=source, source_sha256=source_sha256, license=license, created=created
    )


# -- reading ----------------------------------------------------------------------------------------------


def resolve(home: Path, name: str) -> Path | None:
    """The checkpoint directory of a fetched model, or None when there is none of that name (and format)."""
    if not is_name(name):
        return None
    path = home / "models" / name
    return path if _read_manifest(path) is not None else None


def list_models(home: Path) -> list[StoredModel]:
    """All fetched models, by name."""
    try:
        paths = sorted(path for path in (home / "models").iterdir() if is_name(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for path in paths:
        manifest = _read_manifest(path)
        if manifest is not None:
            found.append(StoredModel(manifest=manifest, path=path, num_bytes=_tree_bytes(path)))
    return found


def _read_manifest(path: Path) -> Manifest | None:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if manifest.format == FORMAT_VERSION and manifest.name == path.name else None


def _tree_bytes(path: Path) -> int:
    total = 0
    for directory, _, files in os.walk(path):
        for file in files:
            with contextlib.suppress(OSError):  # another process may be removing this model
                total += os.lstat(os.path.join(directory, file)).st_size
    return total


# -- locks ------------------------------------------------------------------------------------------------


def try_lock(home: Path, key: str) -> int | None:
    """Take the lock of a model name (or DOWNLOAD_LOCK); a descriptor to give to `unlock`, or None when someone holds it."""
    directory = _private_directory(home / "locks")
    descriptor = os.open(directory / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unlock(descriptor: int) -> None:
    os.close(descriptor)  # the lock belongs to the open file and goes with it; the file stays, unlinking would race


@contextlib.contextmanager
def _attempted_lock(home: Path, key: str) -> Iterator[bool]:
    descriptor = try_lock(home, key)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            unlock(descriptor)


# -- writing (under the lock of the name) -----------------------------------------------------------------


@contextlib.contextmanager
def building(home: Path, name: str) -> Iterator[Path]:
    """A private directory for one fetch, gone on every way out. The caller holds the lock of `name`."""
    path = _private_directory(home / "tmp") / f"{name}.{os.getpid()}.{secrets.token_hex(6)}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(home: Path, checkpoint: Path, manifest: Manifest) -> Path:
    """Make a finished checkpoint directory (inside `building`) the model of that name, by one rename.

    Whoever reads the name sees the whole new model or what was there before. The caller holds the lock of the name.
    """
    (checkpoint / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    for directory, _, files in os.walk(checkpoint, topdown=False):
        for file in files:
            _make_durable(os.path.join(directory, file), 0o600)
        _make_durable(directory, 0o700)
    models = _private_directory(home / "models")
    final = models / manifest.name
    if os.path.lexists(final):  # unreadable, or of another format: `resolve` did not see it
        final.rename(checkpoint.parent / "replaced")
    checkpoint.rename(final)
    _make_durable(models, 0o700)
    return final


def sweep(home: Path, held: str) -> list[str]:
    """Remove what dead processes left under tmp/; returns the names removed. The caller holds the lock of `held`."""
    removed = []
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted((home / "tmp").iterdir()):
            name = entry.name.rsplit(".", 2)[0]
            if not is_name(name):
                continue
            with contextlib.nullcontext(True) if name == held else _attempted_lock(home, name) as is_ours:
                if is_ours:
                    shutil.rmtree(entry, ignore_errors=True)
                    removed.append(entry.name)
    return removed


def remove(home: Path, name: str) -> None:
    """Remove a fetched model, and its source file when no other model was made of it.

    :raises InvalidRequest: no such model (the message lists those that exist), or another process is fetching it.
    """
    path = resolve(home, name)
    if path is None:
        existing = ", ".join(model.manifest.name for model in list_models(home)) or "none"
        raise InvalidRequest("name", f"no fetched model {name!r}; fetched: {existing}")
    with _attempted_lock(home, name) as is_ours:
        if not is_ours:
            raise InvalidRequest("name", f"{name!r} is being fetched or removed by another process; try again when it is done")
        with building(home, name) as scrap:
            with contextlib.suppress(FileNotFoundError):
                path.rename(scrap / "removed")
    _remove_unused_downloads(home)


def _remove_unused_downloads(home: Path) -> None:
    with _attempted_lock(home, DOWNLOAD_LOCK) as is_ours, contextlib.suppress(FileNotFoundError):
        if not is_ours:
            return  # a fetch is reading them
        used = {model.manifest.source_sha256 for model in list_models(home)}
        for file in (home / "downloads").iterdir():
            if file.stem not in used:
                file.unlink(missing_ok=True)


def download_path(home: Path, sha256: str) -> Path:
    """Where a verified source file is kept. Its directory is made."""
    return _private_directory(home / "downloads") / f"{sha256}.gguf"


def _private_directory(path: Path) -> Path:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _make_durable(path: str | Path, mode: int) -> None:
    os.chmod(path, mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
