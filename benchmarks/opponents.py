"""What do the same models do without us? A child process that runs mlx-lm itself, in-process or as its HTTP server.

    python -m benchmarks.opponents commands             JSON lines: one command in, one answer out, until stdin ends
    python -m benchmarks.opponents server PATH PORT     mlx_lm.server, ended with stdin

Both ignore end-of-sequence tokens, as the runtime's runs do with `ignore_eos`, so that every side makes equally many tokens.
The parent half is `benchmarks.children`; it must not import this module, which pulls in all of mlx-lm.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()

import mlx.core as mx  # noqa: E402  (timed: the import is part of what an app waits for)
import mlx_lm  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402

IMPORT_SECONDS = time.perf_counter() - _STARTED


class Opponent:
    """One checkpoint in mlx-lm. Every method is a command; its keyword arguments are the command's values."""

    def __init__(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None

    def load(self, path: str) -> dict[str, Any]:
        started = time.perf_counter()
        self._model, self._tokenizer = mlx_lm.load(path)[:2]
        return {"load_seconds": time.perf_counter() - started, "import_seconds": IMPORT_SECONDS}

    def stream(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """`mlx_lm.stream_generate` to its end. `seconds`: when each token was there, from the call on."""
        seconds: list[float] = []
        tokens: list[int] = []
        texts: list[str] = []
        prompt_tokens = 0
        started = time.perf_counter()
        for response in mlx_lm.stream_generate(self._model, self._tokenizer, prompt, max_tokens=max_tokens):
            seconds.append(time.perf_counter() - started)
            tokens.append(response.token)
            texts.append(response.text)
            prompt_tokens = response.prompt_tokens
        return {"prompt_tokens": prompt_tokens, "token_ids": tokens, "text": "".join(texts), "seconds": seconds}

    def crowd(self, prompts: list[str], max_tokens: int) -> dict[str, Any]:
        """All prompts through one `BatchGenerator`, with its defaults. It gives ids only; no text is made of them here."""
        started = time.perf_counter()
        encoded = [self._encode(prompt) for prompt in prompts]
        generator = BatchGenerator(self._model, max_tokens=max_tokens)
        numbers = {uid: number for number, uid in enumerate(generator.insert(encoded))}
        tokens: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        while responses := generator.next_generated():
            now = time.perf_counter() - started
            for response in responses:
                number = numbers[response.uid]
                tokens[number].append(response.token)
                seconds[number].append(now)
        generator.close()
        streams = [
            {"prompt_tokens": len(ids), "token_ids": made, "text": "", "seconds": when}
            for ids, made, when in zip(encoded, tokens, seconds, strict=True)
        ]
        return {"streams": streams}

    def facts(self) -> dict[str, Any]:
        """Which BLAS answers in this process, and with how many threads."""
        blas, threads = _blas()
        return {"blas": blas, "compute_threads": threads, "device": str(mx.default_device())}

    def make_tiny(self, directory: str) -> dict[str, Any]:
        """Write a tiny random llama checkpoint."""
        from tests.support.tiny import make_tiny  # the only use of test code, and only when a tiny model is measured

        return {"path": str(make_tiny(directory, "llama"))}

    def speculate(self, drafter: str, prompt: str, max_tokens: int, num_draft_tokens: int) -> dict[str, Any]:
        """The loaded model with a drafter in the same process: `mlx_lm.stream_generate` with `draft_model`."""
        draft_model = mlx_lm.load(drafter)[0]
        seconds: list[float] = []
        tokens: list[int] = []
        prompt_tokens = num_drafted = 0
        self.stream(prompt, 4)
        started = time.perf_counter()
        for response in mlx_lm.stream_generate(
            self._model, self._tokenizer, prompt, max_tokens=max_tokens, draft_model=draft_model, num_draft_tokens=num_draft_tokens
        ):
            seconds.append(time.perf_counter() - started)
            tokens.append(response.token)
            num_drafted += response.from_draft
            prompt_tokens = response.prompt_tokens
        return {"prompt_tokens": prompt_tokens, "token_ids": tokens, "text": "", "seconds": seconds, "num_drafted": num_drafted}

    def make_pairing(
        self, directory: str, is_quick: bool, ratios: list[int], acceptances: list[float], prompts: list[str]
    ) -> dict[str, Any]:
        """A random drafter of two layers, for each ratio a target so many times as deep that says the same, and for each acceptance
        a drafter that agrees so often (0: one of other weights)."""
        from benchmarks import pairings

        root = Path(directory)
        base = pairings.make_random(root / "base", 2, is_quick=is_quick)
        targets = {
            str(ratio): str(pairings.with_identity_layers(base, root / f"target-{ratio}", 2 * ratio - 2)) for ratio in ratios
        }
        drafters: dict[str, dict[str, Any]] = {}
        for wanted in acceptances:
            if wanted == 1:
                drafters[str(wanted)] = {"path": str(base), "agreement": 1.0}
            elif wanted == 0:
                other = pairings.make_random(root / "other", 2, is_quick=is_quick, seed=7)
                drafters[str(wanted)] = {"path": str(other), "agreement": pairings.agreement(base, other, prompts, 32)}
            else:
                drafters[str(wanted)] = pairings.calibrated(base, root / f"noisy-{wanted}", prompts, 48, wanted)
        return {"targets": targets, "drafters": drafters}

    def make_shared(self, directory: str, names: list[str], prompts: list[str], wanted: float) -> dict[str, Any]:
        """A drafter and two targets, both deeper: of the first it is a noisy copy, of the second the very layers."""
        from benchmarks import pairings

        root = Path(directory)
        base = pairings.make_random(root / "base", 2, is_quick=True)
        drafter = Path(pairings.calibrated(base, root / "noisy", prompts, 48, wanted)["path"])
        sources = dict(zip(names, (base, drafter), strict=True))
        targets = {name: str(pairings.with_identity_layers(source, root / name, 4)) for name, source in sources.items()}
        return {"drafter": str(drafter), "targets": targets}

    def guesses(self, drafter: str, texts: list[dict[str, list[int]]]) -> dict[str, Any]:
        """Of each token of each answer, whether it is the drafter's likeliest after the prompt and the answer so far."""
        from benchmarks import pairings

        return {"right": pairings.right_guesses(Path(drafter), [(text["prompt"], text["answer"]) for text in texts])}

    def make_deeper(self, source: str, directory: str, num_more: int) -> dict[str, Any]:
        from benchmarks import pairings

        return {"path": str(pairings.with_identity_layers(Path(source), Path(directory), num_more))}

    def make_requantised(self, source: str, directory: str, bits: int) -> dict[str, Any]:
        from benchmarks import pairings

        return {"path": str(pairings.requantised(Path(source), Path(directory), bits))}

    def _encode(self, prompt: str) -> list[int]:
        """As `stream_generate` does: BOS unless the text begins with it."""
        bos = self._tokenizer.bos_token
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
        return ids


def _blas() -> tuple[str, int | None]:
    """OpenBLAS counts only when its plain names are the process's own (numpy brings one under other names for itself)."""
    if sys.platform != "linux":
        return "system", None
    try:
        return "openblas", int(ctypes.CDLL(None).openblas_get_num_threads())
    except AttributeError:
        return "reference", 1


def _serve_commands() -> None:
    """Answers go to a copy of stdout; stdout itself becomes stderr, so that no library's print can fall between them."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    opponent = Opponent()
    for line in sys.stdin:
        command = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(opponent, command.pop("do"))
        try:
            answer = method(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _serve_http(path: str, port: str) -> None:
    import mlx_lm.server  # starts no thread and takes no port before main()

    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    os.dup2(2, 1)
    sys.argv = ["mlx_lm.server", "--model", path, "--host", "127.0.0.1", "--port", port, "--log-level", "ERROR"]
    mlx_lm.server.main()


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    TokenizerWrapper.eos_token_ids = property(lambda self: set())
    match sys.argv[1:]:
        case ["commands"]:
            _serve_commands()
        case ["server", path, port]:
            _serve_http(path, port)
        case other:
            raise SystemExit(f"benchmarks.opponents: expected 'commands' or 'server PATH PORT', got {other}")


if __name__ == "__main__":
    main()
