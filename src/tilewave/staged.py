"""Products of host arrays on a GPU: operands go there through pinned memory, the result comes back."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewave.arrays import ArrayView
from tilewave.call import GemmCall
from tilewave.on_device import submit
from tilewave.outputs import from_host, written
from tilewave.planner.gemm.options import PlanOptions
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.staging import DeviceBuffer, Stager, stager
from tilewave.semantics import Layout, addend_strides, bias_strides, contiguous, product_of


def run_staged(call: GemmCall, device: int, options: PlanOptions) -> Any:
    """Compute a call whose operands are on the host on GPU ``device``; returns when the result is there.

    Each operand travels once, without what it repeats (axes of stride 0), in C order. Operands that are not
    read do not travel. Nothing of the caller's is written before the whole result is back.
    """
    stage = stager(device)
    shape = call.product.result_shape
    with stage.lock, gpu_state(device).context():
        buffers: list[DeviceBuffer] = []
        try:
            staged = _on_gpu(call, stage, device, buffers)
            target = _result(stage, shape, device, buffers)
            before = _result(stage, shape, device, buffers) if call.keep_preactivation else None
            submit(staged, target, before, options)
            host = np.empty(shape, np.float32)
            stage.download(target.owner, host)
            host_before = None
            if before is not None:
                host_before = np.empty(shape, np.float32)
                stage.download(before.owner, host_before)
        finally:
            for buffer in buffers:
                buffer.free()
    if call.out is None:
        result = from_host(call.framework, host)
    else:
        assert call.out.host is not None  # operands are on the host
        call.out.host[...] = host
        result = written(call.out)
    return result if host_before is None else (result, from_host(call.framework, host_before))


def staged_layout(view: ArrayView) -> tuple[tuple[slice, ...], Layout]:
    """Which part of a host operand travels, and the layout of the whole on the GPU."""
    assert view.host is not None  # the operand is on the host
    repeated = [
        stride == 0 and extent > 1 for stride, extent in zip(view.host.strides, view.host.shape, strict=True)
    ]
    part = tuple(slice(0, 1) if repeats else slice(None) for repeats in repeated)
    packed = contiguous(view.host[part].shape)
    strides = tuple(
        0 if repeats else stride for repeats, stride in zip(repeated, packed.strides, strict=True)
    )
    return part, Layout(view.host.shape, strides)


def staged_call(call: GemmCall, device: int, stream: int, addresses: dict[str, int]) -> GemmCall:
    """A call of host operands as it is on a GPU, with each operand at its address there."""
    views: dict[str, ArrayView] = {}
    for name in ("a", "b", "c", "bias"):
        view: ArrayView | None = getattr(call, name)
        if view is not None:
            _, layout = staged_layout(view)
            views[name] = ArrayView(view.owner, view.framework, addresses.get(name, 0), layout, device)
    product = product_of(views["a"].layout, views["b"].layout, call.transpose_a, call.transpose_b)
    c, bias = views.get("c"), views.get("bias")
    return call._replace(
        a=views["a"],
        b=views["b"],
        c=c,
        bias=bias,
        out=None,
        product=product,
        c_strides=None if c is None else addend_strides(product, c.layout),
        bias_strides=None if bias is None else bias_strides(product, bias.layout, call.bias_axis),
        out_strides=None,
        device=device,
        stream=stream,
        others=(),
        overlap=None,
    )


def staged_bytes(call: GemmCall) -> int:
    """Bytes of operands that travel to the GPU."""
    views: list[ArrayView] = [getattr(call, name) for name in travelling(call)]
    return sum(view.host[staged_layout(view)[0]].nbytes for view in views if view.host is not None)


def travelling(call: GemmCall) -> tuple[str, ...]:
    """Names of the operands that a kernel reads."""
    read = ("a", "b") if call.reads_product else ()
    return (*read, *(name for name in ("c", "bias") if getattr(call, name) is not None))


def _on_gpu(call: GemmCall, stage: Stager, device: int, buffers: list[DeviceBuffer]) -> GemmCall:
    addresses = {}
    for name in travelling(call):
        view: ArrayView = getattr(call, name)
        assert view.host is not None  # operands are on the host
        part, _ = staged_layout(view)
        buffers.append(stage.upload(view.host[part]))
        addresses[name] = buffers[-1].address
    return staged_call(call, device, stage.stream, addresses)


def _result(stage: Stager, shape: tuple[int, ...], device: int, buffers: list[DeviceBuffer]) -> ArrayView:
    layout = contiguous(shape)
    buffers.append(DeviceBuffer(stage, 4 * layout.size))
    return ArrayView(buffers[-1], "", buffers[-1].address, layout, device)
