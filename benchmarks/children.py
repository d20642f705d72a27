"""How does the benchmark own the processes it compares with? Each is started, asked and ended here, within deadlines."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO, Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks.environment import ROOT
from benchmarks.measure import BenchmarkError, Run, StreamRun, from_answer

_GRACE_SECONDS = 5.0
_LOAD_SECONDS = 300.0
_RUN_SECONDS = 300.0
_LINE_BYTES = 1 << 26


class InProcess:
    """mlx-lm itself with one checkpoint, in a child of its own."""

    def __init__(self, process: Process, errors: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._answers = BufferedByteReceiveStream(process.stdout)
        self._errors = errors

    async def ask(self, do: str, *, deadline_seconds: float = _RUN_SECONDS, **values: Any) -> dict[str, Any]:
        """:raises BenchmarkError: the child failed, ended or was too slow."""
        try:
            with anyio.fail_after(deadline_seconds):
                await self._stdin.send(json.dumps({"do": do, **values}).encode() + b"\n")
                answer: dict[str, Any] = json.loads(await self._answers.receive_until(b"\n", _LINE_BYTES))
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, TimeoutError) as error:
            what = f"the mlx-lm child gave no answer to {do!r}: {type(error).__name__}"
            raise BenchmarkError(f"{what}; {_tail(self._errors)}") from error
        if "error" in answer:
            raise BenchmarkError(f"the mlx-lm child could not {do}: {answer['error']}")
        return answer

    async def load(self, path: Path) -> dict[str, Any]:
        return await self.ask("load", path=str(path), deadline_seconds=_LOAD_SECONDS)

    async def stream(self, prompt: str, max_tokens: int) -> Run:
        return Run([from_answer(await self.ask("stream", prompt=prompt, max_tokens=max_tokens))])

    async def crowd(self, prompts: list[str], max_tokens: int) -> Run:
        answer = await self.ask("crowd", prompts=prompts, max_tokens=max_tokens)
        return Run([from_answer(stream) for stream in answer["streams"]])

    @property
    def pid(self) -> int:
        return self._process.pid


class HttpServer:
    """`mlx_lm.server` on a free loopback port, and as many clients as there are prompts."""

    def __init__(self, port: int, errors: IO[bytes]) -> None:
        self._port = port
        self._errors = errors

    async def wait_ready(self) -> None:
        """:raises BenchmarkError: it does not answer in time."""
        deadline = time.monotonic() + _LOAD_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, anyio.EndOfStream), anyio.move_on_after(2.0):
                async with await anyio.connect_tcp("127.0.0.1", self._port) as connection:
                    await connection.send(b"GET /health HTTP/1.0\r\n\r\n")
                    if b" 200 " in (await connection.receive()).split(b"\r\n", 1)[0]:
                        return
            await anyio.sleep(0.1)
        raise BenchmarkError(f"mlx_lm.server did not become ready within {_LOAD_SECONDS:.0f} s; {_tail(self._errors)}")

    async def crowd(self, prompts: list[str], max_tokens: int) -> Run:
        """All prompts at once, each over a streaming request of its own."""
        streams = [StreamRun() for _ in prompts]
        started = time.perf_counter()
        with anyio.fail_after(_RUN_SECONDS):
            async with anyio.create_task_group() as group:
                for prompt, stream in zip(prompts, streams, strict=True):
                    group.start_soon(self._complete, prompt, max_tokens, started, stream)
        return Run(streams)

    async def _complete(self, prompt: str, max_tokens: int, started: float, stream: StreamRun) -> None:
        """A chunk of text counts as one token; what the closing usage counts beyond that arrives with it."""
        options = {"max_tokens": max_tokens, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"prompt": prompt, **options}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        async with await anyio.connect_tcp("127.0.0.1", self._port) as connection:
            await connection.send(head.encode() + body)
            async for chunk in _server_sent_events(connection):
                now = time.perf_counter() - started
                for choice in chunk.get("choices", ()):
                    if text := choice.get("text"):
                        stream.text += text
                        stream.arrivals.append((now, 1))
                if usage := chunk.get("usage"):
                    stream.prompt_tokens = usage["prompt_tokens"]
                    if (missing := usage["completion_tokens"] - stream.num_tokens) > 0:
                        stream.arrivals.append((now, missing))
        if not stream.prompt_tokens or not stream.arrivals:
            raise BenchmarkError(f"mlx_lm.server gave no complete stream; {_tail(self._errors)}")


async def _server_sent_events(connection: anyio.abc.ByteReceiveStream) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line of an HTTP/1.0 answer, as it comes. :raises BenchmarkError: a status other than 200."""
    pending = b""
    in_head = True
    async for received in connection:
        pending += received
        if in_head:
            head, separator, rest = pending.partition(b"\r\n\r\n")
            if not separator:
                continue
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise BenchmarkError(f"mlx_lm.server answered {head.decode(errors='replace')}: {rest.decode(errors='replace')}")
            pending, in_head = rest, False
        *events, pending = pending.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield json.loads(event[len(b"data: ") :])


@contextlib.asynccontextmanager
async def in_process(environment: Mapping[str, str]) -> AsyncIterator[InProcess]:
    """A child that has mlx-lm imported but nothing loaded. `environment` is its whole environment."""
    async with _child(["commands"], environment, stdout=subprocess.PIPE) as (process, errors):
        yield InProcess(process, errors)


@contextlib.asynccontextmanager
async def http_server(path: Path, environment: Mapping[str, str]) -> AsyncIterator[HttpServer]:
    """`mlx_lm.server` with that checkpoint, answering."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    async with _child(["server", str(path), str(port)], environment, stdout=subprocess.DEVNULL) as (_, errors):
        server = HttpServer(port, errors)
        await server.wait_ready()
        yield server


@contextlib.asynccontextmanager
async def _child(arguments: list[str], environment: Mapping[str, str], stdout: int) -> AsyncIterator[tuple[Process, IO[bytes]]]:
    """It ends with our stdin pipe, so also when we are killed; on leaving it gets a grace period, then SIGKILL."""
    command = [sys.executable, "-m", "benchmarks.opponents", *arguments]
    with tempfile.TemporaryFile() as errors:
        process = await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=stdout, stderr=errors, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            yield process, errors
        finally:
            with anyio.CancelScope(shield=True):
                assert process.stdin is not None
                await process.stdin.aclose()
                with anyio.move_on_after(_GRACE_SECONDS):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                await process.aclose()


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    text = errors.read()[-2000:].decode(errors="replace").strip()
    return f"its last words: {text}" if text else "it said nothing on stderr"


async def resident_bytes(pid: int) -> int:
    """Resident set of a process, as `ps` sees it. :raises BenchmarkError: there is no such process."""
    with anyio.fail_after(10.0):
        found = await anyio.run_process(["ps", "-o", "rss=", "-p", str(pid)], check=False)
    text = found.stdout.decode().strip()
    if not text:
        raise BenchmarkError(f"process {pid} is gone; its resident memory cannot be read")
    return int(text) * 1024
