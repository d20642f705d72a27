"""Which checkpoints make a pairing of a known acceptance and cost? Runs in a child, beside `benchmarks.opponents`.

The target is the drafter plus identity layers, whose output projections are zero: exactly the same tokens at a multiple of the
cost. Noise on the drafter's matrices lowers the acceptance; how much is found by bisection.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
QUICK_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_NUM_BISECTIONS = 9
_TOLERANCE = 0.03


def make_random(directory: Path, num_layers: int, *, is_quick: bool, seed: int = 0) -> Path:
    """A random llama of byte tokens."""
    from tests.support.tiny import make_tiny  # the benchmark's only use of test code, as for the other tiny models

    sizes = QUICK_SIZES if is_quick else SIZES
    return make_tiny(directory, "llama", num_hidden_layers=num_layers, seed=seed, max_position_embeddings=2048, **sizes)


def with_identity_layers(source: Path, directory: Path, num_more: int) -> Path:
    """The checkpoint with so many layers more, none of which adds anything."""
    _copy(source, directory)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    num_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = num_layers + num_more
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = _load(source)
    prefix = f"model.layers.{num_layers - 1}."
    last = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    for number in range(num_layers, num_layers + num_more):
        for name, value in last.items():
            weights[f"model.layers.{number}.{name}"] = mx.zeros_like(value) if name in _SILENT else value
    _save(directory, weights)
    return directory


def with_noise(source: Path, directory: Path, noise: float) -> Path:
    """Each matrix disturbed by so much of its own standard deviation."""
    _copy(source, directory)
    random = np.random.default_rng(1)
    weights = _load(source)
    for name, value in weights.items():
        if value.ndim >= 2:
            array = np.array(value.astype(mx.float32))
            disturbed = array + noise * array.std() * random.standard_normal(array.shape).astype(np.float32)
            weights[name] = mx.array(disturbed).astype(value.dtype)
    _save(directory, weights)
    return directory


def requantised(source: Path, directory: Path, bits: int) -> Path:
    """Each matrix through so many bits and back to its own type."""
    _copy(source, directory)
    weights = _load(source)
    for name, value in weights.items():
        if value.ndim == 2 and value.shape[-1] % 64 == 0:
            packed, scales, biases = mx.quantize(value, group_size=64, bits=bits)
            weights[name] = mx.dequantize(packed, scales, biases, group_size=64, bits=bits).astype(value.dtype)
    _save(directory, weights)
    return directory


def agreement(target: Path, drafter: Path, prompts: list[str], num_tokens: int) -> float:
    """How often the drafter's likeliest token is the target's, on what the target says."""
    rights = right_guesses(drafter, _greedy(target, prompts, num_tokens))
    return sum(map(sum, rights)) / sum(map(len, rights))


def right_guesses(drafter: Path, texts: list[tuple[list[int], list[int]]]) -> list[list[bool]]:
    """For each token of each (prompt, answer): whether it is the drafter's likeliest after all before it."""
    model, _ = mlx_lm.load(str(drafter))[:2]
    rights = []
    for prompt, answer in texts:
        likeliest: Any = mx.argmax(model(mx.array([[*prompt, *answer[:-1]]]))[0], axis=-1).tolist()
        rights.append([guess == token for guess, token in zip(likeliest[len(prompt) - 1 :], answer, strict=True)])
    return rights


def calibrated(source: Path, directory: Path, prompts: list[str], num_tokens: int, wanted: float) -> dict[str, Any]:
    """A noisy drafter that agrees with `source` so often, as nearly as bisection of the noise finds."""
    low, high = 0.0, 0.5
    best: dict[str, Any] = {}
    for number in range(_NUM_BISECTIONS):
        noise = (low + high) / 2
        found = agreement(source, with_noise(source, directory / f"noise-{number}", noise), prompts, num_tokens)
        if not best or abs(found - wanted) < abs(best["agreement"] - wanted):
            best = {"path": str(directory / f"noise-{number}"), "agreement": found, "noise": noise}
        if abs(found - wanted) <= _TOLERANCE:
            break
        low, high = (noise, high) if found > wanted else (low, noise)
    return best


def _greedy(path: Path, prompts: list[str], num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of each, as ids."""
    model, tokenizer = mlx_lm.load(str(path))[:2]
    texts = []
    for prompt in prompts:
        ids = list(tokenizer.encode(prompt))
        texts.append((ids, [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=num_tokens)]))
    return texts


def _copy(source: Path, directory: Path) -> None:
    directory.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".safetensors.index.json"):
            shutil.copy(file, directory / file.name)


def _load(source: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for file in sorted(source.glob("*.safetensors")):
        loaded: Any = mx.load(str(file))
        weights.update(loaded)
    return weights


def _save(directory: Path, weights: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
