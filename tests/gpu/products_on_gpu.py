"""A product of `tests/kernels/products.py` run by a plan on a GPU, its operands between guard zones."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided
from tests.kernels.products import Floats, Product

from tilewave.kernels.arguments import Pointers
from tilewave.planner.gemm.records import GemmPlan
from tilewave.runtime.driver import Device, DeviceArray
from tilewave.runtime.emulated import GAP, storage_of
from tilewave.runtime.execute import launch_plan

GUARD = 16 * 1024
"""Elements of guard zone before and after an operand; a multiple of 64 keeps the alignment."""


class PlacedOnGpu:
    """The operands of a product in device memory, each with its own strides and NaN between and around."""

    def __init__(self, product: Product, device: Device) -> None:
        self._device = device
        self._product = product
        self._storage: dict[str, tuple[Floats, int, DeviceArray]] = {}
        for name, array in product.operands.items():
            inner, first = storage_of(array, product.misalignment)
            whole = np.full(inner.size + 2 * GUARD, GAP, np.uint32).view(np.float32)
            whole[GUARD : GUARD + inner.size] = inner
            self._storage[name] = (whole, GUARD + first, DeviceArray.from_numpy(device, whole))

    @property
    def pointers(self) -> Pointers:
        return Pointers(
            **{name: memory.address + 4 * first for name, (_, first, memory) in self._storage.items()}
        )

    def launch(self, plan: GemmPlan, stream: int) -> None:
        product = self._product
        launch_plan(
            plan,
            self.pointers,
            product.alpha,
            product.beta,
            device=self._device.ordinal,
            stream=stream,
        )

    def fetch(self) -> dict[str, Floats]:
        """What out and preactivation hold now; fails when anything else in memory has changed."""
        results: dict[str, Floats] = {}
        for name, (whole, first, memory) in self._storage.items():
            after = memory.to_numpy()
            array = self._product.operands[name]
            if name in ("out", "preactivation"):
                view = as_strided(after[first:], array.shape, array.strides)
                results[name] = view.copy()
                as_strided(whole[first:], array.shape, array.strides)[...] = view
            assert np.array_equal(whole.view(np.uint32), after.view(np.uint32)), f"{name} or its gaps changed"
        return results
