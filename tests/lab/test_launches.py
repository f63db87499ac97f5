"""What a launch asks of its operands' addresses, told before anything is launched."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tilewave.compiler import choose_arch, compile_source
from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.lab import measure
from tilewave.lab.launches import check_addresses, launch_of
from tilewave.lab.registry import Rung, get_rung, load_rungs

SPEC = get_spec("GB10")
RUNGS = pytest.mark.parametrize("rung", load_rungs(), ids=lambda rung: rung.name)
SUITS, RAGGED = (256, 256, 64), (257, 257, 63)


def reads_wide(rung: Rung) -> bool:
    return any("multiples of 16 bytes" in constraint for constraint in rung.constraints)


@RUNGS
@pytest.mark.parametrize("shape", [SUITS, RAGGED], ids=["suits", "ragged"])
@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_addresses_off_by_floats(rung: Rung, shape: tuple[int, int, int], name: str) -> None:
    """What the registry states is what is checked, for the kernel that runs at these sizes."""
    planned = launch_of(rung, *shape, SPEC)
    for offset in (0, 4, 8, 12, 16):
        addresses = {"A": 4096, "B": 8192, "C": 12288}
        addresses[name] += offset
        if reads_wide(rung) and shape == SUITS and name != "C" and offset % 16:
            told = rf"^{name} starts at address .*, {offset} bytes past a multiple of 16: rung {rung.title}"
            with pytest.raises(UsageError, match=told) as error:
                check_addresses(rung, planned, **addresses)
            assert planned.entry in str(error.value)
        else:
            check_addresses(rung, planned, **addresses)


@RUNGS
@pytest.mark.parametrize("offset", [1, 2, 6, 13])
def test_addresses_within_a_float(rung: Rung, offset: int) -> None:
    for shape in (SUITS, RAGGED):
        with pytest.raises(UsageError, match=r"^C starts at .* past a multiple of 4: "):
            check_addresses(rung, launch_of(rung, *shape, SPEC), A=0, B=0, C=256 + offset)


def test_both_tiles_of_a_selector_are_told_apart() -> None:
    """Rung 23 takes its small tile at 1024 and its large one at 4096; each has a kernel of wide loads."""
    rung = get_rung(23)
    entries = set()
    for size in (1024, 4096, 1025, 4097):
        planned = launch_of(rung, size, size, size, SPEC)
        entries.add(planned.entry)
        if size % 4:
            check_addresses(rung, planned, A=4, B=4, C=4)
            continue
        with pytest.raises(UsageError, match=re.escape(f"(its kernel here is {planned.entry})")):
            check_addresses(rung, planned, A=0, B=4, C=0)
    assert len(entries) >= 3


def test_a_launch_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    rung, spec = get_rung(7), get_spec("H200")
    program = compile_source(rung.source(), rung.entries, choose_arch(spec.compute_capability).arch)
    kernel = program.kernels[rung.entry]
    monkeypatch.setattr(measure, "Module", lambda *_: pytest.fail("a module was loaded"))
    a, b, c = (SimpleNamespace(shape=(64, 64), address=address) for address in (256, 512 + 4, 1024))
    with pytest.raises(UsageError, match="B starts at address 0x204, 4 bytes past a multiple of 16"):
        measure.prepare(measure.Candidate(rung, program, kernel, spec), None, None, a, b, c)  # type: ignore[arg-type]
