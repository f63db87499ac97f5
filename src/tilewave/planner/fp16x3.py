"""Plans for precision ``fp16x3``: tiles, blocks, and whether ``ieee`` is predicted to be faster.

The constants are fitted to this mode's kernels on an H200: main kernels before their epilogue was rewritten
(benchmarks/results/fp16x3_h200.json), packing after it became one launch (fp16x3_ab_h200.json there). The
kernels as they are now have not been timed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError
from tilewave.kernels import fp16x3
from tilewave.kernels.instances import Instance
from tilewave.planner.gemm.costs import costs_for
from tilewave.planner.gemm.estimate import Traffic
from tilewave.planner.gemm.options import WORKSPACE_LIMIT_BYTES, PlanOptions
from tilewave.planner.gemm.records import GemmEstimate, GemmPlan
from tilewave.planner.gemm.select import plan_gemm
from tilewave.planner.schedules import DATA_PARALLEL, Decomposition, Raster
from tilewave.problem import GemmProblem, Precision

COMPUTE_CAPABILITY = (9, 0)
"""The kernels are made of what only Hopper has."""

PRODUCTS = 3
"""Products of FP16 that make one of float32: low * high, high * low, high * high."""

FP16_TFLOPS_PER_SM = 5.5
"""FP16 TFLOP/s of an SM. Measured, hot, with `TILE_US` taken off: 5.62 at 8192^3, 5.51 at 4096^3, 5.65 at
2048 x 14336 x 4096, 5.3 at 10000 x 60000 x 784; 5.05 at 16384^3, where the clock falls further."""

CLOCK_MHZ = 1980
"""The clock of the H200's record: other records' rates are taken to scale with theirs."""

SHARES = {fp16x3.PAIRS.name: 1.0, fp16x3.LARGE.name: 0.988, fp16x3.SMALL.name: 0.8}
"""What each main kernel keeps of that. Study of another kernel of this design: without pairs, a product of
4096 took 1.2 % longer. The smaller tile reads a third more from L2 for a multiplication; 0.8 fits 1024^3 as
it was when its sums were promoted every 64 of K. Every 16 has not been timed: up to 15 % less is expected."""

FEW_TILES = 132
"""Outputs of at most so many tiles of 128 x 128 have fine sums, on whatever GPU: an H200 has as many SMs, and
a library that wants them all busy cuts K there, whose short chains are more exact than coarse sums are."""

ACCURATE_FROM_K = 1024
MOST_PIECES = 8
"""Where ``ieee`` runs in the mode's place, and K is as long, it is cut in twice the pieces that give each of
`FEW_TILES` SMs a tile of 128 x 128, up to so many: a library's chains are hardly shorter than that."""

PACKING_GB_S_SHARE = 0.70
"""Measured: the share of an H200's 4.8 TB/s at which operands of 4096 x 4096 and 8192 x 8192 were packed,
3.37 TB/s, without `PACKING_ROW_US`."""

PACKING_ROW_US = 4e-4
"""Measured: 535 us for a batch of 1024 x 256^3 whose bytes take 319, which is 0.4 ns for each packed row."""

TILE_US = 12.0
"""Measured: what a tile of 256 x 128 took beside its products, 11 to 17 us, with the epilogue of then. The
present one waits for less: 2 to 4 are expected."""

LAUNCH_US = 1.5
"""Measured at 1024^3: 1.2 us, the main kernel behind packing against both alone."""


_DEFAULT = PlanOptions()


