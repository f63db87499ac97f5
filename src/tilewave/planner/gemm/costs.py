"""The constants of the product's estimate, and what a calibration of a GPU model puts in their place.

Without a calibration the constants are theory: shares of what the GPU's record states, taken from what was
measured elsewhere, or assumed. Each one says which. A calibration is a packaged JSON file per GPU model,
``planner/gemm/calibration/NAME.json``::

    {"device": "H200", "source": "how it was measured", "new_loops": false, "notes": {"INSTANCE": "why"},
     "constants": {"launch": {"value": 2.1, "source": "..."}},
     "factors": {"INSTANCE": 1.07}, "tile_factors": {"INSTANCE": 0.9}}

A factor multiplies the time that the model gives an instance's arithmetic, a tile factor what it gives
each tile beside that: two numbers a kernel, for the one shows at deep products and the other at shallow ones.
``new_loops`` says whether the kernels were measured with the loops of the register-file pass. ``notes`` say
where factors come from of instances that the source did not measure; the planner does not read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources as package_files
from typing import Any

from tilewave.device.catalog import find_spec
from tilewave.errors import UsageError
from tilewave.kernels.instances import Instance
from tilewave.planner.cost import Basis, Constant

_SMALL_STUDY = "a measured study of small and skinny products on an H200"
_STRICT_STUDY = "a measured study of FP32 kernels on an H200"


@dataclass(frozen=True)
class GemmCosts:
    """The constants of `estimate.py`, and two factors per calibrated instance.

    ``launch``: until the first block computes, and from the last one to the end. ``bandwidth``: share of
    the record's memory bandwidth that a kernel draws. ``sm_bytes``: what one SM draws through L2. ``fma``:
    share of the clocks that ptxas's use of the register banks leaves to the multiply-adds. ``few_warps``:
    what a slice takes beside its multiply-adds, however many blocks share the SM, in terms of the
    multiply-adds of so many warps a sub-partition. ``narrow_copies``: what a copy by 4 bytes takes beside
    what any copy does, in terms of a multiply-add.
    ``round``: clocks from a block's start to its first multiply-add, exposed whenever resident blocks are
    followed by others. ``tile``: clocks of an SM for a tile, whatever its size; ``outputs``: for 32 outputs
    of the tile, in C or not; ``stores``: for 32 outputs in C, ``narrow_stores`` times as much where they
    cannot go by 16 bytes. ``combining`` and ``partials``: a workspace costs the one once, and its bytes,
    written and read, go at the other share of the bandwidth. ``overlap``: of arithmetic and traffic, the
    share of the shorter that shows beside the longer. ``walk`` multiplies the work of blocks that walk across
    tiles. ``l2``: share of L2 in which operands stay. ``new_loop`` multiplies the arithmetic of a kernel
    whose loop the register-file pass emits anew, unless the factors are of such kernels (``new_loops``).
    """

    launch: Constant
    bandwidth: Constant
    sm_bytes: Constant
    fma: Constant
    few_warps: Constant
    narrow_copies: Constant
    round: Constant
    tile: Constant
    outputs: Constant
    stores: Constant
    narrow_stores: Constant
    combining: Constant
    partials: Constant
    overlap: Constant
    walk: Constant
    l2: Constant
    new_loop: Constant
    factors: Mapping[str, float] = field(default_factory=dict)
    tile_factors: Mapping[str, float] = field(default_factory=dict)
    calibration: str | None = None
    new_loops: bool = False

    def constants(self) -> dict[str, Constant]:
        """Every constant by name."""
        return {name: getattr(self, name) for name in _NAMES}

    def factor(self, instance: Instance) -> float:
        """What an instance's arithmetic takes, in terms of the model's; 1 where nobody measured."""
        return self.factors.get(instance.name, 1.0)

    def new_loop_factor(self) -> float:
        """What the arithmetic of a kernel with a new loop takes beside what ``factor`` says."""
        return 1.0 if self.new_loops else self.new_loop.value

    def tile_factor(self, instance: Instance) -> float:
        """The same for what a tile takes beside its arithmetic."""
        return self.tile_factors.get(instance.name, 1.0)


_NAMES = tuple(
    entry.name
    for entry in fields(GemmCosts)
    if entry.name not in ("factors", "tile_factors", "calibration", "new_loops")
)
THEORY = GemmCosts(
    launch=Constant(2.35, "us", Basis.REPORTED, _SMALL_STUDY),
    bandwidth=Constant(
        4.0 / 4.8, "of the record's bandwidth", Basis.DERIVED, f"4 TB/s of 4.8: {_SMALL_STUDY}"
    ),
    sm_bytes=Constant(32, "bytes a clock", Basis.ASSUMED, "half of an L1 fill of 64 bytes a clock"),
    fma=Constant(
        0.829, "of the clocks", Basis.REPORTED, f"128x256 kernel as ptxas leaves it: {_STRICT_STUDY}"
    ),
    few_warps=Constant(0.14, "warps a sub-partition", Basis.REPORTED, _SMALL_STUDY),
    narrow_copies=Constant(1.0, "multiply-adds", Basis.ASSUMED, "an issue slot for the address"),
    round=Constant(1000, "clocks", Basis.ASSUMED, "about the latency of global memory"),
    tile=Constant(200, "clocks", Basis.ASSUMED, "its coordinates and addresses, a few barriers"),
    outputs=Constant(2, "clocks for 32", Basis.ASSUMED, "through shared memory, and back"),
    stores=Constant(1, "clocks for 32", Basis.ASSUMED, "a store's pass through L1"),
    narrow_stores=Constant(4, "times as long", Basis.ASSUMED, "four stores in place of one"),
    combining=Constant(1.4, "us", Basis.REPORTED, _SMALL_STUDY),
    partials=Constant(
        3.0 / 4.8, "of the record's bandwidth", Basis.DERIVED, f"3 TB/s of 4.8: {_SMALL_STUDY}"
    ),
    overlap=Constant(0.25, "of the shorter of two", Basis.REPORTED, _SMALL_STUDY),
    walk=Constant(
        1.2, "times the work", Basis.ASSUMED, "between 1.40 on a GB10 (the article) and about 1.03 on an H200"
    ),
    l2=Constant(0.5, "of L2", Basis.ASSUMED, "the other half holds C and what streams through"),
    new_loop=Constant(
        0.9,
        "times as long",
        Basis.DERIVED,
        "the median of 66 comparisons on an H200, benchmarks/results/reemitted_h200.json",
    ),
)


@dataclass(frozen=True)
class Calibration:
    """What was measured on one GPU model: constants by name, a factor by instance, and how."""

    device: str
    source: str
    constants: Mapping[str, Constant]
    factors: Mapping[str, float]
    tile_factors: Mapping[str, float] = field(default_factory=dict)
    new_loops: bool = False

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Read a calibration file. Raises ``UsageError`` for a constant that the model does not have, a value
        that is not positive, or a missing entry."""
        record: dict[str, Any] = json.loads(text)
        try:
            device, source = str(record["device"]), str(record["source"])
            values = record.get("constants", {})
            constants = {
                name: (float(entry["value"]), str(entry["source"])) for name, entry in values.items()
            }
            factors, tile_factors = (
                {str(name): float(value) for name, value in record.get(part, {}).items()}
                for part in ("factors", "tile_factors")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"a calibration without a usable {error}") from error
        if unknown := sorted(set(constants) - set(_NAMES)):
            raise UsageError(f"a calibration of unknown constants {unknown}; known: {', '.join(_NAMES)}")
        values_of = {name: value for name, (value, _) in constants.items()}
        for numbers in (values_of, factors, tile_factors):
            if wrong := {name: value for name, value in numbers.items() if not 0 < value < float("inf")}:
                raise UsageError(f"a calibration needs positive numbers, not {wrong}")
        return cls(
            device,
            source,
            {
                name: Constant(value, getattr(THEORY, name).unit, Basis.REPORTED, origin)
                for name, (value, origin) in constants.items()
            },
            factors,
            tile_factors,
            bool(record.get("new_loops", False)),
        )

    def applied(self, costs: GemmCosts = THEORY) -> GemmCosts:
        """The constants with this calibration's in their place."""
        changes: dict[str, Any] = dict(self.constants)
        return replace(
            costs,
            factors=dict(self.factors),
            tile_factors=dict(self.tile_factors),
            calibration=self.source,
            new_loops=self.new_loops,
            **changes,
        )


@cache
def costs_for(device: str) -> GemmCosts:
    """The constants for a GPU model: its packaged calibration's, else theory's."""
    known = find_spec(device)  # a driver's name of a GPU may have more words than ours
    folder = package_files.files("tilewave.planner.gemm").joinpath("calibration")
    file = folder.joinpath(f"{(known.name if known else device).replace(' ', '_')}.json")
    if not file.is_file():
        return THEORY
    return Calibration.from_json(file.read_text(encoding="utf-8")).applied()
