"""The examples run as they stand: with fake models, and the chat server with clients of its own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import anyio
import pytest

import runtime
from runtime.testing import fake_model

FOLDER = Path(__file__).parents[2] / "examples"
LONG = {"decode_seconds_per_step": 0.01}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        "two_models",
        "tenant_chat",
        "shared_prefix",
        "speculation",
        "fake_in_ci",
    }


@pytest.mark.anyio
async def test_two_models_answer_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    await example("two_models").main(fake_model("one", reply="Paris."), fake_model("two", reply="Lyon?"))
    said = capsys.readouterr().out
    assert "one: Paris. (6 tokens in " in said
    assert "two: Lyon? (5 tokens in " in said


@pytest.mark.anyio
async def test_chatting_clients_are_answered_and_one_that_hangs_up_ends_nobody_else_s_answer() -> None:
    module = example("tenant_chat")
    async with anyio.create_task_group() as group:

        async def serve(*, task_status: anyio.abc.TaskStatus[int]) -> None:
            await module.main(fake_model(module.MODEL, reply="Hi there", **LONG), port=0, task_status=task_status)

        port = await group.start(serve)
        async with await anyio.connect_tcp("127.0.0.1", port) as stays:
            async with await anyio.connect_tcp("127.0.0.1", port) as leaves:
                await stays.send(b"Hello\n\nAnd again?\n")
                await leaves.send(b"Hello\n")
                assert await leaves.receive()
            said = b""
            while said.count(b"\n") < 2:
                said += await stays.receive()
            assert said == b"Hi there\nHi there\n"
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_chat_that_kills_its_workers_is_told_and_begins_anew() -> None:
    module = example("tenant_chat")
    crash = runtime.testing.Fault("prefill", "kill", incarnations=(1, 2, 3))
    async with anyio.create_task_group() as group:

        async def serve(*, task_status: anyio.abc.TaskStatus[int]) -> None:
            await module.main(fake_model(module.MODEL, reply="Hi there", faults=(crash,)), port=0, task_status=task_status)

        async with await anyio.connect_tcp("127.0.0.1", await group.start(serve)) as client:
            said = b""
            await client.send(b"Hello\n")
            while not said.endswith(b"\n"):
                said += await client.receive()
            assert said.endswith(b"[worker_crashed; let us begin anew]\n")
            await client.send(b"Hello\n")
            while said.count(b"\n") < 2:
                said += await client.receive()
            assert said.endswith(b"\nHi there\n")
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_users_find_the_prompt_that_the_app_computed_ahead_and_leave_nothing_of_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = example("shared_prefix")
    await module.main(fake_model(module.MODEL, reply="Paris."))
    first, *answers, last = capsys.readouterr().out.splitlines()
    num_ahead = int(re.fullmatch(r"ahead of use: (\d+) tokens", first)[1])
    told = [re.fullmatch(r"(\w+): (\d+) of (\d+) tokens were there: Paris\.", line) for line in answers]
    assert {match[1] for match in told} == set(module.QUESTIONS)
    # Of the prompt all but the template's opening of a reply; of each other's questions nothing.
    shared = {int(match[2]) for match in told}
    assert len(shared) == 1
    assert 0.9 * num_ahead < min(shared) <= num_ahead
    assert last == f"3 found it in memory, 0 in files: {3 * min(shared)} tokens not computed again"


@pytest.mark.anyio
async def test_speculation_gives_the_same_tokens_and_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("speculation")
    await module.main(fake_model("any", reply="la" * 60, decode_seconds_per_step=0.002))
    plain, quick, same, rounds = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"plain: [\d.]+ tok/s, 0 of 0 proposed tokens accepted", plain)
    assert re.fullmatch(r"quick: [\d.]+ tok/s, \d+ of \d+ proposed tokens accepted", quick)
    assert same == "the same tokens"
    assert re.fullmatch(r"\d+ rounds, \d+ of \d+ proposals right, paired", rounds)


FAKE_IN_CI = example("fake_in_ci")


@pytest.mark.parametrize("name", [name for name in vars(FAKE_IN_CI) if name.startswith("test_")])
def test_the_example_of_an_app_s_own_tests_passes(name: str) -> None:
    getattr(FAKE_IN_CI, name)()
