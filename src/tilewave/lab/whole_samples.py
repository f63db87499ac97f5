"""Small ragged groups of products, and products in fp16x3: samples for the kernels that no family has.

Like those of `product_samples` they depend on their names and a seed alone. compute-sanitizer launches them
on a GPU (`launch_whole`), the emulator runs them (`emulate_whole`); both return the largest error in bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewave.device import DeviceSpec, get_spec
from tilewave.kernels import fp16x3
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import grouped
from tilewave.kernels.group_table import Operands
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.lab.product_samples import SMS, SampleProduct, draw_product
from tilewave.planner.fp16x3 import plan_on
from tilewave.planner.gemm.group import GroupPlan, GroupPlanner
from tilewave.planner.gemm.options import PlanOptions
from tilewave.planner.gemm.records import GemmPlan
from tilewave.problem import Precision

_PLANNED_FOR = "H200"
"""What samples are planned for: they have few blocks, and run on any GPU."""
_CUT = ", cut"
_FEW, _LONG_TABLE, _LONGEST_TABLE = 6, 40, 300
"""Products of a group whose table is in the argument, comes by the first writer, and by the second."""
_LAYOUTS = ("NN", "TT")
_SCANNED_K = 8300
"""More than a cluster can hold of columns: they are scanned and packed apart."""


@dataclass(frozen=True)
class WholeSample:
    """Products with the plan that computes them together: of a group, or of one in fp16x3."""

    name: str
    products: tuple[SampleProduct, ...]
    plan: GroupPlan | GemmPlan


def whole_names(spec: DeviceSpec) -> tuple[str, ...]:
    """All samples that a GPU can run."""
    tiles = [one.name for one in grouped.instances()]
    names = [*tiles, *(tile + _CUT for tile in tiles), *(one.name for one in grouped.TABLE_WRITERS)]
    if spec.compute_capability == (9, 0):
        names += [f"{one.name} {way}" for one in fp16x3.MAIN_INSTANCES for way in _LAYOUTS]
        names.append(fp16x3.SCAN.name)
    return tuple(names)


def make_whole(name: str, seed: int) -> WholeSample:
    """The sample of this name. Raises ``KeyError`` for a name that there is not."""
    rng = np.random.default_rng([seed, *name.encode()])
    spec = get_spec(_PLANNED_FOR)
    tiles = {one.name: one for one in grouped.instances()}
    lengths = (_LONG_TABLE, _LONGEST_TABLE)
    writers = {one.name: length for one, length in zip(grouped.TABLE_WRITERS, lengths, strict=True)}
    if name in writers:
        tiny = grouped.instances()[-1]
        products = [_grouped_product(rng, *_within(rng, 9), tiny) for _ in range(writers[name])]
        return _group(name, products, tiny, spec, "data_parallel")
    base = name.removesuffix(_CUT)
    if base in tiles:
        tile, cut = tiles[base], name != base
        deep = 5 * tile.bk + int(rng.integers(1, tile.bk))
        sizes = [(tile.bm + int(rng.integers(1, 20)), tile.bn + int(rng.integers(1, 20)), deep)]
        sizes += [_within(rng, 40) for _ in range(_FEW - 2)]
        products = [_grouped_product(rng, *size, tile) for size in sizes]
        products.append(draw_product(rng, 5, 9, 0, 1, None, None))
        return _group(name, products, tile, spec, "split_k:3" if cut else "data_parallel")
    return _mode(name, rng, spec)


def _within(rng: np.random.Generator, most: int) -> tuple[int, int, int]:
    m, n, k = (int(size) for size in rng.integers(1, most, 3))
    return m, n, k


def _grouped_product(rng: np.random.Generator, m: int, n: int, k: int, tile: Instance) -> SampleProduct:
    """Read one by one, or in vectors where the sizes are made whole ones."""
    a: Access | None = None
    b: Access | None = None
    if rng.integers(2):
        m, n, k = (-(-size // 4) * 4 for size in (m, n, k))
        kinds = (Contiguous.K, Contiguous.OTHER)
        a, b = (Access(kinds[int(rng.integers(2))], 16) for _ in range(2))
    return draw_product(rng, m, n, k, 1 + int(rng.integers(4) == 0), a, b)


def _group(
    name: str, products: Sequence[SampleProduct], tile: Instance, spec: DeviceSpec, schedule: str
) -> WholeSample:
    planner = GroupPlanner(spec, instances=(tile,))
    plan = planner.plan([one.problem for one in products], PlanOptions(schedule=schedule))
    return WholeSample(name, tuple(products), plan)


def _mode(name: str, rng: np.random.Generator, spec: DeviceSpec) -> WholeSample:
    main = {f"{one.name} {way}": (one, way) for one in fp16x3.MAIN_INSTANCES for way in _LAYOUTS}
    if name == fp16x3.SCAN.name:
        instance, layouts, (m, n, k) = fp16x3.SMALL, "TN", (21, 35, _SCANNED_K)
    else:
        instance, layouts = main[name]
        # Two tiles each way, the second ragged, and as many intervals of K.
        m, n = (extent + int(rng.integers(1, 40)) for extent in (instance.bm, instance.bn))
        k = fp16x3.INTERVAL + int(rng.integers(1, 90))
    a, b = (
        Access(Contiguous.K if along_k else Contiguous.OTHER, 4)
        for along_k in (layouts[0] == "N", layouts[1] == "T")
    )
    batches = 1 if k > 1000 else 1 + int(rng.integers(2))
    product = draw_product(rng, m, n, k, batches, a, b, Precision.FP16X3)
    return WholeSample(name, (product,), plan_on(product.problem, instance, spec, SMS + 1))


def launch_whole(device: Any, stream: Any, sample: WholeSample, *, poison: bool) -> float:
    """Run a sample on a GPU; every operand and the workspace are allocations of exactly their size.

    Without ``poison`` nothing that is to be written is filled beforehand. An infinite error stands for
    counters that are not 0 again.
    """
    from tilewave.runtime.driver import DeviceArray
    from tilewave.runtime.fp16x3 import launch_fp16x3
    from tilewave.runtime.group import launch_group, untouched_bytes

    def unwritten(shape: Sequence[int]) -> Any:
        array = DeviceArray.empty(device, shape)
        if poison:
            array.poison()
        return array

    arrays = [
        {
            name: unwritten(operand.storage.shape)
            if name in product.outputs
            else DeviceArray.from_numpy(device, operand.storage)
            for name, operand in product.operands.items()
        }
        for product in sample.products
    ]
    operands = [
        _operands(product, {name: one.address for name, one in placed.items()})
        for product, placed in zip(sample.products, arrays, strict=True)
    ]
    tickets = None
    if isinstance(sample.plan, GroupPlan):
        memory = unwritten((max(4, untouched_bytes(sample.plan) // 4),))
        tickets = DeviceArray.from_numpy(device, np.zeros(max(1, sample.plan.ticket_bytes // 4), np.uint32))
        launch_group(
            sample.plan,
            operands,
            device=device.ordinal,
            stream=stream.handle,
            tickets=tickets.address,
            memory=memory.address,
        )
    else:
        memory = unwritten((-(-sample.plan.workspace_bytes // 4),))
        (one,) = operands
        launch_fp16x3(
            sample.plan,
            one.pointers,
            one.alpha,
            one.beta,
            device=device.ordinal,
            stream=stream.handle,
            workspace=(memory.address, memory.nbytes),
        )
    stream.synchronize()
    if tickets is not None and tickets.to_numpy().any():
        return float("inf")
    return _worst(sample, lambda place, name: arrays[place][name].to_numpy())


def emulate_whole(sample: WholeSample, **options: Any) -> float:
    """Run a sample in the emulator; ``options`` are the emulator's."""
    from tilewave.emulator import Memory
    from tilewave.runtime.emulated import run_group_plan
    from tilewave.runtime.fp16x3_emulated import emulate_fp16x3

    if not isinstance(sample.plan, GroupPlan):
        (product,) = sample.products
        views = {name: operand.view for name, operand in product.operands.items()}
        emulate_fp16x3(sample.plan, views, alpha=product.alpha, beta=product.beta, count=False, **options)
        return product.error_in_bounds(views["out"], views.get("preactivation"))
    memory = Memory()
    buffers = [
        {name: memory.put(operand.storage, name=name) for name, operand in product.operands.items()}
        for product in sample.products
    ]
    operands = [
        _operands(product, {name: one.address for name, one in placed.items()})
        for product, placed in zip(sample.products, buffers, strict=True)
    ]
    run_group_plan(sample.plan, operands, memory, count=False, **options)
    return _worst(sample, lambda place, name: memory.get(buffers[place][name]))


def _operands(product: SampleProduct, addresses: dict[str, int]) -> Operands:
    """What a product has beside its problem, its operands' storage at these addresses."""
    firsts = {name: address + 4 * product.operands[name].offset for name, address in addresses.items()}
    return Operands(Pointers(**firsts), product.alpha, product.beta)


def _worst(sample: WholeSample, storage_of: Callable[[int, str], Any]) -> float:
    """The largest error of all products, once their outputs have been fetched."""
    worst = 0.0
    for place, product in enumerate(sample.products):
        found = {}
        for name in product.outputs:
            operand = product.operands[name]
            operand.storage[...] = storage_of(place, name)
            found[name] = operand.view
        worst = max(worst, product.error_in_bounds(found["out"], found.get("preactivation")))
    return worst
