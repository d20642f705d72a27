"""Does a checkpoint's config.json describe a model that this runtime can build, and without running foreign code?

Answered before any weight is read. A config without a usable `model_type` (missing, null, a number; also `{}`) is a
"malformed_config"; a well-formed `model_type` that mlx-lm has no model for is an "unsupported_model_type".
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import pkgutil
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtime.engine.engine import LoadError

TESTED_MLX_LM = ((0, 32), (0, 33))
"""From the first version, below the second: this adapter leans on mlx-lm's internals."""

DEFAULT_CONTEXT_LENGTH = 32_768
"""For models that state none (recurrent ones have no limit of their own)."""

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)

_LAYER_KEYS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")

LIST_COMMAND = 'python -c "import pkgutil, mlx_lm.models as m; print(*[x.name for x in pkgutil.iter_modules(m.__path__)])"'


def check_mlx_lm_version() -> None:
    """:raises LoadError: "error"."""
    installed = version("mlx-lm")
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    low, high = TESTED_MLX_LM
    if not low <= numbers < high:
        wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        raise LoadError(
            "error", f"mlx-lm {installed} is installed but this release works with {wanted}: pip install 'mlx-lm{wanted}'"
        )


def check_files(directory: Path) -> None:
    """Opening a pipe or a device that lies there in a file's place could wait for ever.

    :raises LoadError: "malformed_config", naming it.
    """
    try:
        for entry in sorted(directory.iterdir()):
            if entry.exists() and not (entry.is_file() or entry.is_dir()):
                raise LoadError("malformed_config", f"{entry.name} in {directory} is no file but a pipe, socket or device")
    except OSError as error:
        raise LoadError("not_found", f"cannot read {directory}: {error.strerror or error}") from error


def check_size(directory: Path, config: dict[str, Any], num_tensors: int) -> None:
    """Building a model of millions of layers takes memory and minutes before it can be seen that its weights are not there.

    :raises LoadError: "missing_weights": there are more layers than tensors.
    """
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _LAYER_KEYS:
            value = source.get(key)
            if isinstance(value, int) and value > num_tensors:
                raise LoadError(
                    "missing_weights",
                    f"config.json in {directory} says that {key!r} is {value}, but all weight files hold {num_tensors} tensors",
                )


def read_config(directory: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """config.json, checked.

    :raises LoadError: "malformed_config", "unsupported_model_type", "remote_code_refused".
    """
    config = read_json_object(directory / "config.json")
    if (directory / "generation_config.json").exists():
        read_json_object(directory / "generation_config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        what = f"is {model_type!r}" if "model_type" in config else "is missing"
        raise _malformed(directory, f"'model_type' {what}; expected the name of an architecture, for instance \"llama\"")
    architectures = config.get("architectures")
    if not (architectures is None or isinstance(architectures, str) or _is_list_of_strings(architectures)):
        raise _malformed(directory, f"'architectures' is {architectures!r}; expected a list of class names")
    for key in ("quantization", "quantization_config", "text_config"):
        if not isinstance(config.get(key) or {}, dict):
            raise _malformed(directory, f"{key!r} is {config[key]!r}; expected an object")
    if (quantization := config.get("quantization")) is not None:
        for key in ("group_size", "bits"):
            if not isinstance(quantization.get(key), int):
                raise _malformed(directory, f"'quantization.{key}' is {quantization.get(key)!r}; expected a whole number")
    if (model_file := config.get("model_file")) is not None:
        _check_model_file(directory, model_file, trust_remote_code)
    else:
        _, arguments = model_classes(config)
        check_fields(directory, config, arguments)
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """:raises LoadError: "malformed_config": absent, unreadable, no JSON, or no object."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise LoadError(
            "malformed_config", f"no {path.name} in {path.parent}; is this an MLX checkpoint?{_instead(path.parent)}"
        ) from error
    except OSError as error:
        raise LoadError("malformed_config", f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LoadError("malformed_config", f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError("malformed_config", f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's (Model, ModelArgs) for this config.

    :raises LoadError: "unsupported_model_type".
    """
    from mlx_lm.utils import _get_classes

    model_type = config["model_type"]
    try:
        if "." in model_type:  # would name a submodule of something, or another package altogether
            raise ValueError(model_type)
        model, arguments = _get_classes(config)
    except (ValueError, AttributeError, ImportError) as error:
        known = supported_names()
        close = difflib.get_close_matches(model_type, known, n=3)
        hint = f" Similar: {', '.join(close)}." if close else ""
        raise LoadError(
            "unsupported_model_type",
            f"model_type {model_type!r} is not supported by mlx-lm {version('mlx-lm')}.{hint} All names: {LIST_COMMAND}",
        ) from error
    return model, arguments


def supported_names() -> list[str]:
    """Names of mlx-lm's model modules, some helpers among them."""
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module("mlx_lm.models").__path__))


def check_fields(directory: Path, config: dict[str, Any], arguments: Any) -> None:
    """:raises LoadError: "malformed_config", naming the missing fields."""
    if dataclasses.is_dataclass(arguments):
        required = [
            field.name
            for field in dataclasses.fields(arguments)
            if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        missing = [name for name in required if name not in config]
        # Some models give ModelArgs a from_dict of their own, which fills fields from elsewhere in the config.
        if missing and "from_dict" not in vars(arguments):
            raise _malformed(
                directory, f"model_type {config['model_type']!r} needs {', '.join(map(repr, missing))}, which is missing"
            )
    try:
        arguments.from_dict(dict(config))
    except Exception as error:
        raise _malformed(directory, f"{describe(error)}; model_type {config['model_type']!r} cannot be set up from it") from error


def context_length(config: dict[str, Any], max_context_tokens: int | None) -> int:
    """Tokens of context, prompt and output together; bounded by `max_context_tokens`."""
    text_config = config.get("text_config")
    stated = None
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _CONTEXT_KEYS:
            value = source.get(key)
            if stated is None and isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
                stated = value
    length = stated or DEFAULT_CONTEXT_LENGTH
    return min(length, max_context_tokens) if max_context_tokens else length


def describe(error: BaseException) -> str:
    """One line about a foreign exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _check_model_file(directory: Path, model_file: object, trust_remote_code: bool) -> None:
    if not trust_remote_code:
        raise LoadError(
            "remote_code_refused",
            f"config.json in {directory} wants to run its own code (model_file {model_file!r}); "
            "load it with trust_remote_code=True only if you have read and trust that code",
        )
    if not isinstance(model_file, str) or not (directory / model_file).is_file():
        raise _malformed(directory, f"'model_file' is {model_file!r}; expected a Python file of the checkpoint")


def _malformed(directory: Path, what: str) -> LoadError:
    return LoadError("malformed_config", f"config.json in {directory}: {what}")


def _instead(directory: Path) -> str:
    """What lies there instead, to help who gave the wrong directory."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return ""
    if any(name.endswith(".gguf") for name in names):
        return " It holds GGUF files, which must be converted first."
    return f" It holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}." if names else " It is empty."


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
