"""Every kernel instance on a GPU: the emulator's bits, nothing else written, the same when launched again."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.products_on_gpu import PlacedOnGpu
from tests.kernels.products import LAYOUTS, Product, make_product, plan_of
from tests.kernels.products import run as run_in_emulator

from tilewave.kernels.instances import Contiguous, Instance
from tilewave.kernels.ship import every_instance
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, Schedule, split_k, stream_k
from tilewave.problem import Activation
from tilewave.runtime.driver import Device, Stream

pytestmark = pytest.mark.gpu

SMS = 5
ATTEMPTS = 400


def family_of(instance: Instance):  # type: ignore[no-untyped-def]
    from tilewave.kernels.families import FAMILIES

    return next(family for family in FAMILIES if family.name == instance.family)


def draw(rng: np.random.Generator, instance: Instance, *, cut: bool) -> Product:
    """A product of a random shape and layout that the instance takes, a little larger than its tile."""
    family = family_of(instance)

    def extent(tile: int) -> int:
        if instance.family == "large_tile":  # they take nothing smaller
            return tile + int(rng.integers(0, tile // 2))
        return int(rng.integers(1, tile + 9)) if rng.random() < 0.5 else int(rng.integers(1, tile + 1))

    for attempt in range(ATTEMPTS):
        wide = attempt % 2 == 0  # sizes and rows that wide vectors need
        m, n = extent(instance.bm), extent(instance.bn)
        k = int(rng.integers(1, 4 * instance.bk + 2)) if cut else int(rng.integers(1, 3 * instance.bk + 2))
        if instance.family == "elementwise":
            k = 0
        if wide:
            m, n, k = (-(-size // 4) * 4 for size in (m, n, k))
        batch = (
            ()
            if instance.items == 1 and rng.random() < 0.6
            else (int(rng.integers(2, 4 if instance.items == 1 else 40)),)
        )
        layouts = tuple(
            _layout(rng, access.contiguous if access else None, along, wide)
            for access, along in ((instance.a, Contiguous.K), (instance.b, Contiguous.OTHER))
        )
        product = make_product(
            rng,
            m,
            n,
            k,
            batch,
            layouts=(*layouts, str(rng.choice(["rows", "padded", "wide", "strided", "columns"]))),
            alpha=float(rng.choice([1.0, -0.75])),
            beta=float(rng.choice([0.0, 0.5])),
            bias=rng.choice([None, "row", "column"]),
            activation=Activation(int(rng.choice([Activation.NONE, Activation.RELU]))),
            preactivation=bool(rng.random() < 0.3),
            misalignment=0 if wide else int(rng.integers(0, 4)),
        )
        if family.refuses(instance, product.problem) is None:
            return product
    pytest.fail(f"no product for {instance} was found in {ATTEMPTS} draws")


def _layout(rng: np.random.Generator, contiguous: Contiguous | None, rows: Contiguous, wide: bool) -> str:
    if contiguous is None:
        return str(rng.choice(LAYOUTS))
    if not wide:
        return str(rng.choice(["padded", "rows"] if contiguous is rows else ["padded columns", "columns"]))
    return "wide" if contiguous is rows else "wide columns"


def schedules(instance: Instance, rng: np.random.Generator) -> list[Schedule]:
    if not instance.cuttable:
        return [DATA_PARALLEL]
    cut = [split_k(int(rng.integers(2, 6))), stream_k(int(rng.integers(2, 5))), STREAM_K_WALK]
    return [DATA_PARALLEL, cut[int(rng.integers(len(cut)))]]


@pytest.mark.parametrize("instance", every_instance(), ids=str)
def test_bits_are_the_emulators(
    instance: Instance, device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    for schedule in schedules(instance, rng):
        product = draw(rng, instance, cut=schedule is not DATA_PARALLEL)
        waves = schedule is STREAM_K_WALK and bool(rng.integers(2))
        plan = plan_of(instance, product.problem, schedule, SMS, whole_waves=waves)
        placed = PlacedOnGpu(product, device)
        placed.launch(plan, stream.handle)
        stream.synchronize()
        first = placed.fetch()
        placed.launch(plan, stream.handle)
        stream.synchronize()
        second = placed.fetch()
        run_in_emulator(product, instance, schedule, sms=SMS, whole_waves=waves)
        for name, result in first.items():
            assert same_bits(result, second[name]), f"{instance} {schedule}: other bits when launched again"
            assert same_bits(result, product.operands[name]), (
                f"{instance} {schedule} at {product.problem}: {name} differs from the emulator's"
            )


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Bits equal; a NaN equals every other NaN."""
    both = np.isnan(x) & np.isnan(y)
    return bool(
        ((np.ascontiguousarray(x).view(np.uint32) == np.ascontiguousarray(y).view(np.uint32)) | both).all()
    )


def test_every_instance_has_a_name_of_its_own() -> None:
    names = [instance.name for instance in every_instance()]
    assert len(names) == len(set(names))
