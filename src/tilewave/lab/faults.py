"""Faults planted in rungs: the emulator and NVIDIA's compute-sanitizer must both find each of them.

A fault is an edit of a rung's source, of the kind that slips through: several of these kernels give the right
result most of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewave.compiler import Source
from tilewave.errors import UsageError
from tilewave.lab.registry import get_rung


@dataclass(frozen=True)
class Edit:
    """Replace the ``which``-th of ``count`` occurrences of ``old`` (from 0; all of them if None)."""

    old: str
    new: str
    count: int = 1
    which: int | None = None

    def apply(self, text: str, where: str) -> str:
        """The edited text; a text in which ``old`` does not occur ``count`` times is refused."""
        parts = text.split(self.old)
        if len(parts) != self.count + 1:
            raise UsageError(
                f"{where} has {self.old!r} {len(parts) - 1} times, not {self.count}: mend the edit"
            )
        joints = [self.new if self.which is None or i == self.which else self.old for i in range(self.count)]
        return parts[0] + "".join(joint + part for joint, part in zip(joints, parts[1:], strict=True))


@dataclass(frozen=True)
class Fault:
    """A fault in a rung, a size at which it shows, and what finds it.

    ``tool`` is the tool of compute-sanitizer and ``says`` a regular expression for its message. ``emulator``
    names the error that the emulator raises, or is ``"NaN"`` where the result holds values that nobody wrote.
    ``tool_is_blind`` marks what the tool said nothing of on a GPU, although the result was wrong there.
    """

    name: str
    rung: int
    edit: Edit
    shape: tuple[int, int, int]
    tool: str
    says: str
    emulator: str
    tool_is_blind: bool = False

    def source(self) -> Source:
        """The rung with the fault."""
        source = get_rung(self.rung).source()
        return Source.from_text(source.name, self.edit.apply(source.text, source.name), source.headers)


_RACE = r"Race reported between (Write|Read) access"

FAULTS = (
    Fault(
        "no barrier before the slices are read",
        5,
        Edit("    __syncthreads();\n", "", count=2, which=0),
        (131, 133, 67),
        "racecheck",
        _RACE,
        "RaceError",
    ),
    Fault(
        "no barrier after the slices were read",
        3,
        Edit("    __syncthreads();\n", "", count=2, which=1),
        (35, 37, 67),
        "racecheck",
        _RACE,
        "RaceError",
    ),
    Fault(
        "one row too many is stored",
        5,
        Edit("if (row < M)", "if (row <= M)"),
        (131, 133, 67),
        "memcheck",
        r"Invalid __global__ write of size \d+",
        "MemoryFault",
    ),
    Fault(
        "one row too many is loaded",
        3,
        Edit("k0 + ty < K &&", "k0 + ty <= K &&"),
        (35, 37, 67),
        "memcheck",
        r"Invalid __global__ read of size \d+",
        "MemoryFault",
    ),
    Fault(
        "a copy is not waited for",
        13,
        Edit("wait_copies<STAGES - 2>();", "wait_copies<STAGES - 1>();"),
        (131, 133, 67),
        "racecheck",
        _RACE,
        "RaceError",
    ),
    Fault(
        "C is read before it was written",
        1,
        Edit("N + col] = sum;", "N + col] += sum;"),
        (35, 37, 67),
        "initcheck",
        r"Uninitialized __global__ memory read of size \d+",
        "NaN",
    ),
    Fault(
        "a barrier that some warps do not reach",
        3,
        Edit("    __syncthreads();\n", "    if (row < M) __syncthreads();\n", count=2),
        (35, 37, 67),
        "synccheck",
        r"Barrier error detected\. Divergent thread\(s\) in (block|warp)",
        "BarrierError",
        tool_is_blind=True,  # compute-sanitizer 2025.3.1.0 on an H200
    ),
    Fault(
        "a barrier that some lanes do not reach",
        3,
        Edit("    __syncthreads();\n", "    if (col < N) __syncthreads();\n", count=2),
        (35, 37, 67),
        "synccheck",
        r"Barrier error detected\. Divergent thread\(s\) in (block|warp)",
        "BarrierError",
        tool_is_blind=True,  # compute-sanitizer 2025.3.1.0 on an H200
    ),
)
