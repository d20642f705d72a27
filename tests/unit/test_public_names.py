"""The package's face: every public name is there, typed checkers and running programs see the same ones."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import runtime
from runtime import errors


def test_every_public_name_can_be_had() -> None:
    for name in runtime.__all__:
        assert getattr(runtime, name) is not None
    assert set(runtime.__all__) <= set(dir(runtime))


def test_what_type_checkers_see_is_what_there_is() -> None:
    assert runtime.__file__ is not None
    tree = ast.parse(Path(runtime.__file__).read_text("utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(imported) == set(runtime.__all__) == set(runtime._HOME_OF)
    assert {name: f"runtime.{home}" for name, home in runtime._HOME_OF.items()} == imported


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.TroupeError)}
    assert defined <= set(runtime.__all__)


def test_what_an_app_is_given_has_public_types() -> None:
    """Else a typed app could not write the signature of a function that takes a part of it."""
    public = [value for value in map(runtime.__getattr__, runtime.__all__) if inspect.isclass(value)]
    hidden = {
        f"{owner.__name__}.{field}: {part.__name__}"
        for owner in public
        if dataclasses.is_dataclass(owner) or issubclass(owner, msgspec.Struct)
        for field, hint in typing.get_type_hints(owner).items()
        for part in _classes(hint)
        if part.__module__.startswith("runtime") and part not in public
    }
    assert hidden <= {"ModelSpec.fake: FakeScript"}  # of `runtime.testing`


def _classes(hint: object) -> Iterator[type]:
    if inspect.isclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        runtime.nonsense  # noqa: B018
