"""Where a product runs that was asked for in another mode than ``ieee``.

On the host of a machine without a usable GPU, through the mode's NumPy model. On a GPU, arrays of the host
included, through the mode's kernels: `run_on_gpu` is where they come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewave.errors import NotBuiltError, UsageError
from tilewave.host import Float32, gpu_for_host_operands, run_on_host
from tilewave.problem import Precision

if TYPE_CHECKING:
    from tilewave.call import GemmCall
    from tilewave.planner.gemm.options import PlanOptions


def run_in_mode(call: GemmCall, options: PlanOptions, workspace: Any) -> Any:
    """Compute a call that reads its product in the mode that it asks for; the result is as in `gemm`."""
    if call.device is None:
        if workspace is not None:
            raise UsageError(
                "workspace is memory on a GPU, but the operands are on the host; accepted is None"
            )
        if gpu_for_host_operands() is None:
            return run_on_host(call)
    return run_on_gpu(call, options, workspace)


def run_on_gpu(call: GemmCall, options: PlanOptions, workspace: Any) -> Any:
    """Compute a call on the GPU of its operands, or, where they are on the host, on GPU 0.

    ``fp16x3`` runs on its kernels, or as ``ieee`` where that is predicted to be faster or the mode does not
    apply (`planner.fp16x3`). Raises ``NotBuiltError`` for a mode without kernels, and ``UsageError`` on a GPU
    that is no Hopper; nothing is written then.
    """
    if call.precision is not Precision.FP16X3:
        raise NotBuiltError(
            f"precision {call.precision.value!r} has no kernels yet; accepted on a GPU is 'ieee', and on "
            "Hopper 'fp16x3' (without a GPU, products of host arrays run through the mode's model)"
        )
    if call.device is None:
        gpu = gpu_for_host_operands()
        assert gpu is not None  # or the model had run
        from tilewave.staged import run_staged

        return run_staged(call, gpu, options)
    from tilewave.on_device import run_on_device

    return run_on_device(call, options, workspace)


def product_of_model(precision: Precision, a: Float32, b: Float32) -> Float32:
    """The product of host arrays by the model of a mode other than ``ieee``."""
    if precision is Precision.TF32:
        from tilewave.precision import tf32

        return tf32.multiply(a, b)
    from tilewave.precision import fp16x3

    return fp16x3.multiply(a, b).values
