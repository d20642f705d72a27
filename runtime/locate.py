"""Which checkpoint does a spec's path mean: a directory, a fetched model, or one on the hub?"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ModelLoadFailed

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Location:
    """`path`: an absolute directory, or a hub id ("owner/name")."""

    path: str
    is_hub_id: bool


def locate(model: str, path: str, home: Path, resolve: Callable[[Path, str], Path | None]) -> Location:
    """A directory wins over a fetched model's name, that over a hub id. Looks at the file system only.

    resolve: (home, name) → the directory of a fetched model, or None.
    :raises ModelLoadFailed: reason "not_found", saying what was tried.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return Location(str(directory.absolute()), is_hub_id=False)
    if directory.exists():
        raise ModelLoadFailed(model, f"{path!r} is a file; give the checkpoint's directory", reason="not_found")
    fetched = resolve(home, path)
    if fetched is not None:
        return Location(str(fetched.absolute()), is_hub_id=False)
    if _HUB_ID.fullmatch(path):
        return Location(path, is_hub_id=True)
    raise ModelLoadFailed(
        model,
        f"no checkpoint {path!r}: there is no directory {str(directory.absolute())!r} and no fetched model of that name in "
        f"{str(home / 'models')!r}, and it is no hub id (owner/name). 'troupe models list' shows what there is, "
        f"'troupe models fetch NAME' gets one",
        reason="not_found",
    )
