"""Who computes a product whose error is looked at: models of the modes, NumPy's BLAS, and what a GPU has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import tilewave
from tilewave.bench.baseline import find_baseline
from tilewave.device import query_device
from tilewave.errors import NotBuiltError, UsageError
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.instances import Instance
from tilewave.planner.fp16x3 import plan_on
from tilewave.precision import fp16x3, tf32
from tilewave.runtime.driver import Device, DeviceArray, Stream, probe
from tilewave.runtime.fp16x3 import launch_fp16x3

Float32 = NDArray[np.float32]


_GPU_NANOSECONDS = 5.0
"""The product itself costs nothing: its float64 reference on the CPU does."""


@dataclass(frozen=True)
class Contender:
    """A way to multiply two float32 matrices on the host, and the mode whose bound it is held to.

    ``nanoseconds`` for each multiply-add, reference and bound included, is what a budget reckons with.
    """

    name: str
    mode: str
    multiply: Callable[[Float32, Float32], Float32]
    nanoseconds: float = 80.0


def chain(a: Float32, b: Float32) -> Float32:
    """Each element by one chain of fused multiply-adds in the order of k, as a GPU's FP32 kernel has it.

    The fused sum is made in float64 and rounded again, which differs from a fused one about once in 2^29.
    """
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for k in range(a.shape[1]):
            total = (total + wide_a[:, k, None] * wide_b[k]).astype(np.float32)
    return total


def _fp16x3(a: Float32, b: Float32) -> Float32:
    return fp16x3.multiply(a, b).values


def _coarse(a: Float32, b: Float32) -> Float32:
    return fp16x3.multiply(a, b, sums=fp16x3.COARSE).values


def _unpromoted(a: Float32, b: Float32) -> Float32:
    return fp16x3.multiply(a, b, sums=None).values


def by_kernel(a: Float32, b: Float32, instance: Instance) -> Float32:
    """The product of two matrices by one of the main kernels of fp16x3, on GPU 0, whatever is faster.

    Raises ``UsageError`` for one column, which is planned as a row.
    """
    if b.shape[1] == 1:
        raise UsageError("b has one column; accepted are two and more")
    device = Device()
    spec = query_device(device.ordinal)
    (m, k), n = a.shape, b.shape[1]
    problem = tilewave.plan(m, n, k, device=spec).covers
    plan = plan_on(problem, instance, spec, spec.sms)
    stream = Stream(device)
    left, right = (DeviceArray.from_numpy(device, np.ascontiguousarray(x)) for x in (a, b))
    out = DeviceArray.empty(device, (m, n))
    out.poison()
    device.synchronize()
    pointers = Pointers(left.address, right.address, out.address)
    launch_fp16x3(plan, pointers, device=device.ordinal, stream=stream.handle)
    stream.synchronize()
    return out.to_numpy()


def models() -> dict[str, Contender]:
    """Contenders that need no GPU, by their keys."""
    return {
        "ieee": Contender("ieee, one chain of float32 sums (model)", "ieee", chain),
        "fp16x3": Contender("fp16x3 (model)", "fp16x3", _fp16x3),
        "fp16x3-large": Contender("fp16x3 of large products (model)", "fp16x3", _coarse),
        "fp16x3-alone": Contender("fp16x3 without promotion (model)", "fp16x3", _unpromoted),
        "tf32": Contender("tf32 (model)", "tf32", tf32.multiply),
    }


def on_gpu() -> tuple[dict[str, Contender], list[str]]:
    """Contenders on the GPU here, and what is missing in words; none where there is no GPU."""
    found = probe()
    if not found.usable:
        return {}, [f"no GPU: {found.reason}"]
    notes = []
    contenders = {"gpu-ieee": Contender("ieee on the GPU", "ieee", tilewave.matmul, _GPU_NANOSECONDS)}
    for mode in ("fp16x3", "tf32"):

        def multiply(a: Float32, b: Float32, mode: str = mode) -> Float32:
            # Without the option a product that is faster as ieee would be computed as ieee.
            product: Float32 = tilewave.gemm(a, b, precision=mode, batch_invariant=True)
            return product

        try:
            multiply(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32))
        except (NotBuiltError, UsageError) as error:  # no kernels, or no Hopper
            notes.append(str(error))
            continue
        contenders[f"gpu-{mode}"] = Contender(f"{mode} on the GPU", mode, multiply, _GPU_NANOSECONDS)
    baseline, said = find_baseline()
    if baseline is None:
        notes.append(said)
    else:
        device = Device()
        stream = Stream(device)

        def cublas(a: Float32, b: Float32) -> Float32:
            left, right = (DeviceArray.from_numpy(device, np.ascontiguousarray(x)) for x in (a, b))
            out = DeviceArray.empty(device, (a.shape[0], b.shape[1]))
            out.poison()
            device.synchronize()
            baseline.prepare(left, right, out, stream)()
            stream.synchronize()
            return out.to_numpy()

        contenders["cublas"] = Contender(f"FP32, {said}", "ieee", cublas, _GPU_NANOSECONDS)
    return contenders, notes
