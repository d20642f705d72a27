"""`troupe models`: list, fetch and remove fetched models."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import anyio

from runtime import store
from runtime.catalog import catalog
from runtime.cli.bars import Bars, megabytes
from runtime.config import Settings
from runtime.fetch import fetch


async def main(options: argparse.Namespace) -> int:
    home = Settings().home_directory()
    match options.action:
        case "list":
            list_models(home, as_json=options.json)
        case "fetch":
            for name in options.names:
                print(await fetch_with_bars(name, home))
        case "rm":
            for name in options.names:
                store.remove(home, name)
                print(f"removed {name}", file=sys.stderr)
    return 0


def list_models(home: Path, *, as_json: bool) -> None:
    models = store.list_models(home)
    if as_json:
        rows = [{"name": model.manifest.name, "path": str(model.path), "bytes": model.num_bytes} for model in models]
        print(json.dumps(rows))
        return
    width = max((len(name) for name in catalog()), default=0)
    for model in models:
        print(f"{model.manifest.name:<{width}}  {megabytes(model.num_bytes):>9}  {model.manifest.form:<7}  {model.path}")
    there = {model.manifest.name for model in models}
    missing = [name for name in catalog() if name not in there]
    if missing:
        print(f"not fetched: {', '.join(missing)} ('troupe models fetch NAME')", file=sys.stderr)


async def fetch_with_bars(name: str, home: Path) -> Path:
    """The model's directory, fetched with progress on stderr unless it is there."""
    with Bars() as bars:
        return await fetch(name, home, partial(bars.update, name))


async def ensure_fetched(model: str, home: Path) -> None:
    """Fetch MODEL of a command line when it is a name of the catalogue that is not there; anything else is left to the load.

    A directory of that name wins, as it does in the load.
    """
    if model in catalog() and not await anyio.Path(model).is_dir():
        await fetch_with_bars(model, home)
