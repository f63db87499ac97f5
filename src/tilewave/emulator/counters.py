"""What a run counted, in the hardware profiler's terms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from tilewave.emulator.ptx import Instruction

CLASSES = (
    "fma",
    "tensor",
    "fp32",
    "integer",
    "shared_load",
    "shared_store",
    "global_load",
    "global_store",
    "local",
    "copy",
    "atomic",
    "barrier",
    "branch",
    "other",
)
"""Instruction classes of `Counters.warp_instructions_by_class`."""

_ARITHMETIC = """
    add sub mul mad min max abs neg div rem and or xor not shl shr shf bfe bfi prmt lop3 popc clz brev
    sqrt rcp rsqrt ex2 lg2 sin cos tanh
"""
_INTEGER_OR_FP32 = frozenset(_ARITHMETIC.split())


def classify(instruction: Instruction) -> str:
    """The class of a PTX instruction."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in ("ld", "ldu", "st"):
        if "local" in modifiers:
            return "local"
        direction = "store" if opcode == "st" else "load"
        if any(modifier.startswith("shared") for modifier in modifiers):
            return f"shared_{direction}"
        return f"global_{direction}" if not {"param", "const"} & set(modifiers) else "other"
    if opcode == "fma":
        return "fma" if modifiers[-1] == "f32" else "other"
    if opcode == "mma" or (opcode == "wgmma" and "mma_async" in modifiers):
        return "tensor"
    if opcode == "cp":
        return "copy"
    if opcode in ("atom", "red"):
        return "atomic"
    if opcode in ("bar", "barrier"):
        return "barrier"
    if opcode in ("bra", "ret", "exit"):
        return "branch"
    if opcode in _INTEGER_OR_FP32:
        if "f64" in modifiers or "pred" in modifiers:
            return "other"
        return "fp32" if "f32" in modifiers else "integer"
    return "other"


@dataclass
class Counters:
    """Counts of one launch: of warp-level PTX instructions, unless a name says thread.

    An instruction that no lane of a warp reaches is not counted for that warp; one that a predicate turns off
    is. `shared_*` counts are of accesses as ptxas makes them (contiguous scalar ones merged); `*_as_written`
    are those of the PTX. A *pass* is what Nsight Compute calls a wavefront, a *conflict* a pass beyond the
    one that each group of lanes needs, a *sector* 32 bytes.
    """

    warp_instructions: int = 0
    warp_instructions_by_opcode: Counter[str] = field(default_factory=Counter)
    warp_instructions_by_class: Counter[str] = field(default_factory=Counter)
    thread_fma: int = 0
    shared_loads: int = 0
    shared_loads_as_written: int = 0
    shared_load_passes: int = 0
    shared_load_conflicts: int = 0
    shared_loads_by_width: Counter[int] = field(default_factory=Counter)
    shared_stores: int = 0
    shared_stores_as_written: int = 0
    shared_store_passes: int = 0
    shared_store_conflicts: int = 0
    shared_stores_by_width: Counter[int] = field(default_factory=Counter)
    global_loads: int = 0
    global_load_sectors: int = 0
    global_loads_by_width: Counter[int] = field(default_factory=Counter)
    global_stores: int = 0
    global_store_sectors: int = 0
    global_stores_by_width: Counter[int] = field(default_factory=Counter)
    local_loads: int = 0
    local_load_sectors: int = 0
    local_stores: int = 0
    local_store_sectors: int = 0
    copies: int = 0
    copy_sectors: int = 0
    copy_passes: int = 0
    copy_conflicts: int = 0
    copy_hit_passes: int = 0
    copy_hit_conflicts: int = 0
    copies_by_width: Counter[int] = field(default_factory=Counter)
    atomics: int = 0
    barriers: int = 0

    def __add__(self, other: Counters) -> Counters:
        """Counts of both runs together."""
        result = Counters()
        for item in fields(self):
            setattr(result, item.name, getattr(self, item.name) + getattr(other, item.name))
        return result

    def scaled(self, factor: float) -> Counters:
        """All counts times a factor, rounded to integers."""
        result = Counters()
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Counter):
                setattr(result, item.name, Counter({key: round(n * factor) for key, n in value.items()}))
            else:
                setattr(result, item.name, round(value * factor))
        return result

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the keys of nested counts become strings."""
        plain: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Counter):
                value = {str(key): count for key, count in sorted(value.items())}
            plain[item.name] = value
        return plain

    @property
    def passes_per_shared_load(self) -> float:
        """Mean passes of a shared load; 0 without loads."""
        return self.shared_load_passes / self.shared_loads if self.shared_loads else 0.0
