"""Counts the memory accesses of running lanes: passes, conflicts, sectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.codegen import Access, Group
from tilewave.emulator.counters import Counters
from tilewave.emulator.passes import PatternMemo, local_sectors

if TYPE_CHECKING:
    from tilewave.emulator.lanes import Lanes
    from tilewave.emulator.trace import Trace

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


class Tally:
    """Adds up memory accesses in `counters`, and tells them to a `trace` if there is one."""

    def __init__(self, counters: Counters, memo: PatternMemo, trace: Trace | None = None) -> None:
        self.counters = counters
        self.memo = memo
        self.trace = trace

    def shared(
        self, table: Array, active: Mask | None, warps: int, store: bool, width: int, count: int
    ) -> None:
        """`count` shared accesses that differ by a multiple of 4 bytes only."""
        c = self.counters
        passes, conflicts = self.memo.shared_passes(table, active, width, "store" if store else "load")
        if store:
            c.shared_stores += warps * count
            c.shared_stores_by_width[width] += warps * count
            c.shared_store_passes += passes * count
            c.shared_store_conflicts += conflicts * count
        else:
            c.shared_loads += warps * count
            c.shared_loads_by_width[width] += warps * count
            c.shared_load_passes += passes * count
            c.shared_load_conflicts += conflicts * count

    def shared_group(self, lanes: Lanes, group: Group, addresses: Array) -> None:
        """All accesses of a group, whose base addresses are given."""
        table, active = lanes.by_warp(addresses, None)
        if self.trace is not None:
            self.trace.group(group, table, active)
        for (store, width), count in group.counted.items():
            self.shared(table, active, lanes.warps, store, width, count)
        stores = group.stores
        self.counters.shared_stores_as_written += lanes.warps * stores
        self.counters.shared_loads_as_written += lanes.warps * (len(group.accesses) - stores)

    def access(self, lanes: Lanes, access: Access, space: str, addresses: Array, mask: Mask | None) -> None:
        """One access of any space."""
        c = self.counters
        opcode = access.instruction.opcode
        if opcode in ("atom", "red"):
            c.atomics += lanes.warps
            return
        if space == "shared":
            if access.store:
                c.shared_stores_as_written += lanes.warps
            else:
                c.shared_loads_as_written += lanes.warps
        if self.trace is not None:
            self.trace.access(access, space, *lanes.by_warp(addresses, mask))
        width = access.counted_width
        if not width:
            return
        table, active = lanes.by_warp(addresses, mask)
        if access.counted_offset:
            table = table + access.counted_offset
        if space == "shared":
            self.shared(table, active, lanes.warps, access.store, width, 1)
        elif space == "local":
            sectors = int(local_sectors(table, active, width).sum())
            if access.store:
                c.local_stores += lanes.warps
                c.local_store_sectors += sectors
            else:
                c.local_loads += lanes.warps
                c.local_load_sectors += sectors
        elif space == "global":
            sectors = self.memo.global_sectors(table, active, width)
            if access.store:
                c.global_stores += lanes.warps
                c.global_store_sectors += sectors
                c.global_stores_by_width[width] += lanes.warps
            else:
                c.global_loads += lanes.warps
                c.global_load_sectors += sectors
                c.global_loads_by_width[width] += lanes.warps

    def copy(
        self,
        lanes: Lanes,
        access: Access,
        target: Array,
        source: Array,
        given: Array | None,
        mask: Mask | None,
    ) -> None:
        """One `cp.async`: passes and sectors."""
        c = self.counters
        width = access.counted_width
        c.copies += lanes.warps
        c.copies_by_width[width] += lanes.warps
        targets, active = lanes.by_warp(target, mask)
        sources, _ = lanes.by_warp(source, mask)
        if self.trace is not None:
            self.trace.access(access, "copy", targets, active, sources)
        reads = None if given is None else lanes.by_warp(lanes.spread(given) > 0, None)[0]
        bypass = "cg" in access.instruction.modifiers
        sums = self.memo.copy_figures(targets, sources, active, width, bypass=bypass, reads=reads)
        c.copy_passes += sums.passes
        c.copy_conflicts += sums.conflicts
        c.copy_sectors += sums.sectors
        c.copy_hit_passes += sums.hit_passes
        c.copy_hit_conflicts += sums.hit_conflicts
