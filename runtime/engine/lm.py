"""The Engine on mlx and mlx-lm, from a `Load` to something that steps: checkpoint, tokenizer, proofs, engine.

The heavy imports are inside `load`: mlx-lm's own import changes this process's limit of open files, and fails where it cannot,
which has to be seen before and told as what it is.
"""

from __future__ import annotations

import resource
import time
from functools import partial
from importlib.metadata import version
from typing import Any

from runtime.engine.engine import Loaded, LoadError, Progress
from runtime.engine.limits import set_device_limits
from runtime.protocol.commands import Load
from runtime.protocol.events import ModelFacts

OPEN_FILES_NEEDED = 4096
"""What importing mlx-lm sets the hard limit of open files to; it fails when the limit is lower already."""


KERNEL_HINT = (
    " (on a CPU, MLX compiles kernels in the directory for temporary files: that needs a C++ compiler, and a TMPDIR that is not "
    "full and from which libraries may be loaded; 'troupe doctor' tells more)"
)


def load(load: Load, progress: Progress) -> Loaded:
    """Must run on the thread that will step. Progress stages: those of the checkpoint, "tokenizer", "selftest".

    :raises LoadError: for every fault of the checkpoint, and when this process may open too few files.
    """
    began = time.monotonic()
    check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    import mlx.core as mx

    from runtime.engine import blas
    from runtime.engine.checkpoint import load_checkpoint
    from runtime.engine.costs import StepCosts
    from runtime.engine.layers import kinds_of
    from runtime.engine.lm_engine import LmEngine
    from runtime.engine.selftest import NothingButNoise, prove
    from runtime.engine.tokenizer import load_tokenizer

    raise_soft_limit_of_open_files()
    blas.set_compute_threads(load.compute_threads)
    set_device_limits(mx, load.reserved_bytes)
    checkpoint = load_checkpoint(load, progress)
    progress("tokenizer", 0, 1)
    tokenizer = load_tokenizer(checkpoint.directory, trust_remote_code=load.trust_remote_code)
    progress("selftest", 0, 1)
    costs = StepCosts()
    try:
        kinds = kinds_of(checkpoint.model)
        num_ids = vocabulary_size(checkpoint.config, tokenizer.vocabulary_size)
        proof = prove(checkpoint.model, kinds, num_ids, costs, between=partial(progress, "selftest", 0, 1))
    except NothingButNoise as error:
        raise LoadError("corrupt_weights", f"the model in {checkpoint.directory} is of no use: {error}") from error
    except Exception as error:
        hint = KERNEL_HINT if any(word in str(error) for word in ("Failed to compile", "filesystem error")) else ""
        what = f"{type(error).__name__}: {error}"
        raise LoadError("error", f"the model in {checkpoint.directory} loads but cannot run a few tokens: {what}{hint}") from error
    progress("selftest", 1, 1)
    num_ids = min(num_ids, proof.logits_width)
    engine = LmEngine(
        checkpoint.model,
        kinds,
        proof.capabilities,
        vocabulary_size=num_ids,
        context_length=checkpoint.context_length,
        costs=costs,
        tap=proof.tap,
        layout=proof.layout,
    )
    facts = ModelFacts(
        kind="lm",
        model_type=checkpoint.model_type,
        fingerprint=checkpoint.fingerprint,
        vocabulary_digest=tokenizer.vocabulary_digest,
        vocabulary_size=num_ids,
        context_length=checkpoint.context_length,
        bytes_per_token=checkpoint.bytes_per_token,
        weights_bytes=checkpoint.weights_bytes,
        eos_ids=tuple(sorted(tokenizer.eos_ids)),
        chat_template="checkpoint" if tokenizer.has_chat_template else "fallback",
        chat_restrictions=(),
        capabilities=proof.capabilities,
        blas=blas.blas_name(),
        load_seconds=time.monotonic() - began,
    )
    return Loaded(engine, tokenizer, facts, numerics())


def numerics() -> str:
    """Of this process. Another version, device or matrix library may round otherwise."""
    import mlx.core as mx

    from runtime.engine import blas

    versions = "; ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    info = mx.device_info()
    where = " ".join(str(info[name]) for name in ("architecture", "device_name") if name in info)
    return f"{versions}; {mx.default_device()} {where}; {blas.blas_name()}"


def check_open_files(hard_limit: int) -> None:
    """:raises LoadError: mlx-lm cannot be imported under this hard limit (-1: none)."""
    if 0 <= hard_limit < OPEN_FILES_NEEDED:
        raise LoadError(
            "error",
            f"this process may open at most {hard_limit} files, but mlx-lm needs a hard limit of {OPEN_FILES_NEEDED}; "
            f"raise it before starting the app, for instance with 'ulimit -Hn {OPEN_FILES_NEEDED}'",
        )


def raise_soft_limit_of_open_files() -> None:
    """mlx-lm leaves the soft limit at half of what it leaves as the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def vocabulary_size(config: dict[str, Any], of_tokenizer: int) -> int:
    """Ids below this have an embedding. Some configs keep the number with the text model's own settings, a few nowhere."""
    for settings in (config, config.get("text_config")):
        size = settings.get("vocab_size") if isinstance(settings, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return of_tokenizer
