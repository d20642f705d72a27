"""The command line as a person or a script meets it: what is on stdout, what the exit code is, what is left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from runtime import store
from runtime.cli.bars import Bars, Lines
from runtime.cli.demo import Talk, demo_models, stream_view
from runtime.config import Settings
from tests.support.tiny import TinyShelf

SECONDS = 60.0


def troupe(
    *arguments: str, home: Path | None = None, code: int = 0, input: str | None = None, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MLX_DISABLE_COMPILE": "1", "PYTHONIOENCODING": encoding}
    if home is not None:
        environment["TROUPE_HOME"] = str(home)
    result = subprocess.run(
        [sys.executable, "-m", "runtime.cli", *arguments],
        capture_output=True,
        encoding=encoding,
        env=environment,
        timeout=SECONDS,
        input=input,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyShelf(tmp_path_factory.mktemp("tiny"))("llama")


# -- wrong usage ------------------------------------------------------------------------------------------


def test_the_version_is_the_package_s() -> None:
    assert troupe("--version").stdout == "troupe 0.1.0\n"


@pytest.mark.parametrize("arguments", [(), ("models",), ("fly",), ("run",), ("run", "m", "p", "--top-k", "many")])
def test_wrong_usage_is_told_with_code_2(arguments: tuple[str, ...]) -> None:
    result = troupe(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("usage: troupe")


def test_an_option_out_of_range_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    result = troupe("run", "smollm2-135m", "Hi", "--temperature", "-1", "--json", home=tmp_path / "home", code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("troupe: temperature: got -1.0; allowed: ")
    assert not (tmp_path / "home").exists()


def test_a_model_that_is_nowhere_is_told_with_what_was_tried(tmp_path: Path) -> None:
    result = troupe("run", "no-such-model", "Hi", home=tmp_path, code=1)
    assert result.stdout == ""
    assert "no checkpoint 'no-such-model'" in result.stderr


# -- models -----------------------------------------------------------------------------------------------


def test_fetched_models_are_listed_as_json_and_as_a_table(tmp_path: Path) -> None:
    assert json.loads(troupe("models", "list", "--json", home=tmp_path).stdout) == []
    with store.building(tmp_path, "chat") as build:
        (build / "checkpoint").mkdir()
        manifest = store.manifest_now(name="chat", form="4bit", source="wheel", source_sha256="aa", license="MIT")
        path = store.publish(tmp_path, build / "checkpoint", manifest)
    (row,) = json.loads(troupe("models", "list", "--json", home=tmp_path).stdout)
    assert row == {"name": "chat", "path": str(path), "bytes": (path / store.MANIFEST).stat().st_size}
    table = troupe("models", "list", home=tmp_path)
    assert str(path) in table.stdout
    assert "smollm2-135m" in table.stderr
    assert troupe("models", "rm", "chat", home=tmp_path).stdout == ""
    assert not path.exists()
    assert "fetched: none" in troupe("models", "rm", "chat", home=tmp_path, code=2).stderr


def test_fetching_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    assert "fetchable: smollm2-135m," in troupe("models", "fetch", "smollm3", home=tmp_path, code=1).stderr


# -- cache ------------------------------------------------------------------------------------------------


def test_prefixes_are_looked_up_in_the_home_that_is_given_or_else_in_the_usual_one(tmp_path: Path) -> None:
    assert json.loads(troupe("cache", "ls", "--json", home=tmp_path).stdout) == []
    for arguments, root in (((), tmp_path / "usual"), (("--home", str(tmp_path / "other")), tmp_path / "other")):
        told = json.loads(troupe("cache", "stat", "--json", *arguments, home=tmp_path / "usual").stdout)
        assert told["root"] == str(root / "prefix")
    assert list(tmp_path.iterdir()) == []


def test_damage_that_is_left_is_told_with_code_1_and_wrong_usage_with_code_2(tmp_path: Path) -> None:
    path = tmp_path / "prefix" / "v1" / "f" / "00" / f"{'0' * 64}.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"junk")
    assert f"BAD {path}: malformed: " in troupe("cache", "verify", home=tmp_path, code=1).stdout
    assert f"removed {path}: malformed: " in troupe("cache", "verify", "--remove", home=tmp_path).stdout
    assert "--max-bytes: got -1; allowed: " in troupe("cache", "gc", "--max-bytes", "-1", home=tmp_path, code=2).stderr
    for arguments in (("cache",), ("cache", "erase"), ("cache", "gc", "--older-than", "long")):
        assert troupe(*arguments, home=tmp_path, code=2).stderr.startswith("usage: troupe cache")


# -- doctor -----------------------------------------------------------------------------------------------


def test_the_doctor_finds_this_machine_well(tmp_path: Path) -> None:
    report = json.loads(troupe("doctor", "--json", home=tmp_path).stdout)
    assert report["fine"]
    names = [finding["name"] for finding in report["findings"]]
    assert {"system", "python", "mlx", "mlx-lm", "device", "blas", "cores", "memory", "open files", "home", "models"} <= set(names)


def test_the_doctor_names_what_is_missing_and_the_command_that_mends_it(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    result = troupe("doctor", home=tmp_path / "home", code=1)
    assert f"make {tmp_path / 'home'} a directory" in result.stdout
    assert "need mending" in result.stdout


# -- run --------------------------------------------------------------------------------------------------


def test_json_output_is_one_object_and_nothing_else(tiny_checkpoint: Path) -> None:
    result = troupe("run", str(tiny_checkpoint), "Hello", "--raw", "--max-tokens", "5", "--ignore-eos", "--seed", "7", "--json")
    answer = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 5
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 5
    assert answer["seed"] == 7
    assert answer["fingerprint"]
    assert answer["timings"]["total_seconds"] > 0


def test_streamed_text_is_the_text_of_the_json(tiny_checkpoint: Path) -> None:
    asked = ("run", str(tiny_checkpoint), "-", "--raw", "--max-tokens", "24", "--temperature", "1", "--seed", "3")
    text = json.loads(troupe(*asked, "--json", input="Hello").stdout)["text"]
    assert text
    assert troupe(*asked, input="Hello").stdout.rstrip("\n") == text.rstrip("\n")


def test_a_locale_without_a_character_shows_a_question_mark_and_json_keeps_it(tiny_checkpoint: Path) -> None:
    asked = ("run", str(tiny_checkpoint), "-", "--raw", "--max-tokens", "24", "--temperature", "1", "--seed", "3")
    in_unicode = json.loads(troupe(*asked, "--json", input="Hello").stdout)["text"]
    assert not in_unicode.isascii()
    assert json.loads(troupe(*asked, "--json", input="Hello", encoding="ascii").stdout)["text"] == in_unicode
    said = troupe(*asked, input="Hello", encoding="ascii").stdout
    assert said.rstrip("\n") == in_unicode.encode("ascii", "replace").decode().rstrip("\n")


def test_a_stop_text_ends_the_answer_before_it(tiny_checkpoint: Path) -> None:
    asked = ("run", str(tiny_checkpoint), "Hello", "--raw", "--max-tokens", "24", "--temperature", "1", "--seed", "3", "--json")
    text = json.loads(troupe(*asked).stdout)["text"]
    stop = text[len(text) // 2 :][:2]
    answer = json.loads(troupe(*asked, "--stop", "never there", "--stop", stop).stdout)
    assert (answer["finish_reason"], answer["matched_stop"]) == ("stop", stop)
    assert answer["text"] == text[: text.index(stop)]


def test_a_broken_checkpoint_is_told_in_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    result = troupe("run", str(tmp_path), "Hello", code=1)
    assert result.stdout == ""
    assert "config.json" in result.stderr


@pytest.mark.parametrize("after", ["Hello", "nothing"])
def test_an_interrupt_ends_with_130_and_leaves_nothing(tiny_checkpoint: Path, after: str) -> None:
    """While streaming, or right after the start; the census of every test looks for what is left."""
    command = [sys.executable, "-m", "runtime.cli", "run", str(tiny_checkpoint), "Hello", "--raw", "--ignore-eos"]
    with subprocess.Popen(
        [*command, "--max-tokens", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "MLX_DISABLE_COMPILE": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        (process.stdout if after == "Hello" else process.stderr).read(1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=SECONDS)
        assert process.returncode == 130, error
    assert b"Traceback" not in error


# -- parts ------------------------------------------------------------------------------------------------


def test_plain_progress_says_each_stage_and_each_quarter_once() -> None:
    lines = Lines()
    said = [line for done in range(101) for line in lines.update("tiny", "download", done * 10**6, 100 * 10**6)]
    assert said == [f"tiny: download {done:.1f} MB of 100.0 MB" for done in (0, 25, 50, 75, 100)]
    assert lines.update("tiny", "waiting", 0, 0) == ["tiny: waiting"]
    assert lines.update("tiny", "waiting", 0, 0) == []
    assert [lines.update("tiny", "imports", done, 1) for done in (0, 1)] == [["tiny: imports"], []]
    assert lines.update("tiny", "convert", 2, 4) == ["tiny: convert 2 of 4"]


def test_on_a_terminal_each_model_has_one_bar_of_its_stage_now() -> None:
    def shown(*said: tuple[str, str, int, int]) -> list[str]:
        frame = Console(width=80, file=io.StringIO())
        with Bars(Console(file=io.StringIO(), force_terminal=True)) as bars:
            for subject, stage, done, total in said:
                bars.update(subject, stage, done, total)
            assert bars._progress is not None
            frame.print(bars._progress.get_renderable())
        lines = cast(io.StringIO, frame.file).getvalue().splitlines()
        return [" ".join(word for word in line.split()[:-1] if "━" not in word) for line in lines]

    imports = [("mouse", "imports", 0, 1), ("mole", "imports", 0, 1)]
    assert shown(*imports) == ["mouse: imports", "mole: imports"]  # no percentage: nobody knows how far it is
    weights = [("mouse", "weights", 25, 100), ("mole", "weights", 100, 100)]
    assert shown(*imports, *weights) == ["mouse: weights 25%", "mole: weights 100%"]
    checks = [("mouse", "selftest", 0, 1), ("mole", "selftest", 1, 1)]
    assert shown(*imports, *weights, *checks) == ["mouse: selftest", "mole: selftest 100%"]


@pytest.mark.parametrize("letter", ["a", "東"])
def test_the_live_view_shows_the_end_of_a_text_that_is_too_long(letter: str) -> None:
    console = Console(width=60, file=io.StringIO())
    console.print(stream_view([Talk("reader", "small", text=letter * 200 + " the end")], console.width))
    head, line = cast(io.StringIO, console.file).getvalue().splitlines()
    assert head.split() == ["tenant", "model", "tokens", "text"]
    assert line.startswith(" reader  small")
    assert line.rstrip().endswith(f"{letter} the end")
    assert "…" not in line


def test_the_demo_shows_two_different_models_on_every_platform() -> None:
    assert demo_models("linux") == ("smollm2-135m", "smollm2-135m-4bit")
    assert demo_models("darwin") == ("smollm2-135m", "smollm2-135m-float32")


@pytest.mark.real_model
def test_the_real_model_knows_the_capital_of_france() -> None:
    asked = ("run", "smollm2-135m", "What is the capital of France?", "--temperature", "0", "--max-tokens", "24", "--json")
    answer = json.loads(troupe(*asked, home=Settings().home_directory()).stdout)
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"]
