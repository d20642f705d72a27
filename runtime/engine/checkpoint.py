"""From a `Load` to a model in memory: find the checkpoint, check it, read it, and say what it is.

The one place that calls mlx-lm's loader and knows its many kinds of exception; out of here come `LoadError`s only.
Everything is evaluated on the calling thread, which must be the one that will run the model: lazy arrays cannot change threads.

Code from a checkpoint runs only with `trust_remote_code`: that is config.json's `model_file`, and tokenizers with code of their
own. An `auto_map` in config.json alone is harmless here: mlx-lm never runs it, so such checkpoints load with mlx-lm's own model.
"""

from __future__ import annotations

import glob
import json
import re
from dataclasses import dataclass
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from runtime.engine import checkpoint_config
from runtime.engine.checkpoint_config import describe
from runtime.engine.engine import LoadError, Progress
from runtime.engine.fingerprint import fingerprint
from runtime.engine.hub import resolve
from runtime.engine.safetensors_check import Shard, check_weights
from runtime.protocol.commands import Load
from runtime.protocol.events import LoadFailure

_PORTION_BYTES = 256 << 20
"""Weights evaluated between two reports of progress."""


@dataclass(frozen=True)
class CheckedCheckpoint:
    """A directory that passed every check that needs no weights."""

    directory: Path
    config: dict[str, Any]
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model, wholly evaluated.

    context_length: tokens, already bounded by the load's max_context_tokens. bytes_per_token: what one more token of context
    costs in attention caches (all layers; a sliding-window layer stops growing at its window). weights_bytes: in memory.
    config: config.json with generation_config.json's end tokens, as mlx-lm merges them.
    """

    model: Any
    config: dict[str, Any]
    directory: Path
    model_type: str
    context_length: int
    fingerprint: str
    weights_bytes: int
    bytes_per_token: int


def load_checkpoint(load: Load, progress: Progress) -> Checkpoint:
    """`check_checkpoint`, then `read_checkpoint`. Progress stages: "download" (hub ids), "weights", in bytes.

    :raises LoadError: for every fault of the checkpoint.
    """
    return read_checkpoint(check_checkpoint(load, progress), load, progress)


def check_checkpoint(load: Load, progress: Progress) -> CheckedCheckpoint:
    """Everything that can be known without reading weights: cheap, so that a bad checkpoint fails fast.

    :raises LoadError: "not_found", "malformed_config", "unsupported_model_type", "remote_code_refused", "missing_weights",
        "corrupt_weights"; "error" when the installed mlx-lm is no tested version.
    """
    checkpoint_config.check_mlx_lm_version()
    directory = resolve(load, progress)
    checkpoint_config.check_files(directory)
    config = checkpoint_config.read_config(directory, trust_remote_code=load.trust_remote_code)
    shards = tuple(check_weights(directory))
    checkpoint_config.check_size(directory, config, sum(len(shard.spans) for shard in shards))
    return CheckedCheckpoint(directory, config, shards)


def read_checkpoint(checked: CheckedCheckpoint, load: Load, progress: Progress) -> Checkpoint:
    """:raises LoadError: "missing_weights", "corrupt_weights", "malformed_config", "out_of_memory", "error"."""
    total_bytes = sum(shard.num_bytes for shard in checked.shards)
    progress("weights", 0, total_bytes)
    model, config = _load_model(checked, load)
    try:
        weights_bytes = _evaluate(model, progress, total_bytes)
        bytes_per_token = _bytes_per_token(model)
    except Exception as error:
        raise LoadError(_memory_or("error", error), f"cannot read the weights in {checked.directory}: {describe(error)}") from error
    try:
        identity = fingerprint(checked.directory, checked.shards)
    except OSError as error:
        raise LoadError("corrupt_weights", f"a file of {checked.directory} cannot be read: {describe(error)}") from error
    return Checkpoint(
        model=model,
        config=config,
        directory=checked.directory,
        model_type=config["model_type"],
        context_length=checkpoint_config.context_length(config, load.max_context_tokens),
        fingerprint=identity,
        weights_bytes=weights_bytes,
        bytes_per_token=bytes_per_token,
    )


class _LiteralPath(PosixPath):
    """A directory under which patterns are patterns but the directory's own name is not.

    mlx-lm globs `str(directory / "model*.safetensors")`, which finds nothing in a directory called "model [4bit]".
    """

    def __truediv__(self, name: Any) -> Any:
        if any(character in str(name) for character in "*?["):
            return Path(glob.escape(str(self))) / name
        return Path(str(self)) / name


def _load_model(checked: CheckedCheckpoint, load: Load) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import load_model

    directory = checked.directory
    built = False

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        """mlx-lm's own classes, wrapped so that a failure to build is told from a failure to fill."""
        model_class, arguments_class = checkpoint_config.model_classes(config)

        def build(arguments: Any) -> Any:
            nonlocal built
            try:
                model = model_class(arguments)
            except Exception as error:
                raise LoadError(
                    "malformed_config",
                    f"config.json in {directory}: no {config['model_type']!r} model can be built from it: {describe(error)}",
                ) from error
            built = True
            return model

        def arguments(values: dict[str, Any]) -> Any:
            checkpoint_config.check_fields(directory, values, arguments_class)
            return arguments_class.from_dict(values)

        return build, SimpleNamespace(from_dict=arguments)

    try:
        return load_model(_LiteralPath(directory), lazy=True, get_model_classes=classes, trust_remote_code=load.trust_remote_code)
    except LoadError:
        raise
    except Exception as error:
        reason, what = _explain(error, built)
        raise LoadError(_memory_or(reason, error), f"weights in {directory}: {what}") from error


