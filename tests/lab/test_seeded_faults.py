"""The emulator finds every planted fault that compute-sanitizer finds on a GPU (benchmarks/sanitizers.py)."""

from __future__ import annotations

import numpy as np
import pytest
from rung_helpers import GB10

from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Memory, launch
from tilewave.errors import BarrierError, EmulationError, MemoryFault, RaceError, UsageError
from tilewave.lab.faults import FAULTS, Edit, Fault
from tilewave.lab.registry import get_rung, load_rungs
from tilewave.lab.sanitizers import TOOLS

ERRORS = {error.__name__: error for error in (BarrierError, MemoryFault, RaceError)}
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))


def emulate(
    fault: Fault, source: Source, rng: np.random.Generator, *, detect_races: bool = True
) -> np.ndarray:
    """The product at the fault's shape, as the kernel of this source computes it."""
    rung = get_rung(fault.rung)
    program: Program = compile_source(source, rung.entries, GB10)
    m, n, k = fault.shape
    memory = Memory()
    a, b = (memory.put(rng.standard_normal(shape, np.float32)) for shape in ((m, k), (k, n)))
    c = memory.empty((m, n), np.float32)
    symbol = program.kernels[rung.entry_for(m, n, k)].symbol
    launch(
        program.ptx,
        symbol,
        rung.grid(m, n),
        rung.block,
        [a, b, c, m, n, k],
        memory,
        count=False,
        detect_races=detect_races,
    )
    return memory.get(c)


@every_fault
def test_the_emulator_finds_it(fault: Fault, rng: np.random.Generator) -> None:
    if fault.emulator == "NaN":
        assert np.isnan(emulate(fault, fault.source(), rng)).any()
        return
    # Warps that skip a barrier race too, which would be told first.
    races = fault.emulator == "RaceError"
    with pytest.raises(ERRORS[fault.emulator], match=r"PTX line \d+"):
        emulate(fault, fault.source(), rng, detect_races=races)


def test_a_copy_that_is_not_waited_for_leaves_nan(rng: np.random.Generator) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "a copy is not waited for")
    assert np.isnan(emulate(fault, fault.source(), rng, detect_races=False)).any()


@every_fault
def test_the_rung_without_it_is_clean(fault: Fault, rng: np.random.Generator) -> None:
    source = get_rung(fault.rung).source()
    assert source.text != fault.source().text
    assert np.isfinite(emulate(fault, source, rng)).all()


def test_every_tool_has_a_fault_to_find_and_every_error_is_one_of_ours() -> None:
    assert {fault.tool for fault in FAULTS} == set(TOOLS)
    assert {fault.emulator for fault in FAULTS} == {"NaN", *ERRORS}
    assert all(issubclass(error, EmulationError) for error in ERRORS.values())
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    known = {rung.number for rung in load_rungs()}
    assert {fault.rung for fault in FAULTS} <= known


def test_an_edit_that_does_not_apply_is_refused() -> None:
    assert Edit("a", "b", count=3, which=1).apply("a-a-a", "x.cu") == "a-b-a"
    assert Edit("a", "b", count=2).apply("a-a", "x.cu") == "b-b"
    for text in ("", "a-a"):
        with pytest.raises(UsageError, match=r"x\.cu has 'a' \d times, not 1"):
            Edit("a", "b").apply(text, "x.cu")
