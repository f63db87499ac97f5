"""Why a rung is slower at N = 2049 than at 2048: its scalar loads, more tiles, or where these run.

Three things change at once from 2048 to 2049: rows no longer start on 16 bytes, so that the kernel for ragged
sizes runs, which loads float by float; a tile's row and column are added, so that some SM gets more tiles;
and the tiles left over after the first round are dealt to SMs as these become free. `CASES` change them one
at a time. `placement` reads which SM each block ran on, and when, from kernels that note it in C.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.device import DeviceSpec
from tilewave.lab import emulate
from tilewave.lab.launches import Shape
from tilewave.lab.probe_edits import Edit, EditedRung, edited
from tilewave.lab.records import Counted
from tilewave.lab.registry import Needs, Rung, get_rung

RUNGS = tuple(range(7, 18))
"""The rungs with a kernel for wide loads and one for ragged sizes, and a block a tile."""

FORCED = 100
"""Added to the number of a rung that is made to run its ragged kernel where the wide one would fit."""


@dataclass(frozen=True)
class Case:
    """A product, which kernels run at it, and what it changes against the first."""

    key: str
    shape: Shape
    forced: bool
    changes: str


CASES = (
    Case("wide", (2048, 2048, 2048), False, "nothing: wide loads, 256 tiles of 128 x 128"),
    Case("scalar", (2048, 2048, 2048), True, "scalar loads alone"),
    Case("odd rows", (2047, 2047, 2047), False, "scalar loads, and rows that start anywhere"),
    Case("more tiles", (2176, 2176, 2048), False, "289 tiles instead of 256, all full; wide loads"),
    Case("both", (2049, 2049, 2049), False, "scalar loads, odd rows and 289 tiles"),
)

_NEVER = Needs(1 << 30, 1 << 30)
_STAMP_BEGIN = Edit(
    "the block notes when it begins",
    "  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;\n",
    "  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;\n"
    "  unsigned long long begun;\n"
    '  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun) :: "memory");\n',
)
_STAMP_END = Edit(
    "the block writes its SM, its begin and its end over its first three elements of C",
    "        if (col < N) C[(size_t)row * N + col] = sum[i][j];\n      }\n  }\n",
    "        if (col < N) C[(size_t)row * N + col] = sum[i][j];\n      }\n  }\n"
    "  __syncthreads();\n"
    "  unsigned sm;\n"
    "  unsigned long long ended;\n"
    '  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));\n'
    '  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ended) :: "memory");\n'
    "  if (tid == 0) {  // 24 bits of nanoseconds, which a float holds exactly: 16.8 ms\n"
    "    float* note = C + (size_t)row0 * N + col0;\n"
    "    note[0] = sm, note[1] = begun & 0xffffff, note[2] = ended & 0xffffff;\n"
    "  }\n",
)
_WRAP = 1 << 24

PLACED = {"wide": (2176, 2176, 2048), "ragged": (2175, 2175, 2047)}
"""289 tiles of 128 x 128 (153 of the large ones) in 128 slices of 16, by each kernel of a rung."""


def forced(rung: Rung) -> Rung:
    """The rung with its ragged kernel at every size, under a number and a name of its own."""
    assert rung.ragged_entry is not None
    return replace(rung, number=rung.number + FORCED, name=f"{rung.name}_forced", needs=_NEVER)


def stamped(number: int) -> EditedRung:
    """A rung whose blocks note where and when they ran, in place of some of their results."""
    return edited(number, _STAMP_BEGIN, _STAMP_END, product=False)


def contenders(case: Case) -> list[Rung]:
    """The rungs of a case."""
    rungs = [get_rung(number) for number in RUNGS]
    return [forced(rung) for rung in rungs] if case.forced else rungs


def counts(number: int, case: Case, spec: DeviceSpec, arch: str) -> dict[str, Any]:
    """What the emulator counts of a rung in a case, and how its kernel was compiled.

    Sizes are those of M = N = K; a case of another shape has no counters.
    """
    rung = get_rung(number)
    rung = forced(rung) if case.forced else rung
    (m, _, _) = case.shape
    program, kernel, build = emulate.build(rung, spec, arch, m)
    return {"build": asdict(build), "counted": asdict(emulate.count(rung, program, kernel, m, spec))}


COUNTERS = tuple(
    item.name for item in fields(Counted) if item.name not in ("blocks_run", "blocks_total", "thread_fma")
)


def per_64_fmas(counted: Mapping[str, int]) -> dict[str, float]:
    """Counters for every 64 multiply-adds of a warp: one step of K of an 8 x 8 patch, half one of 16 x 8."""
    units = counted["thread_fma"] / 32 / 64
    return {name: counted[name] / units for name in COUNTERS}


@dataclass(frozen=True)
class Placement:
    """Where the blocks of one launch ran.

    ``first`` blocks began before any had ended, ``late`` ones after that. ``late_alone`` of these had no
    other late block on their SM, ``late_shared`` had one or more. Times in microseconds: ``round_us`` is the
    median length of the first blocks, ``alone_us`` and ``shared_us`` those of the late ones, ``total_us``
    from the first begin to the last end. None where there is no such block.
    """

    sms: int
    first: int
    late: int
    late_alone: int
    late_shared: int
    round_us: float
    alone_us: float | None
    shared_us: float | None
    total_us: float


def placement(c: NDArray[np.float32], bm: int, bn: int) -> Placement:
    """Read what the blocks of a `stamped` rung, with tiles of ``bm`` x ``bn``, noted in their result."""
    sm = c[::bm, ::bn].astype(np.int64).ravel()
    begun, ended = (c[::bm, place::bn].astype(np.int64).ravel() for place in (1, 2))
    if not len(sm) == len(begun) == len(ended):
        raise ValueError(f"{c.shape} leaves a tile of {bm} x {bn} without room for a block's notes")
    # Clocks count modulo 2^24 ns; everything happens within less than half of that.
    origin = begun[0]
    begun, ended = (((times - origin + _WRAP // 2) % _WRAP) - _WRAP // 2 for times in (begun, ended))
    late = begun >= ended.min()
    on_sm = Counter(sm[late].tolist())
    shared = np.array(
        [bool(is_late) and on_sm[int(where)] > 1 for is_late, where in zip(late, sm, strict=True)]
    )
    alone = late & ~shared
    lengths = (ended - begun) / 1000.0

    def median(which: NDArray[np.bool_]) -> float | None:
        return float(statistics.median(lengths[which].tolist())) if which.any() else None

    length = median(~late)
    assert length is not None  # the block that began first was not late
    return Placement(
        len(set(sm.tolist())),
        int((~late).sum()),
        int(late.sum()),
        int(alone.sum()),
        int(shared.sum()),
        length,
        median(alone),
        median(shared),
        float(ended.max() - begun.min()) / 1000.0,
    )


def slowdown(times: Mapping[str, Mapping[str, Any]], case: str, rung: int) -> float:
    """How many times as long as in the first case a rung takes, for equal work: by the rates' medians."""
    number = str(rung + FORCED if case == "scalar" else rung)
    return float(times["wide"][str(rung)]["speed"]["tflops"] / times[case][number]["speed"]["tflops"])


def wrong_rungs(times: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """Cases and rungs whose product was wrong."""
    return [
        f"{case} {number}"
        for case, rungs in times.items()
        for number, measured in rungs.items()
        if measured["check"]["error_in_bounds"] > measured["check"]["allowed"]
    ]
