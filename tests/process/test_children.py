"""A helper program's end is told exactly, and no part of it outlives the call or us."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import anyio
import pytest

from runtime.children import run_guarded

pytestmark = pytest.mark.anyio


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def until_gone(pid: int) -> None:
    with anyio.fail_after(20.0), contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            await anyio.sleep(0.02)


async def test_the_exit_code_and_the_last_words_are_the_program_s_own() -> None:
    code, tail = await run_guarded(python("import sys; print('out'); sys.exit('the end')"), deadline_seconds=30.0)
    assert code == 1
    assert sorted(tail.splitlines()) == ["out", "the end"]
    code, _ = await run_guarded(python("raise SystemExit(7)"), deadline_seconds=30.0)
    assert code == 7


async def test_odd_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    odd = ["", "two words", "$HOME `id` ; 'quote\"", "-n", "東京"]
    lines: list[str] = []
    await run_guarded(
        [*python("import sys, os; print(sys.argv[1:]); print(os.getcwd(), os.environ['ODD'])"), *odd],
        deadline_seconds=30.0,
        on_line=lines.append,
        environment={"ODD": "é"},
        directory=tmp_path,
    )
    assert lines == [repr(odd), f"{tmp_path} é"]


async def test_a_flood_of_words_is_read_and_only_its_end_kept() -> None:
    flood = "import sys\nfor n in range(100000): sys.stderr.write(f'line {n}\\n')\nsys.stderr.write('x' * 1000000)"
    code, tail = await run_guarded(python(flood), deadline_seconds=60.0)
    assert code == 0
    assert tail.endswith("xxx")
    assert len(tail) < 100_000


async def test_a_deadline_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(60)"
    )
    with pytest.raises(TimeoutError):
        await run_guarded([*python(code), str(note)], deadline_seconds=2.0)
    await until_gone(int(note.read_text()))


async def test_a_program_that_cannot_be_started_has_a_code_and_a_word() -> None:
    code, tail = await run_guarded(["/no/such/program"], deadline_seconds=30.0)
    assert code == 127
    assert "/no/such/program" in tail
