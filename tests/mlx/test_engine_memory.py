"""What rows cost in memory: nothing is copied that need not be, nothing is kept that nobody needs."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from runtime.engine.engine import Engine, RowStep
from runtime.protocol.commands import Sampling
from runtime.protocol.ids import SequenceId
from tests.support.crowd import load_engine
from tests.support.tiny import MakeTiny


def start(engine: Engine, lengths: list[int], first: int = 0) -> list[SequenceId]:
    sequences = [SequenceId(first + number) for number in range(len(lengths))]
    for sequence, length in zip(sequences, lengths, strict=True):
        context = [(sequence + index) % 256 for index in range(length)]
        engine.add(sequence, Sampling(), prompt_length=length, context=context, max_length=length + 100)
        engine.step([RowStep(sequence, context, 1)]).result()
    decode(engine, sequences)
    return sequences


def decode(engine: Engine, sequences: list[SequenceId]) -> None:
    engine.step([RowStep(sequence, None, 1) for sequence in sequences]).result()


def layers_of(engine: Any, sequence: SequenceId) -> list[Any]:
    layers: list[Any] = engine._rows[sequence].batch._attention
    return layers


@pytest.mark.parametrize("lengths", [[1400], [1400] * 4, [1400, 900, 1200, 20], [1400, 1400, 9]], ids=str)
def test_a_decode_step_writes_into_the_cache_without_copying_it(tiny: MakeTiny, lengths: list[int]) -> None:
    engine = load_engine(tiny("llama")).engine
    sequences = start(engine, lengths)
    smallest_copy = layers_of(engine, sequences[0])[0].keys.nbytes
    steps = [RowStep(sequence, None, 1) for sequence in sequences]
    pending = engine.step(steps)
    mx.reset_peak_memory()
    held = engine.active_bytes()
    for _ in range(6):
        following = engine.step(steps)
        pending.result()
        pending = following
    pending.result()
    assert engine.peak_bytes() - held < smallest_copy * 0.9


def test_the_memory_of_rows_that_are_gone_does_not_wait_for_a_garbage_collection(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama")).engine
    held = []
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            sequences = [SequenceId(10 * number + index) for index in range(4)]
            for sequence in sequences:
                context = [sequence] * 300
                engine.add(sequence, Sampling(), prompt_length=300, context=context, max_length=400)
            engine.step([RowStep(sequence, [sequence] * 300, 1) for sequence in sequences]).result()
            decode(engine, sequences)
            engine.release(sequences)
            held.append(engine.active_bytes())
    finally:
        gc.enable()
    assert held[2] == held[0]


def test_a_row_that_leaves_costs_no_copy_of_the_others(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama")).engine
    sequences = start(engine, [1400] * 6)
    keys = layers_of(engine, sequences[0])[0].keys
    row_bytes, all_bytes = keys.nbytes // keys.shape[0], keys.nbytes
    del keys
    mx.reset_peak_memory()
    held = engine.active_bytes()
    engine.release([sequences[1]])
    decode(engine, [sequence for sequence in sequences if sequence != sequences[1]])
    assert engine.peak_bytes() - held < min(6 * row_bytes, all_bytes * 0.9)


def test_memory_goes_back_when_the_long_row_leaves_and_all_of_it_with_the_last(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama")).engine
    long, *short = start(engine, [1800, 10, 20])
    full = engine.cache_bytes()
    engine.release([long])
    decode(engine, short)
    assert 0 < engine.cache_bytes() < full / 4
    before = engine.active_bytes()
    engine.release(short)
    assert engine.cache_bytes() == 0
    assert engine.active_bytes() < before


def test_sliding_layers_hold_a_window_and_a_bit_however_long_the_row(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("gemma3_text")).engine
    sequence = SequenceId(5)
    context = [index % 256 for index in range(1500)]
    engine.add(sequence, Sampling(), prompt_length=1500, context=context, max_length=1600)
    for begin in range(0, 1500, 100):
        engine.step([RowStep(sequence, context[begin : begin + 100], int(begin == 1400))]).result()
    decode(engine, [sequence])
    slots = {layer.family.window: layer.keys.shape[2] for layer in layers_of(engine, sequence)}
    assert slots[None] >= 1500
    assert slots[16] <= 512


def test_rows_that_come_and_go_for_long_leave_the_house_as_it_was(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("lfm2")).engine
    sizes = []
    for evening in range(6):
        sequences = start(engine, [30, 5, 60], first=10 * evening)
        sizes.append(engine.cache_bytes())
        engine.release(sequences)
    assert sizes[1:] == sizes[:-1]
    assert engine.cache_bytes() == 0


def test_what_a_step_promises_to_take_follows_what_steps_took(tiny: MakeTiny) -> None:
    engine = load_engine(tiny("llama")).engine
    (sequence,) = start(engine, [40])
    promised = engine.promised_seconds([RowStep(sequence, None, 1)])
    assert 0 < promised < 5
    assert engine.promised_seconds([RowStep(sequence, [1] * 500, 0)]) > engine.promised_seconds([RowStep(sequence, [1] * 5, 0)]) > 0
    assert engine.promised_seconds([]) == 0


def test_a_closed_engine_holds_nothing(tiny: MakeTiny) -> None:
    loaded = load_engine(tiny("llama"))
    start(loaded.engine, [300])
    loaded.engine.set_compute_threads(1)
    loaded.engine.close()
    assert loaded.engine.cache_bytes() == 0
