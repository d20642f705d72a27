"""The README's programs run as they stand and print what it says, and its tables say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.options import RANGES

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")

PROGRAMS = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.DOTALL)
"""(program, what it prints)"""


def output_of(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_there_are_two_programs() -> None:
    assert len(PROGRAMS) == 2
    assert README.count("```python") == 2


def test_the_testing_program_prints_what_the_readme_says() -> None:
    (program, printed) = PROGRAMS[1]
    assert "fake_model" in program
    assert output_of(program) == printed


@pytest.mark.real_model
def test_the_first_program_says_paris() -> None:
    """Its greedy answer is compared; its other line is drawn with a temperature on whatever BLAS is there."""
    (program, printed) = PROGRAMS[0]
    output = output_of(program).splitlines()
    assert output[1:] == printed.splitlines()[1:]
    assert "Paris" in output[1]


@pytest.mark.parametrize("option", RANGES)
def test_every_numeric_option_stands_in_the_table_with_its_range(option: str) -> None:
    allowed = RANGES[option]
    default = int(allowed.default) if allowed.whole and allowed.default is not None else allowed.default
    row = next(line for line in README.splitlines() if line.startswith(f"| `{option}` "))
    assert row.startswith(f"| `{option}` | `{default}` | {allowed.describe()}")
