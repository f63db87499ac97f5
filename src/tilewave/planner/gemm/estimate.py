"""The estimate: what the busiest SM does, what memory moves, what launching and combining add.

The article's count is the core: the slices of the busiest SM under a schedule. A slice costs its
multiply-adds, over the FP32 lanes and the share of issue slots and shared-memory passes that they get. Blocks
that share the SM overlap in these, but each waits for latencies slice by slice, so the longest chain of
slices costs too; and so does every tile, for its start, its sums and its stores. Beside all this stand the
bytes that memory and the busiest SM must move; of the two the longer counts, and a share of the shorter. A
launch and, where tiles are cut, the workspace come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewave.device.spec import DeviceSpec
from tilewave.kernels.instances import Access, Instance
from tilewave.planner.combining import added_pieces, most_pieces, moved_pieces
from tilewave.planner.gemm.costs import GemmCosts
from tilewave.planner.gemm.records import FLOAT_BYTES, GemmEstimate
from tilewave.planner.gemm.resources import residency
from tilewave.planner.schedules import Decomposition, Schedule, ScheduleKind
from tilewave.problem import GemmProblem, MatrixLayout

LEAST_SLICES = 2
"""Assumed: a piece of fewer slices than this is not worth cutting, because it fills no pipeline."""

_WALKER_TILES = 0.5
"""Tiles that a walker touches beside those that its run fills: it begins and ends within one."""

_WALK_COMBINING = 1.5
"""Fixed costs of combining in a walk, in terms of other schedules': fitted to an H200's readings. A walker
may leave two pieces, one after the other."""

_SECOND_ROUND = 1.2
"""What adding in two rounds takes beside its pieces, for each block that an SM gets, in terms of other fixed
costs of combining: from an H200's readings of 132 to 1024 pieces, benchmarks/results/streams_ab_h200.json."""

_WALK_SIZE = 64
"""Assumed: a walk reads again from memory what tiles side by side would share in L2. The constant is that
of square tiles of this size; larger ones read less for a multiply-add."""

_SECTOR = 8  # floats of a 32-byte sector, the least that memory moves


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a problem must move, in bytes: each operand once, whole sectors where elements lie apart.

    ``wide``: outputs may be stored by 16 bytes.
    """

    a: int
    b: int
    outputs: int
    wide: bool = True

    @classmethod
    def of(cls, problem: GemmProblem) -> Traffic:
        """The traffic of a problem; operands that are never read count nothing."""
        m, n, k = problem.m, problem.n, problem.k
        a = _bytes(problem.a, m, k, problem.batch) if problem.product else 0
        b = _bytes(problem.b, k, n, problem.batch) if problem.product else 0
        outputs = _bytes(problem.out, m, n, problem.batch)
        for layout in (problem.c, problem.bias, problem.preactivation):
            if layout is not None:
                outputs += _bytes(layout, m, n, problem.batch)
        out = problem.out
        wide = out.column == 1 and out.alignment >= 16 and not any(s % 4 for s in (n, out.row, *out.batch))
        return cls(a, b, outputs, wide)

    @property
    def total(self) -> int:
        """Everything, once."""
        return self.a + self.b + self.outputs


def _bytes(layout: MatrixLayout, rows: int, columns: int, batch: tuple[int, ...]) -> int:
    """Distinct elements' bytes: axes of stride 0 repeat elements, strides leave parts of sectors unused."""
    count = FLOAT_BYTES
    least = _SECTOR
    for extent, stride in (
        (rows, layout.row),
        (columns, layout.column),
        *zip(batch, layout.batch, strict=True),
    ):
        if stride == 0 or extent == 1:
            continue
        count *= extent
        least = min(least, abs(stride))
    return count * least


