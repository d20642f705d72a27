"""docs/protocol.md is the authority: here it is held against the code, message by message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from runtime.protocol import channel, frames
from runtime.protocol.commands import PROTOCOL_VERSION, ChatPrompt, DraftRow, PrefillRow, Sampling, VerifyRow
from runtime.protocol.events import (
    Capabilities,
    DraftedRow,
    FinishReason,
    LoadFailure,
    ModelFacts,
    Phase,
    RefusalCode,
    StepRow,
    VerifiedRow,
    WorkerReport,
)
from tests.unit.protocol.strategies import COMMAND_TYPES, EVENT_TYPES

DOCUMENT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)` · \w+\n(.*?)(?=^##|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL))
ROWS = {
    "prefill": PrefillRow,
    "draft": DraftRow,
    "verify": VerifyRow,
    "step": StepRow,
    "drafted": DraftedRow,
    "verified": VerifiedRow,
}
MESSAGES = {kind.__struct_config__.tag: kind for kind in (*COMMAND_TYPES, *EVENT_TYPES)}


def fields_in(text: str) -> list[str]:
    return re.findall(r"^\| (\w+) \|(?! type)", text, re.MULTILINE)


def test_every_message_has_its_section_and_no_section_is_without_one() -> None:
    assert list(SECTIONS) == list(MESSAGES)


@pytest.mark.parametrize("tag", list(MESSAGES))
def test_the_fields_stand_in_their_order(tag: str) -> None:
    kind: Any = MESSAGES[tag]
    nested: Any = ROWS.get(tag)
    expected = [*kind.__struct_fields__, *(nested.__struct_fields__ if nested else ())]
    assert fields_in(SECTIONS[tag]) == expected


@pytest.mark.parametrize("tag", list(MESSAGES))
def test_what_a_duplicate_does_is_written_down(tag: str) -> None:
    assert "*Twice" in SECTIONS[tag]


@pytest.mark.parametrize(
    ("kind", "tag"),
    [(Sampling, "prefill"), (ModelFacts, "ready"), (Capabilities, "ready"), (WorkerReport, "inspected"), (ChatPrompt, "prepare")],
)
def test_the_values_inside_messages_are_listed(kind: Any, tag: str) -> None:
    places = [SECTIONS[tag].find(name) for name in kind.__struct_fields__]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(("words", "tag"), [(LoadFailure, "failed"), (RefusalCode, "refused"), (Phase, "beat")])
def test_the_words_of_a_code_are_listed(words: Any, tag: str) -> None:
    (line,) = re.findall(r"^\| (?:reason|code|phase) \| text \|(.*)\|$", SECTIONS[tag], re.MULTILINE)
    assert tuple(re.findall(r'"(\w+)"', line)) == get_args(words)


def test_version_and_limits_are_those_of_the_code() -> None:
    assert DOCUMENT.startswith(f"# The protocol between host and worker\n\nVersion {PROTOCOL_VERSION}.")
    assert f"| message frame | {frames.MAX_MESSAGE_BYTES >> 20} MiB |" in DOCUMENT
    assert f"| one buffer frame | {frames.MAX_BUFFER_BYTES >> 20} MiB |" in DOCUMENT
    assert f"| all frames of a message | {frames.MAX_TOTAL_BYTES >> 20} MiB |" in DOCUMENT
    assert f"| number of frames | {frames.MAX_FRAMES:,} |" in DOCUMENT
    assert f"| transport | {channel.MAX_TRANSPORT_BYTES >> 30} GiB for one frame |" in DOCUMENT
    assert f"up to {frames.MAX_INLINE_IDS} of them" in DOCUMENT
    assert f"extension type {frames.TOKEN_BUFFER_CODE} " in DOCUMENT
    assert f"1 to {channel.MAX_KEY_BYTES} bytes" in DOCUMENT
    assert f"at most {channel.MAX_SOCKET_PATH_BYTES} bytes" in DOCUMENT
    assert f"queues {channel.COMMAND_SEND_MARK:,} commands" in DOCUMENT
    assert f"queues {channel.EVENT_SEND_MARK:,} events" in DOCUMENT
    assert f"received events is {channel.EVENT_RECEIVE_MARK:,}" in DOCUMENT
    assert f"every {channel.RECONNECT_MILLISECONDS} ms" in DOCUMENT


def test_every_kind_of_frame_error_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \| ", DOCUMENT, re.MULTILINE)
    assert tuple(explained) == get_args(frames.FrameErrorKind)


def test_the_finish_reasons_are_listed() -> None:
    words = ", ".join(f'"{word}"' for word in get_args(FinishReason))
    assert f"| finish | {words} or nil = nil |" in DOCUMENT
