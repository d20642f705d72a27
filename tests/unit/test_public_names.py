"""The package's face: every public name is there, typed checkers and running programs see the same ones."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

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


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        runtime.nonsense  # noqa: B018
