"""Settings and specs: what passes the constructor can be sent to a worker; the rest is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runtime.config import ModelSpec, Settings, TenantSpec
from runtime.errors import InvalidRequest
from runtime.protocol.commands import Fault, Load
from runtime.protocol.frames import encode
from runtime.testing import fake_model

ODD: list[Any] = [-1, 10**5000, 1.5j, float("nan"), float("inf"), b"x", [], {}, object()]


@pytest.mark.parametrize("wrong", ODD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("made", "given"), [(Settings, {}), (ModelSpec, {"name": "m", "path": "p"}), (TenantSpec, {})])
def test_a_value_of_a_wrong_kind_is_refused_by_the_name_of_its_field(made: Any, given: dict[str, Any], wrong: Any) -> None:
    for field in made.__struct_fields__:
        with pytest.raises(InvalidRequest) as caught:
            made(**{**given, field: wrong})
        assert caught.value.option == field


@pytest.mark.parametrize("field", ["name", "path", "revision"])
@pytest.mark.parametrize("wrong", ["", " ", os.fsdecode(b"/models/\xff")])
def test_a_text_that_could_not_be_sent_is_refused_before_a_worker_is_started(field: str, wrong: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ModelSpec(**{"name": "m", "path": "p", field: wrong})  # type: ignore[arg-type]
    assert caught.value.option == field


def test_a_path_may_be_a_string_or_a_path_of_any_script_and_is_sent_as_it_stands() -> None:
    for path in ("模型/я", Path("模型/я")):
        encode(Load(name="m", path=str(ModelSpec("m", path).path)))


def test_code_of_a_checkpoint_is_trusted_by_true_alone() -> None:
    with pytest.raises(InvalidRequest, match="trust_remote_code"):
        ModelSpec("m", "p", trust_remote_code="false")  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [1e-300, 1e300, 0])
def test_a_weight_beyond_what_the_fair_queue_can_count_with_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequest, match="weight"):
        TenantSpec(weight=weight)


@pytest.mark.parametrize("device_lease", [None, "auto", 1, 64])
def test_a_device_lease_is_a_number_of_workers_or_left_to_the_system(device_lease: Any) -> None:
    assert Settings(device_lease=device_lease).device_lease == device_lease


@pytest.mark.parametrize("device_lease", [0, -1, 65, 1.0, True, "one"])
def test_no_other_device_lease_can_be_set(device_lease: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"device_lease: got .*'auto', None, or a whole number from 1 to 64"):
        Settings(device_lease=device_lease)


@pytest.mark.parametrize(
    ("script", "option", "words"),
    [
        ({"context_length": "long"}, "fake.context_length", "got 'long'"),
        ({"faults": (Fault("load", "kill"), Fault("decod", "kill"))}, "fake.faults[1].at", "'prefill', 'decode', 'release'"),  # type: ignore[arg-type]
        ({"faults": (Fault("decode", "kil"),)}, "fake.faults[0].action", "'exit', 'kill', 'sleep'"),  # type: ignore[arg-type]
        ({"faults": (Fault("decode", "kill", number="1"),)}, "fake.faults[0].number", "got '1'"),  # type: ignore[arg-type]
        ({"faults": Fault("decode", "kill")}, "fake.faults", "Expected `array`"),
        ({"faults": ("kill",)}, "fake.faults", "Expected `array`"),
    ],
)
def test_a_misspelt_script_is_refused_by_the_name_of_its_field(script: dict[str, Any], option: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fake_model(**script)
    assert caught.value.option == option
    assert words in str(caught.value)