def _explain(error: Exception, built: bool) -> tuple[LoadFailure, str]:
    """What an exception out of mlx-lm's loader means. built: the model stood, and was being quantised or filled."""
    text = str(error)
    if isinstance(error, json.JSONDecodeError):
        return "malformed_config", f"a JSON file of the checkpoint is malformed: {text}"
    if match := re.match(r"(Missing|Received) (\d+) parameters[^:]*:\s*(.*)", text, re.DOTALL):
        names = [name.strip(" ,.") for name in match[3].split("\n") if name.strip(" ,.")]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if match[1] == "Missing":
            return "missing_weights", f"{match[2]} parameters of the model are in no weight file: {shown}"
        return "missing_weights", f"they hold {match[2]} parameters that the model of this config does not have: {shown}"
    if isinstance(error, ValueError) and "shape" in text:
        return "missing_weights", f"{' '.join(text.split())}; they do not belong to this config"
    if isinstance(error, KeyError) and built:
        return "missing_weights", f"no weight file has the parameter (or no config the field) {error.args[0]!r}"
    if isinstance(error, FileNotFoundError):
        return "missing_weights", text
    if isinstance(error, RuntimeError | OSError):
        return "corrupt_weights", f"they cannot be read: {describe(error)}"
    if isinstance(error, ValueError | KeyError | TypeError):
        return "malformed_config", f"config.json and weights do not fit together: {describe(error)}"
    return "error", describe(error)


def _memory_or(reason: LoadFailure, error: BaseException) -> LoadFailure:
    text = str(error).lower()
    is_memory = isinstance(error, MemoryError) or "allocate" in text or "out of memory" in text or "bad_alloc" in text
    return "out_of_memory" if is_memory else reason


def _evaluate(model: Any, progress: Progress, total_bytes: int) -> int:
    """Bring all parameters into memory, a portion at a time, then the arrays models keep privately (rotary tables)."""
    done = 0
    portion: list[mx.array] = []
    portion_bytes = 0
    for _, array in tree_flatten(model.parameters()):
        portion.append(array)
        portion_bytes += array.nbytes
        if portion_bytes >= _PORTION_BYTES:
            mx.eval(portion)
            done += portion_bytes
            portion, portion_bytes = [], 0
            progress("weights", min(done, total_bytes), total_bytes)
    mx.eval(portion)
    done += portion_bytes
    for module in model.modules():
        mx.eval([value for value in (*module.values(), *vars(module).values()) if isinstance(value, mx.array)])
    progress("weights", total_bytes, total_bytes)
    return done


def _bytes_per_token(model: Any) -> int:
    """From the shapes of the caches after one token; nothing is computed for it."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    return sum(_growth(cache) for cache in caches)


def _growth(cache: Any) -> int:
    if (children := getattr(cache, "caches", None)) is not None:
        return sum(_growth(child) for child in children)
    arrays = (getattr(cache, "keys", None), getattr(cache, "values", None))
    return sum(array.nbytes // array.shape[2] for array in arrays if isinstance(array, mx.array) and array.ndim == 4)
