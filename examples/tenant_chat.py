"""A chat server in one page: each connection is a tenant, all of them share one model, and nobody can crowd the others out.

    python examples/tenant_chat.py smollm2-135m        # then, in other terminals: nc 127.0.0.1 8421

One line from a client is one question; the answer is streamed back. A client that hangs up stops the computing.
"""

from __future__ import annotations

import itertools
import sys

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

import runtime

MODEL = "chat"
SHARE = runtime.TenantSpec(weight=1.0, max_running=1, max_queued=4)
MAX_LINE_BYTES = 10_000


async def converse(tenant: runtime.Tenant, client: anyio.abc.ByteStream) -> None:
    lines = BufferedByteReceiveStream(client)
    messages: list[dict[str, str]] = []
    while True:
        question = (await lines.receive_until(b"\n", MAX_LINE_BYTES)).decode(errors="replace").strip()
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            async with tenant.stream(MODEL, messages=messages, max_tokens=200, deadline_seconds=120) as stream:
                async for event in stream:
                    if isinstance(event, runtime.TextDelta):
                        await client.send(event.text.encode())
                answer = await stream.completion()
            messages.append({"role": "assistant", "content": answer.text})
            await client.send(b"\n")
        except runtime.AdmissionError as error:  # too much at once: this one question is given up
            messages.pop()
            await client.send(f"[busy, try again in {error.retry_after_seconds:.0f} s]\n".encode())
        except runtime.TroupeError as error:  # for instance a context that is full, or a worker that died and is started again
            messages.clear()
            await client.send(f"[{error.code}; let us begin anew]\n".encode())


async def main(
    spec: runtime.ModelSpec, *, port: int = 8421, task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serves until it is cancelled; `started` with the port that it listens on."""
    numbers = itertools.count(1)
    async with runtime.Runtime() as rt:
        await rt.load(spec)

        async def serve(client: anyio.abc.SocketStream) -> None:
            async with client:
                try:
                    await converse(rt.tenant(f"client {next(numbers)}", SHARE), client)
                except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.IncompleteRead, anyio.DelimiterNotFound):
                    pass  # hung up, or sent a line without an end

        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
        async with listener:
            task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
            await listener.serve(serve)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        anyio.run(main, runtime.ModelSpec(MODEL, path=sys.argv[1]))
    except runtime.TroupeError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