def fma_share(instance: Instance, costs: GemmCosts) -> float:
    """The share of its SM's FP32 rate that an instance's loop reaches with enough warps.

    Per k step a warp issues tm x tn multiply-adds, its fragments' shared loads (a float4 each where operands
    have an access width, else a float each), and its part of the copies. Shared memory serves a pass a clock
    to four sub-partitions: a float4 of A takes two, one of B four, as measured on an H200 for 16-byte loads.
    """
    adds = instance.tm * instance.tn
    if instance.a is None or instance.b is None:
        loads = instance.tm + instance.tn
        passes = loads
    else:
        a_loads, b_loads = -(-instance.tm // 4), -(-instance.tn // 4)
        loads = a_loads + b_loads
        passes = 2 * a_loads + 4 * b_loads
    threads = max(1, instance.threads // instance.k_groups)
    copies = _copies(instance.a, instance.bm, threads) + _copies(instance.b, instance.bn, threads)
    issue = adds / (adds + loads + copies)
    return costs.fma.value * min(issue, adds / (4 * passes))


def _copies(access: Access | None, extent: int, threads: int) -> float:
    """Copies of an operand that a thread issues per k step."""
    width = FLOAT_BYTES if access is None else access.width
    return extent * FLOAT_BYTES / width / threads


@dataclass(frozen=True, slots=True)
class Rates:
    """The constants on one GPU, in microseconds and bytes a microsecond, for ``sms`` of its SMs."""

    sms: int
    launch: float
    overlap: float
    walk: float
    combining: float
    memory: float
    partials: float
    sm: float
    kept_in_l2: float

    @classmethod
    def of(cls, spec: DeviceSpec, costs: GemmCosts, sms: int) -> Rates:
        """The rates of a GPU of which ``sms`` SMs are used."""
        sm = spec.clock_mhz * costs.sm_bytes.value
        bandwidth = spec.bandwidth_gb_s * 1e3
        if not bandwidth > 0:  # a driver may not tell (NaN): half of what all SMs draw through L2
            bandwidth = spec.sms * sm / 2
        return cls(
            sms=sms,
            launch=costs.launch.value,
            overlap=costs.overlap.value,
            walk=costs.walk.value,
            combining=costs.combining.value,
            # A part of the GPU draws no more than its SMs can.
            memory=min(bandwidth * costs.bandwidth.value, sms * sm),
            partials=bandwidth * costs.partials.value,
            sm=sm,
            kept_in_l2=spec.l2_bytes * costs.l2.value,
        )


@dataclass(frozen=True, slots=True)
class InstanceModel:
    """An instance on a GPU: whether it runs, and what it costs; times in microseconds.

    ``element`` is an SM's time per multiply-add with warps enough, ``warps`` what a block adds to a
    sub-partition, ``waiting`` the warps whose multiply-adds take as long as a slice's latencies, ``resident``
    the blocks that an SM holds, ``round`` what a block's start takes. A tile takes ``tile``, and ``stores``
    for each output in C, or ``narrow_stores``.
    """

    instance: Instance
    refusal: str | None
    resident: int
    element: float
    warps: float
    waiting: float
    round: float
    tile: float
    stores: float
    narrow_stores: float
    warp_size: int
    sub_partitions: int

    @classmethod
    def of(
        cls, instance: Instance, spec: DeviceSpec, costs: GemmCosts, *, new_loop: bool = False
    ) -> InstanceModel:
        """The model of an instance on a GPU; ``new_loop``: the register-file pass emits its loop anew."""
        resident, refusal = residency(instance, spec)
        rate = spec.fp32_lanes_per_sm * spec.clock_mhz * fma_share(instance, costs)
        new = costs.new_loop_factor() if new_loop else 1.0
        threads = max(1, instance.threads // instance.k_groups)
        narrow = sum(
            extent
            for access, extent in ((instance.a, instance.bm), (instance.b, instance.bn))
            if access is not None and access.width == FLOAT_BYTES
        )
        narrow_share = costs.narrow_copies.value * narrow / threads / (instance.tm * instance.tn)
        rows_of_32 = instance.bm * instance.bn * instance.items / 32
        # Groups leave their sums in shared memory, which moves 32 floats a clock, and read the others'.
        groups = 2 * instance.k_groups if instance.k_groups > 1 else 0
        factor = costs.tile_factor(instance) / spec.clock_mhz
        stores = costs.stores.value / 32 * factor
        return cls(
            instance,
            refusal,
            resident,
            (1 + narrow_share) * costs.factor(instance) * new / rate,
            instance.threads / spec.warp_size / spec.sub_partitions,
            costs.few_warps.value,
            costs.round.value / spec.clock_mhz,
            (costs.tile.value + (costs.outputs.value + groups) * rows_of_32) * factor,
            stores,
            costs.narrow_stores.value * stores,
            spec.warp_size,
            spec.sub_partitions,
        )


class Weigher:
    """Estimates schedules of one problem for one instance on one GPU."""

    __slots__ = (
        "_busy",
        "_memory",
        "_out_bytes",
        "_rates",
        "_slice",
        "_slice_bytes",
        "_tile",
        "_tile_bytes",
        "_waits",
        "_walk",
        "band",
        "depth",
        "model",
        "slices",
        "tiles",
        "tiles_m",
        "tiles_n",
    )

    def __init__(self, model: InstanceModel, problem: GemmProblem, traffic: Traffic, rates: Rates) -> None:
        instance = model.instance
        self.model = model
        self._rates = rates
        m, n, batches = problem.m, problem.n, problem.batches
        bm, bn, all_items = instance.bm, instance.bn, instance.items
        self.tiles_m, self.tiles_n = -(-m // bm), -(-n // bn)
        self.tiles = self.tiles_m * self.tiles_n * -(-batches // all_items)
        k = problem.k if problem.product else 0
        self.depth = instance.bk
        self.slices = max(1, -(-k // instance.bk))

        # A block that computes less than its tile still runs whole warps of whole thread tiles.
        items, rows, columns = min(all_items, batches), min(bm, m), min(bn, n)
        warps = model.warps
        if instance.cuttable:
            outputs, deep = bm * bn * all_items, self.slices * instance.bk
        else:
            threads = items * -(-rows // instance.tm) * -(-columns // instance.tn)
            busy_warps = -(-min(threads, instance.threads) // model.warp_size)
            outputs, deep = busy_warps * model.warp_size * instance.tm * instance.tn, k
            warps = busy_warps / model.sub_partitions
        self._slice = outputs * deep * model.element / self.slices if problem.product else 0.0
        # Of the chain's slices, and of every slice at least: as many chains as the SM holds blocks.
        self._waits = self._slice * model.waiting / warps
        self._busy = self._slice + self._waits / model.resident
        self._tile = model.tile + items * rows * columns * (
            model.stores if traffic.wide else model.narrow_stores
        )

        # Bytes of a slice and of a tile's outputs, through L2.
        per_item_a = items if any(problem.a.batch) else 1
        per_item_b = items if any(problem.b.batch) else 1
        self._slice_bytes = FLOAT_BYTES * k * (rows * per_item_a + columns * per_item_b) / self.slices
        self._out_bytes = traffic.outputs / max(1, self.tiles)
        self._tile_bytes = FLOAT_BYTES * bm * bn * all_items
        self._walk = 1 + (rates.walk - 1) * min(1.0, _WALK_SIZE / 2 * (1 / bm + 1 / bn))

        self.band = self._band(problem, rates.sms * max(1, model.resident))
        self._memory = (traffic.total + self._read_again(problem, traffic)) / rates.memory

    def _band(self, problem: GemmProblem, resident: int) -> int:
        """Tile rows of a band, so that what runs together covers a patch that is close to square."""
        if not problem.product or self.tiles_m == 1 or self.tiles_n == 1:
            return 1
        instance = self.model.instance
        wave = min(resident, self.tiles_m * self.tiles_n)
        return min(self.tiles_m, max(1, round(math.sqrt(wave * instance.bn / instance.bm))))

    def _read_again(self, problem: GemmProblem, traffic: Traffic) -> float:
        """Bytes of B that are read once more for every further band of tile rows, where L2 does not keep
        them."""
        if not problem.product or self.tiles_m <= self.band:
            return 0.0
        items = max(1, problem.batches)
        band_share = self.band / self.tiles_m
        if (traffic.b + traffic.a * band_share) / items <= self._rates.kept_in_l2:
            return 0.0
        return (-(-self.tiles_m // self.band) - 1) * float(traffic.b)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's sums."""
        return self._tile_bytes

    @property
    def memory(self) -> float:
        """Microseconds that memory takes for the operands and the output."""
        return self._memory

    @property
    def through_l2(self) -> float:
        """Microseconds in which an SM draws a tile's operands and outputs through L2."""
        return (self.slices * self._slice_bytes + self._out_bytes) / self._rates.sm

    def on_a_full_sm(self, pieces: int = 1) -> float:
        """What a tile adds to the time of an SM that holds as many blocks as it can."""
        return self.slices * self._busy + pieces * self._tile

    def alone(self, pieces: int = 1) -> float:
        """What a tile, or a piece of one, takes where no other block shares the SM."""
        return -(-self.slices // pieces) * (self._slice + self._waits) + self._tile

    def least(self) -> float:
        """What no schedule can beat: all work spread evenly, with all warps, and memory's time."""
        rates = self._rates
        busy = self.slices * self._busy * min(1.0, rates.walk)
        compute = self.tiles * (busy + self._tile) / rates.sms
        return rates.launch + self._together(compute, self._memory)

    def least_of(self, schedule: Schedule) -> float:
        """What a schedule cannot beat, quicker to find than its estimate."""
        rates, tiles, pieces = self._rates, self.tiles, schedule.pieces
        if schedule.kind is ScheduleKind.DATA_PARALLEL:
            compute = -(-tiles // rates.sms) * (self.slices * self._busy + self._tile)
            return rates.launch + self._together(compute, self._memory)
        if schedule.kind is not ScheduleKind.SPLIT_K or pieces > self.slices // LEAST_SLICES:
            return 0.0  # K is too short for the pieces, so fewer are cut
        rounds = -(-tiles * pieces // rates.sms)
        compute = rounds * ((self.slices // pieces) * self._busy + self._tile)
        everyone = 2 * tiles * pieces * self._tile_bytes / rates.partials
        alone = self.model.instance.alone
        busiest_sm = (rounds + added_pieces(pieces, tiles, rates.sms, alone)) * self._tile_bytes / rates.sm
        combining = rates.combining + (everyone if everyone > busiest_sm else busiest_sm)
        if pieces > alone:
            combining += _SECOND_ROUND * rounds * rates.combining
        return rates.launch + self._together(compute, self._memory) + combining

    def _together(self, compute: float, memory: float) -> float:
        """Arithmetic beside traffic: the longer, and a share of the shorter."""
        if compute > memory:
            return compute + self._rates.overlap * memory
        return memory + self._rates.overlap * compute

    def key(self, cut: Decomposition) -> tuple[float, float]:
        """Predicted microseconds, and those of the arithmetic, which tell apart what memory makes equal."""
        return self._parts(cut)[:2]

    def estimate(self, cut: Decomposition) -> GemmEstimate:
        """The prediction with its parts."""
        return GemmEstimate(*self._parts(cut))

    def _parts(self, cut: Decomposition) -> tuple[float, float, float, float, float]:
        rates, resident = self._rates, self.model.resident
        sms, cut_slices, walkers = rates.sms, cut.slices, cut.walkers
        busiest = cut.busiest_slices(sms) * self.slices // cut_slices
        on_sm = -(-cut.blocks // sms)
        rounds: float = -(-on_sm // resident)
        tiles: float = on_sm
        chain = busiest * rounds / on_sm
        work = busiest * self._slice
        if walkers:
            tiles = -(-cut.tiles // sms)
            walking = -(-walkers // sms)
            if cut_slices > 1:
                tiles = busiest / self.slices + _WALKER_TILES * walking
                walked = busiest - cut.whole_tiles // sms * self.slices
                work += walked * self._slice * (self._walk - 1)
            chain = busiest / min(walking, resident)
            rounds = tiles / min(walking, resident)
        elif cut.pieces > 1 and cut.whole_tiles:
            # Once the pieces beside it are done, a whole tile has the SM to itself and hides nothing.
            chain = max(self.slices, busiest / min(on_sm, resident))
        compute = work + chain * self._waits + tiles * self._tile
        if rounds > 1:
            compute += (rounds - 1) * self.model.round
        tiles_on_sm = -(-cut.tiles // sms)
        through_l2 = (busiest * self._slice_bytes + tiles_on_sm * self._out_bytes) / rates.sm
        memory = max(self._memory, through_l2)
        combining = 0.0
        if cut_slices > 1 and (slots := cut.slots):
            moved = moved_pieces(cut, sms, self.model.instance.alone)
            if walkers and self.model.instance.keeps_own:
                # A walker ends with the first piece of a tile, when the others have long been stored.
                slots, moved = slots // 2, moved - 2
            everyone = 2 * slots * self._tile_bytes / rates.partials
            busiest_sm = moved * self._tile_bytes / rates.sm
            fixed = _WALK_COMBINING if walkers else 1.0
            if most_pieces(cut) > self.model.instance.alone:
                fixed += _SECOND_ROUND * on_sm
            combining = rates.combining * fixed + max(everyone, busiest_sm)
        total = rates.launch + self._together(compute, memory) + combining
        return total, compute, memory, combining, rates.launch