def plan_fp16x3(problem: GemmProblem, spec: DeviceSpec, options: PlanOptions = _DEFAULT) -> GemmPlan:
    """The plan of a problem whose arithmetic is asked to be ``fp16x3``.

    Where the planner predicts that ``ieee`` is faster, or the mode does not apply (no product, more rows
    than an index holds), it is the plan of ``ieee``, whose notes say so; ``plan.instance.family`` tells.
    With ``batch_invariant`` speed does not decide, because it depends on m, and sums are fine for every size
    (`fine_only`), so that an element's bits depend on its operands alone. Raises ``UsageError`` on a GPU
    that is no Hopper, for K of 2^24 and more, and for options that contradict each other.
    """
    if spec.compute_capability != COMPUTE_CAPABILITY:
        capability = "{}.{}".format(*spec.compute_capability)
        raise UsageError(
            f"precision 'fp16x3' needs a GPU of compute capability 9.0 (Hopper); {spec.name} has "
            f"{capability}. Accepted there is 'ieee'"
        )
    if problem.k >= fp16x3.K_LIMIT:
        raise UsageError(f"K is {problem.k}; accepted by precision 'fp16x3' is less than 2^24")
    plain = _in_the_modes_place(replace(problem, precision=Precision.IEEE), spec, options)
    whole = plain.covers  # the tiles of ``ieee`` may leave edges to launches of their own
    reason = fp16x3.refusal(whole)
    if plain.blocks == 0:
        return plain
    if reason is None:
        found = _fastest(whole, spec, plain.sms, options.batch_invariant)
        if options.schedule is not None and options.wanted[0] is not DATA_PARALLEL.kind:
            reason = f"schedule {options.schedule!s} was asked for, and the mode's tiles are not cut"
        elif WORKSPACE_LIMIT_BYTES != options.workspace_limit < found.workspace_bytes:
            # The limit that nobody asked for is one of partial sums, and none of packed operands.
            reason = f"{found.workspace_bytes:,} bytes of workspace are needed"
        elif plain.estimate.total < found.estimate.total and not options.batch_invariant:
            reason = (
                f"'ieee' is predicted to be faster, {plain.estimate.total:.4g} us against "
                f"{found.estimate.total:.4g} us"
            )
        elif options.max_sms is not None:
            packing = "operands that are not packed ahead are packed before by as many blocks as that takes"
            return replace(found, notes=(*found.notes, f"max_sms {options.max_sms}: {packing}"))
        else:
            return found
    return replace(plain, notes=(*plain.notes, f"fp16x3 was asked for and ieee runs: {reason}"))


def fine_only(problem: GemmProblem, batch_invariant: bool) -> bool:
    """Whether a problem's sums are fine (`precision.fp16x3.FINE`) whichever kernel is the fastest."""
    tiles_m, tiles_n, _ = fp16x3.SMALL.tiles(problem)
    return batch_invariant or tiles_m * tiles_n * problem.batches <= FEW_TILES


def _in_the_modes_place(problem: GemmProblem, spec: DeviceSpec, options: PlanOptions) -> GemmPlan:
    """The fastest plan of ``ieee`` whose chains of sums are short enough, or the fastest if none is."""
    plain = plan_gemm(problem, spec, options)
    if options.schedule is not None or options.batch_invariant or plain.blocks == 0:
        return plain
    needed = least_pieces(plain.covers)
    if pieces_of(plain) >= needed:
        return plain
    short = []
    for pieces in (2, 4, MOST_PIECES):
        try:
            cut = plan_gemm(problem, spec, replace(options, schedule=f"split_k:{pieces}"))
        except UsageError:  # no workspace for it, say: the plan without remains
            continue
        if pieces_of(cut) >= needed:
            short.append(cut)
    return min(short, key=lambda plan: plan.estimate.total, default=plain)


def least_pieces(problem: GemmProblem) -> float:
    """In how many pieces ``ieee`` is to cut K where it runs in the mode's place."""
    if problem.k < ACCURATE_FROM_K or not fine_only(problem, False):
        return 1.0
    tiles_m, tiles_n, _ = fp16x3.SMALL.tiles(problem)
    return min(float(MOST_PIECES), 2 * FEW_TILES / (tiles_m * tiles_n * problem.batches))


def pieces_of(plan: GemmPlan) -> float:
    """How many chains of float32 sums each element of a plan of ``ieee`` is made of, on average over tiles
    that are cut; 1 or what a block's groups make of it where some are not."""
    cut = plan.cut
    if cut.whole_tiles:
        shared = 1.0
    else:
        shared = max(1.0, cut.walkers / cut.tiles) if cut.walkers else float(cut.pieces)
    return plan.instance.k_groups * shared


