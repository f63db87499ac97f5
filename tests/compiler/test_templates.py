"""Every template of the library compiles with the compiler of these tests, be it the oldest one supported."""

from __future__ import annotations

import pytest

from tilewave.kernels import fp16x3
from tilewave.kernels.build import compile_instance
from tilewave.kernels.instances import Instance
from tilewave.kernels.ship import every_kernel


def smallest_of_each_template() -> list[Instance]:
    found: dict[str, Instance] = {}
    for instance in (*every_kernel(), *fp16x3.every_fp16x3_instance()):
        known = found.setdefault(instance.header, instance)
        if instance.tm * instance.tn < known.tm * known.tn:
            found[instance.header] = instance
    return list(found.values())


@pytest.mark.parametrize("instance", smallest_of_each_template(), ids=str)
def test_every_template_compiles(instance: Instance) -> None:
    arch = fp16x3.ARCHITECTURE if instance.family == fp16x3.FAMILY else "sm_90"
    _, kernel = compile_instance(instance, arch)
    assert kernel.resources.spill_store_bytes == kernel.resources.spill_load_bytes == 0
