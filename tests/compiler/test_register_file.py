"""The model of the register file against sequences of multiply-adds that were timed on an H200."""

from __future__ import annotations

import pytest

from tilewave.compiler.sass.register_file import score
from tilewave.emulator.sass import Instruction
from tilewave.lab.register_file import SEQUENCES, STEPS

PLAIN = {sequence.name: sequence for sequence in SEQUENCES if not sequence.of_load}


def cycles(code: list[Instruction]) -> float:
    return score(code).cycles_per_multiply_add


@pytest.mark.parametrize("name", PLAIN)
def test_measured_sequences(name: str) -> None:
    sequence = PLAIN[name]
    assert cycles(sequence.make()) == pytest.approx(sequence.h200, abs=0.15 if sequence.loose else 0.02)


def test_order_of_the_measured_sequences() -> None:
    """Wherever the measurement clearly tells two sequences apart, the model puts them in the same order."""
    found = [(sequence.h200, cycles(sequence.make())) for sequence in PLAIN.values()]
    compared = 0
    for first in found:
        for second in found:
            if first[0] < second[0] - 0.15:
                assert first[1] < second[1], (first, second)
                compared += 1
    assert compared > 40


def test_other_instructions_take_a_slot() -> None:
    """The two-row pattern with a load in every 21 instructions (measured: 1.081 cycles a slot, 1 here)."""
    (sequence,) = (sequence for sequence in SEQUENCES if sequence.of_load)
    found = score(sequence.make())
    assert (found.multiply_adds, found.others) == (STEPS - STEPS // 21, STEPS // 21)
    assert found.cycles == pytest.approx(STEPS, rel=0.01)
    assert found.bound == pytest.approx(20 / 21, rel=0.001)
    assert f"{STEPS - STEPS // 21} FFMA and {STEPS // 21} others" in str(found)


def test_nothing_to_score() -> None:
    found = score([])
    assert (found.cycles, found.utilisation, found.cycles_per_multiply_add) == (0, 0.0, 0.0)
