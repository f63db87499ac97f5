"""Which loop a kernel runs: the register-file pass's where this GPU has proved it, else the compiler's."""

from __future__ import annotations

import functools
import secrets
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewave.compiler import Kernel
from tilewave.compiler.register_pass import OFF_SWITCH, PassOutcome
from tilewave.device import DeviceSpec
from tilewave.device.driver import driver_cuda_version, driver_release
from tilewave.errors import DeviceError
from tilewave.kernels.instances import Instance
from tilewave.planner.gemm.resources import blocks_per_sm
from tilewave.runtime import driver
from tilewave.runtime.loop_check import Verdict, compare, remembered_verdict, verdict_key
from tilewave.runtime.loop_launcher import LAUNCHES, ProductOnGpu, apart_from_captures, load_kernel
from tilewave.runtime.loop_products import loop_products


class RegisterFileWarning(UserWarning):
    """A kernel's new loop was found wanting on this GPU; the compiler's loop is used."""


@dataclass(frozen=True)
class Loop:
    """Which steady loop a loaded kernel runs: the pass's (``new``) or the compiler's, and why."""

    new: bool
    why: str

    def __str__(self) -> str:
        return f"the register-file pass's ({self.why})" if self.new else f"the compiler's, because {self.why}"


COMPILERS = Loop(False, "the driver makes the machine code from PTX here")


def choose_loop(
    instance: Instance, compilers: bytes, new: PassOutcome, kernel: Kernel, spec: DeviceSpec, device: Any
) -> Loop:
    """The loop to load, checked on this GPU if that was not done before; never inside a capture.

    ``compilers``: the compiler's cubin. The primary context of the GPU (``device``: its handle) is current.
    """
    if new.cubin is None:
        return Loop(False, str(new.reason))
    image = new.cubin

    def check(about_to_run: Callable[[], None]) -> Verdict:
        seed = secrets.randbits(32)
        return check_on_gpu(instance, compilers, image, kernel, spec, device, seed, about_to_run)

    key = verdict_key(compilers, image, kernel.symbol, gpu_named(spec), driver_named())
    try:
        verdict, found_now = remembered_verdict(key, check)
    except (DeviceError, MemoryError) as error:
        verdict, found_now = Verdict(False, f"the check could not be made ({error})"), True
    if verdict is None:
        return Loop(False, "another process is checking the new loop on this GPU, and has not finished")
    if verdict.same:
        return Loop(True, f"{new.summary}; checked on this GPU: {verdict.words}")
    if found_now:
        instead = (
            "is left out of plans"
            if instance.needs_new_loop
            else "runs with the compiler's loop, slower than it could"
        )
        warnings.warn(
            f"{instance} {instead}: its new loop failed the check "
            f"on {spec.name} ({verdict.words}). Results are not affected. Please report it; "
            f"{OFF_SWITCH}=0 switches the register-file pass off.",
            RegisterFileWarning,
            stacklevel=2,
        )
    return Loop(False, f"the new loop failed the check on this GPU: {verdict.words}")


def check_on_gpu(
    instance: Instance,
    compilers: bytes,
    new: bytes,
    kernel: Kernel,
    spec: DeviceSpec,
    device: Any,
    seed: int,
    about_to_run: Callable[[], None] = lambda: None,
) -> Verdict:
    """Compare both kernels on fresh products in the current context, apart from whatever else it does.

    ``about_to_run`` is called before the new kernel is launched first. Raises ``DeviceError``.
    """
    resident = spec.sms * max(1, blocks_per_sm(instance, spec))
    rng = np.random.default_rng([seed, *instance.name.encode()])
    with apart_from_captures() as stream, ExitStack() as stack:
        handles = []
        for image in (compilers, new):
            library, handle = load_kernel(image, kernel, instance, device)
            stack.callback(driver._call, "cuLibraryUnload", library)
            handles.append(handle)
        products = []
        for product in loop_products(instance, rng, sms=spec.sms, resident=resident):
            products.append(ProductOnGpu(product, stream))
            stack.callback(products[-1].release)
        return compare(
            products,
            lambda product: product.run(handles[0]),
            lambda product: product.run(handles[1], LAUNCHES),
            about_to_run,
        )


def gpu_named(spec: DeviceSpec) -> str:
    """A GPU's model, as far as it can matter to a kernel."""
    major, minor = spec.compute_capability
    return f"{spec.name}, {spec.sms} SMs, compute capability {major}.{minor}"


@functools.cache
def driver_named() -> str:
    """The driver's version, as exactly as it can be told."""
    return driver_release() or "CUDA {}.{}".format(*driver_cuda_version())
