"""What the families for small, skinny and shallow products have in common: resources, and old GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from products import check, make_product, run

from tilewave.compiler import ARCHITECTURES, compile_source
from tilewave.kernels.build import source_of
from tilewave.kernels.families import column_stream, dot_stream, elementwise, small_k, tiny
from tilewave.planner.schedules import split_k

Generator = np.random.Generator

FAMILIES = (elementwise, tiny, dot_stream, column_stream, small_k)
MOST_SHARED_BYTES = 64 * 1024
"""What the smallest GPU, of sm_75, gives a block."""

by_architecture = pytest.mark.parametrize(
    "arch",
    [arch if arch == "sm_90" else pytest.param(arch, marks=pytest.mark.long) for arch in ARCHITECTURES],
)


@by_architecture
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_instance_compiles_with_hardly_a_spill(family: object, arch: str) -> None:
    instances = family.instances()  # type: ignore[attr-defined]
    kernels = {}
    for header in {instance.header for instance in instances}:
        entries = [instance.entry for instance in instances if instance.header == header]
        kernels.update(compile_source(source_of(header), entries, arch).kernels)
    for instance in instances:
        resources = kernels[instance.entry].resources
        spilled = resources.spill_store_bytes + resources.spill_load_bytes
        # Around K's loop, never in it; none where most of the tuning was done.
        most = 0 if arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a") else 128
        assert spilled <= most, f"{instance} spills {spilled} bytes on {arch}"
        assert resources.static_shared_bytes + instance.shared_bytes <= MOST_SHARED_BYTES


def test_names_and_reasons() -> None:
    instances = [instance for family in FAMILIES for instance in family.instances()]
    assert len({instance.name for instance in instances}) == len(instances) <= 64
    assert all(instance.reason for instance in instances)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [(tiny, (3, 5, 4)), (dot_stream, (3, 40, 300)), (column_stream, (3, 40, 300)), (small_k, (130, 140, 7))],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_without_asynchronous_copies(family: object, sizes: tuple[int, int, int], rng: Generator) -> None:
    """On sm_75, which has none."""
    layouts = ("rows", "columns", "rows") if family is dot_stream else "rows"
    product = make_product(rng, *sizes, (50,) if family is tiny else (), layouts=layouts)
    instance = family.matching(product.problem)[0]  # type: ignore[attr-defined]
    schedule = [split_k(2)] if instance.cuttable else []
    check(product, run(product, instance, *schedule, count=False, arch="sm_75"))
