"""What can be said on the command line?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_WHOLE_NUMBERS = {
    "max-tokens": "of the answer; 1024 when not given",
    "top-k": "draw from that many likeliest tokens; 0 is off",
    "seed": "of the draw; drawn, and told by --json, when not given",
}
_NUMBERS = {
    "temperature": "0, the default, takes the likeliest token",
    "top-p": "draw from the likeliest tokens that have so much probability together; 1 is off",
    "min-p": "draw from tokens at least so likely relative to the likeliest; 0 is off",
    "repetition-penalty": "over prompt and output; 1 is off",
    "presence-penalty": "over the output; 0 is off",
    "frequency-penalty": "over the output, for each occurrence; 0 is off",
}


class Version(argparse.Action):
    """Looks the version up only when asked: the look-up costs more than all the rest of the parsing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"troupe {version('mlx-troupe')}")
        parser.exit()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """`command` of the result is the module of `runtime.cli` that carries it out."""
    parser = argparse.ArgumentParser(prog="troupe", description="Several MLX language models side by side on one machine.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _run(commands.add_parser("run", help="load a model and stream its answer to one prompt"))
    _demo(commands.add_parser("demo", help="two real models, three tenants, a live view and the proof that it is real"))
    _models(commands.add_parser("models", help="fetched models: list, fetch, rm"))
    _cache(commands.add_parser("cache", help="shared prefixes on the disk: ls, stat, verify, gc, erase"))
    _doctor(commands.add_parser("doctor", help="what this machine can do, what is missing, and the command that mends it"))
    return parser.parse_args(arguments)


def _run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="run")
    parser.add_argument(
        "model", metavar="MODEL", help="a fetchable model's name (fetched when needed), a checkpoint directory, or a hub id"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--blas", choices=["auto", "reference"], default="auto", help="linear algebra of CPU workers")
    parser.add_argument("--revision", metavar="NAME", help="of a hub id")
    parser.add_argument("--trust-remote-code", action="store_true", help="let a checkpoint bring its own Python code")
    sampling = parser.add_argument_group("sampling", "ranges are checked before anything is loaded")
    for option, meaning in _WHOLE_NUMBERS.items():
        sampling.add_argument(f"--{option}", type=int, metavar="N", help=meaning)
    for option, meaning in _NUMBERS.items():
        sampling.add_argument(f"--{option}", type=float, metavar="X", help=meaning)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end token")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="demo")


def _models(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="models")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="show what has been fetched")
    listing.add_argument("--json", action="store_true", help="print a JSON list of {name, path, bytes}")
    fetching = actions.add_parser("fetch", help="download, verify and convert models")
    fetching.add_argument("names", nargs="+", metavar="NAME")
    removing = actions.add_parser("rm", help="remove a fetched model")
    removing.add_argument("names", nargs="+", metavar="NAME")


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="cache")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--home", metavar="DIR", help="whose prefixes; TROUPE_HOME or the user cache directory when not given")
    common.add_argument("--json", action="store_true", help="print one JSON value")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("ls", parents=[common], help="show each segment, least recently used first")
    actions.add_parser("stat", parents=[common], help="show totals for each model and tenant")
    verifying = actions.add_parser("verify", parents=[common], help="read every file whole and tell which are damaged")
    verifying.add_argument("--remove", action="store_true", help="remove what is damaged")
    collecting = actions.add_parser("gc", parents=[common], help="remove what is of no use to anyone, and more when asked")
    collecting.add_argument("--max-bytes", type=int, metavar="N", help="then the least recently used, until N bytes are left")
    collecting.add_argument("--older-than", type=float, metavar="DAYS", help="then what has not been used for so long")
    erasing = actions.add_parser("erase", parents=[common], help="destroy a tenant's key and remove its files")
    erasing.add_argument("--tenant", required=True, metavar="NAME", help="as the app calls it")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="doctor")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