def plan_in_mode(problem: GemmProblem, spec: DeviceSpec) -> GemmPlan:
    """What `plan_fp16x3` would plan if ``ieee`` were slower: for comparing the two.

    Raises ``UsageError`` where the mode does not apply.
    """
    reason = fp16x3.refusal(problem)
    if reason is not None:
        raise UsageError(f"no plan of precision 'fp16x3': {reason}")
    return _fastest(problem, spec, spec.sms, False)


def _fastest(problem: GemmProblem, spec: DeviceSpec, sms: int, batch_invariant: bool) -> GemmPlan:
    """The plan on the main kernel that is predicted to be the fastest of those that are exact enough."""
    candidates = (fp16x3.SMALL,) if fine_only(problem, batch_invariant) else fp16x3.MAIN_INSTANCES
    return min(
        (
            plan_on(problem, instance, spec, sms)
            for instance in candidates
            if fp16x3.cluster_of(instance) <= sms
        ),
        key=lambda plan: plan.estimate.total,
    )


def plan_on(problem: GemmProblem, instance: Instance, spec: DeviceSpec, sms: int) -> GemmPlan:
    """The plan on one of the main kernels, on ``sms`` SMs, a block each, which walk through tiles."""
    tiles_m, tiles_n, _ = instance.tiles(problem)
    cluster = fp16x3.cluster_of(instance)
    clusters = tiles_m * -(-tiles_n // cluster) * problem.batches
    # What runs at once covers a patch that is close to square, so that it reads little from L2.
    band = min(tiles_m, max(1, round(math.sqrt(min(sms, tiles_m * tiles_n) * instance.bn / instance.bm))))
    return GemmPlan(
        problem=replace(problem, precision=Precision.FP16X3),
        device=spec.name,
        sms=sms,
        instance=instance,
        schedule=DATA_PARALLEL,
        # What the kernel walks over: the tiles of a cluster are one.
        cut=Decomposition(
            clusters, problem.k, max(1, problem.k), 0, 1, cluster * min(sms // cluster, clusters)
        ),
        raster=Raster(tiles_m, tiles_n, band),
        estimate=_estimate(problem, instance, spec, sms),
        considered=(),
        notes=(
            "precision fp16x3: operands are scaled and split in fp16 pairs, three products on tensor cores "
            f"are summed in float32 every {fp16x3.interval_of(instance)} of K, and elements beyond the "
            "mode's range are recomputed",
            "the prediction is fitted to earlier kernels of this mode: those of now have not been measured",
        ),
        mode_workspace=(fp16x3.workspace_bytes(problem), 0),
    )


def _estimate(problem: GemmProblem, instance: Instance, spec: DeviceSpec, sms: int) -> GemmEstimate:
    """Packing, then rounds of tiles on the busiest SM; nothing of the one hides behind the other."""
    a, b = fp16x3.operands_of(problem)
    cluster, share = fp16x3.cluster_of(instance), SHARES[instance.name]
    rate = FP16_TFLOPS_PER_SM * 1e6 * share * spec.clock_mhz / CLOCK_MHZ
    tile = 2 * PRODUCTS * instance.bm * instance.bn * a.intervals * fp16x3.INTERVAL / rate
    tiles_m, tiles_n, _ = instance.tiles(problem)
    rounds = -(-tiles_m * -(-tiles_n // cluster) * problem.batches // (sms // cluster))
    compute = rounds * (tile + TILE_US * instance.bm / fp16x3.LARGE.bm)
    moved = sum(one.packed_rows * (4 * one.k * one.readings + one.row_bytes) for one in (a, b))
    packing = moved / (spec.bandwidth_gb_s * 1e3 * PACKING_GB_S_SHARE)
    packing += PACKING_ROW_US * (a.packed_rows + b.packed_rows)
    memory = packing + Traffic.of(problem).outputs / (spec.bandwidth_gb_s * 1e3)
    launches = 2 + any(one.pack_blocks for one in (a, b))
    launch = costs_for(spec.name).launch.value + (launches - 1) * LAUNCH_US
    return GemmEstimate(launch + memory + compute, compute, memory, 0.0, launch)
