"""`troupe`: which command was meant, and how does it end for the shell?

Results go to stdout, everything else (progress, errors) to stderr. Exit codes: 0 fine, 1 failed, 2 wrong usage,
130 interrupted. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence

from runtime.cli.parser import parse
from runtime.errors import InvalidRequest, TroupeError

FAILED = 1
USAGE = 2
INTERRUPTED = 130

WARNING = 30  # of the logging module, which costs an import


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. argparse raises SystemExit for --help, --version and wrong usage."""
    options = parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without some character of an answer shows a question mark for it
    try:
        try:
            return _run(options.command, options)
        finally:
            sys.stdout.flush()
    except BaseExceptionGroup as group:  # what happened in a task group; one story is enough for a person
        error = next((leaf for leaf in _leaves(group) if isinstance(leaf, TroupeError)), None)
        if error is None:
            raise
        return _report(error)
    except TroupeError as error:
        return _report(error)
    except BrokenPipeError:
        _silence_stdout()
        return FAILED
    except OSError as error:  # a home that cannot be read or written
        print(f"troupe: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        # asyncio has cancelled the command by now, and the command has cleaned up.
        print("troupe: interrupted", file=sys.stderr)
        return INTERRUPTED


def _report(error: TroupeError) -> int:
    print(f"troupe: {error}", file=sys.stderr)
    return USAGE if isinstance(error, InvalidRequest) else FAILED


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _run(command: str, options: object) -> int:
    from functools import partial
    from importlib import import_module

    import anyio
    import structlog

    # Results alone go to stdout; structlog's default would put its lines there.
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr), wrapper_class=structlog.make_filtering_bound_logger(WARNING)
    )
    code: int = anyio.run(partial(import_module(f"runtime.cli.{command}").main, options))
    return code


def _silence_stdout() -> None:
    """Whoever read our output has gone; the interpreter's own flush at exit must not complain about it."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
