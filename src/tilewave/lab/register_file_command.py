"""How the probe of the register file is shown and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tilewave.device import DeviceSpec
from tilewave.errors import EmulationError
from tilewave.lab.register_file import MEASURED_ON, NAME, QUESTION, SequenceFindings, conclusion, examine
from tilewave.runtime.driver import Device


def run_register_file(spec: DeviceSpec, device: Device | None, console: Console) -> dict[str, Any]:
    """Run the probe, print it, and return what goes into the file of results."""
    console.print()
    console.print(f"{NAME}: {QUESTION}", style="bold", markup=False)
    try:
        findings = examine(spec, device)
    except EmulationError as error:
        console.print(f"Not run: {error}.", style="yellow", markup=False)
        return {"probe": NAME, "question": QUESTION, "sequences": [], "words": [f"not run: {error}"]}
    if device is None:
        console.print(f"Assembled for {spec.name} and run in the interpreter of machine code.", markup=False)
    words = conclusion(findings, spec)
    console.print(table_of(findings))
    for line in words:
        console.print(line, markup=False)
    sequences = [{**asdict(one), "holds": one.holds} for one in findings]
    return {"probe": NAME, "question": QUESTION, "sequences": sequences, "words": words}


def faulty(result: dict[str, Any] | None) -> bool:
    """Whether a kernel of the probe was not in order."""
    return result is not None and any(sequence["faults"] for sequence in result["sequences"])


def table_of(findings: Sequence[SequenceFindings]) -> Table:
    """A row for each sequence, in cycles an instruction of a warp scheduler."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("multiply-adds\n(cycles an instruction)")
    for heading in ("by the\nrules", f"on an\n{MEASURED_ON}", "measured\nhere"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in findings:
        here = "-" if one.measured is None else f"{one.measured:.3f}"
        note = "nothing is concluded from it" if one.loose else "off" if one.holds is False else ""
        table.add_row(one.name, f"{one.rule:.3f}", f"{one.h200:.3f}", here, note)
    return table
