"""Launches with everything decided but addresses and stream, for products that come again (`warm`)."""

from __future__ import annotations

import ctypes
from typing import Any

from tilewave.arrays import ArrayView
from tilewave.call import GemmCall, same_steps
from tilewave.device.driver import bindings
from tilewave.errors import DeviceError
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, POINTER_OFFSETS, Pointers, pack_arguments
from tilewave.on_device import executor, normalised_problem
from tilewave.planner.gemm import GemmPlan, PlanOptions, plan_gemm
from tilewave.runtime import driver
from tilewave.runtime.execute import run, with_its_loops
from tilewave.runtime.kernels import GpuState, gpu_state
from tilewave.runtime.workspace import workspace_pool
from tilewave.semantics import contiguous, span

_WORD = 8
_C, _BIAS, _OUT, _PARTIALS, _TICKETS = (
    POINTER_OFFSETS[name] // _WORD for name in ("c", "bias", "out", "partials", "tickets")
)

PLAIN_LIBRARIES = ("torch", "cupy")
"""Libraries whose arrays need no exchange, so that nothing but their addresses has to be asked for again."""


class PreparedGemm:
    """A plan on a GPU, packed.

    ``shape`` and ``strides`` (in elements, C order) are those of a result in new memory, ``alone`` says that
    there is one GPU only. Calling it launches;
    `apart` says whether the addresses of a call allow that.
    """

    __slots__ = (
        "_a",
        "_a_span",
        "_b",
        "_b_span",
        "_before",
        "_bias_span",
        "_c_in_place",
        "_c_span",
        "_context",
        "_launch",
        "_out_span",
        "_pool",
        "_spare",
        "_success",
        "_template",
        "_workspace",
        "alone",
        "shape",
        "strides",
    )

    def __init__(self, call: GemmCall, plan: GemmPlan, state: GpuState, swapped: bool) -> None:
        self.shape, self.strides = contiguous(call.product.result_shape)
        instance = plan.instance
        self._before = (
            state.kernel(instance, call.stream),
            plan.blocks,
            1,
            1,
            instance.threads,
            1,
            1,
            instance.shared_bytes,
        )
        self._template = pack_arguments(
            plan.problem, plan.cut, plan.raster, Pointers(0, 0, 0), call.alpha, call.beta, depth=instance.bk
        )
        first, second = (POINTER_OFFSETS[name] // _WORD for name in "ab")
        self._a, self._b = (second, first) if swapped else (first, second)
        # Blocks of arguments that no launch is using: the driver copies one before its call returns, and
        # other threads run meanwhile.
        self._spare: list[tuple[Any, int, Any]] = []
        # With one GPU every context, and stream 0, is of that GPU.
        self.alone = driver.require_gpu().devices == 1
        self._context = int(state.primary)
        self._pool = workspace_pool(state) if plan.ticket_bytes else None
        self._workspace = (plan.ticket_bytes, plan.partial_bytes)
        cuda = bindings()
        self._launch, self._success = cuda.cuLaunchKernel, cuda.CUresult.CUDA_SUCCESS
        self._a_span, self._b_span = span(call.a.layout), span(call.b.layout)
        self._c_span = None if call.c is None else span(call.c.layout)
        self._bias_span = None if call.bias is None else span(call.bias.layout)
        self._out_span = None if call.out is None else span(call.out.layout)
        self._c_in_place = same_steps(call.product, call.c_strides, call.out_strides)

    def apart(self, a: int, b: int, c: int, bias: int, out: int) -> bool:
        """Whether out shares no memory with an operand that is read (c may be out itself).

        Decided by the first and last byte of each: an interleaved one is not seen to be apart.
        """
        assert self._out_span is not None  # kept for a call with out
        low, high = self._out_span
        low, high = out + low, out + high
        first, last = self._a_span
        if a + first < high and low < a + last:
            return False
        first, last = self._b_span
        if b + first < high and low < b + last:
            return False
        if self._c_span is not None and not (c == out and self._c_in_place):
            first, last = self._c_span
            if c + first < high and low < c + last:
                return False
        if self._bias_span is not None:
            first, last = self._bias_span
            if bias + first < high and low < bias + last:
                return False
        return True

    def __call__(self, a: int, b: int, c: int, bias: int, out: int, stream: int) -> bool:
        """Submit to a stream; False where the driver did not take it, and the long way will say why."""
        if not self.alone and int(driver._call("cuCtxGetCurrent")) != self._context:
            return False
        try:
            words, parameters, _ = spare = self._spare.pop()
        except IndexError:
            words, parameters, _ = spare = self._new_block()
        words[self._a] = a
        words[self._b] = b
        words[_OUT] = out
        if self._c_span is not None:
            words[_C] = c
        if self._bias_span is not None:
            words[_BIAS] = bias
        if self._pool is None:
            accepted = self._launch(*self._before, stream, parameters, 0)[0] is self._success
        else:
            with self._pool.submitting:
                try:
                    arena = self._pool.take(stream, *self._workspace)
                except DeviceError:  # of a thread without a context, say, which the long way provides
                    accepted = False
                else:
                    words[_TICKETS], words[_PARTIALS] = arena.address, arena.partials
                    accepted = self._launch(*self._before, stream, parameters, 0)[0] is self._success
        self._spare.append(spare)
        return accepted

    def _new_block(self) -> tuple[Any, int, Any]:
        """A block of arguments as words, the address of its address, and what keeps both alive."""
        block = (ctypes.c_uint64 * (GEMM_ARGS_BYTES // _WORD)).from_buffer_copy(self._template)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        return memoryview(block).cast("B").cast("Q"), ctypes.addressof(parameters), (block, parameters)


def prepare_call(call: GemmCall, options: PlanOptions) -> PreparedGemm | None:
    """The launch of a call that has just been computed; None where its like must go the long way again.

    That is: operands of the host or of libraries that exchange memory, other streams to wait for, memory that
    is shared, a result kept beside, an empty product or one that reads nothing, and more than one launch.
    """
    views = (call.a, call.b, call.c, call.bias, call.out)
    if (
        call.device is None
        or call.others
        or call.overlap is not None
        or call.keep_preactivation
        or not call.reads_product
        or any(view is not None and view.framework not in PLAIN_LIBRARIES for view in views)
        or executor() is not run
    ):
        return None
    fresh = ArrayView(None, "", 0, contiguous(call.product.result_shape), call.device)
    normalised = normalised_problem(call, call.out if call.out is not None else fresh)
    if normalised is None or normalised.loops:
        return None
    state = gpu_state(call.device)
    plan = plan_gemm(normalised.problem, state.spec, options)
    plan = with_its_loops(plan, call.device, call.stream, options)
    if plan.blocks == 0 or plan.edges:
        return None
    return PreparedGemm(call, plan, state, normalised.swapped)
