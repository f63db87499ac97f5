"""Groups of products of host arrays on a GPU: operands travel together, and so do the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.arrays import ArrayView
from tilewave.call import GemmCall
from tilewave.group import submit_group
from tilewave.outputs import from_host, written
from tilewave.planner.gemm.options import PlanOptions
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.staging import DeviceBuffer, Stager, stager
from tilewave.semantics import contiguous
from tilewave.staged import staged_bytes, staged_call, staged_layout, travelling

BYTES_AT_ONCE = 1 << 30
"""Assumed: operands and results of a group that are on the GPU at a time, where one product is not more."""

_LINE = 64
"""Elements: every operand begins on 256 bytes, as memory of its own would."""

Result = tuple[NDArray[np.float32], NDArray[np.float32] | None]


def run_staged_group(calls: Sequence[GemmCall], device: int, options: PlanOptions) -> list[Any]:
    """Compute calls whose operands are on the host on GPU ``device``; returns when all results are there.

    An operand that several products share travels once. Nothing of the caller's is written before all
    results are back.
    """
    stage = stager(device)
    found: list[Result] = []
    with stage.lock, gpu_state(device).context():
        for begin, end in staged_parts(calls):
            found += _run_part(calls[begin:end], stage, device, options)
    results = []
    for call, (host, before) in zip(calls, found, strict=True):
        if call.out is None:
            result = from_host(call.framework, host)
        else:
            assert call.out.host is not None  # operands are on the host
            call.out.host[...] = host
            result = written(call.out)
        results.append(result if before is None else (result, from_host(call.framework, before)))
    return results


def staged_parts(calls: Sequence[GemmCall]) -> Iterator[tuple[int, int]]:
    """The parts, from and to, in which a group's operands are on the GPU; nearly always one."""
    begin = used = 0
    for place, call in enumerate(calls):
        needed = staged_bytes(call) + 4 * contiguous(call.product.result_shape).size * (
            1 + call.keep_preactivation
        )
        if place > begin and used + needed > BYTES_AT_ONCE:
            yield begin, place
            begin, used = place, 0
        used += needed
    if calls:
        yield begin, len(calls)


def _run_part(calls: Sequence[GemmCall], stage: Stager, device: int, options: PlanOptions) -> list[Result]:
    parts: dict[Any, tuple[int, NDArray[np.float32]]] = {}  # by operand: its place in what travels
    end = 0
    for call in calls:
        for name in travelling(call):
            view: ArrayView = getattr(call, name)
            key = _identity(view)
            if key not in parts:
                assert view.host is not None  # operands are on the host
                part = view.host[staged_layout(view)[0]]
                parts[key] = end, part
                end += -(-part.size // _LINE) * _LINE
    together = np.empty(end, np.float32)
    for begin, part in parts.values():
        together[begin : begin + part.size].reshape(part.shape)[...] = part
    sizes = [contiguous(call.product.result_shape).size for call in calls]
    begins, end = [], 0
    for call, size in zip(calls, sizes, strict=True):
        begins.append(end)
        end += -(-size // _LINE) * _LINE * (1 + call.keep_preactivation)
    buffers: list[DeviceBuffer] = []
    try:
        buffers.append(stage.upload(together))
        buffers.append(DeviceBuffer(stage, 4 * end))
        source, target = (buffer.address for buffer in buffers)

        def result(call: GemmCall, begin: int) -> ArrayView:
            layout = contiguous(call.product.result_shape)
            return ArrayView(buffers[1], "", target + 4 * begin, layout, device)

        staged = [
            staged_call(
                call,
                device,
                stage.stream,
                {name: source + 4 * parts[_identity(getattr(call, name))][0] for name in travelling(call)},
            )
            for call in calls
        ]
        behind = [-(-size // _LINE) * _LINE for size in sizes]
        submit_group(
            staged,
            [result(call, begin) for call, begin in zip(calls, begins, strict=True)],
            [
                result(call, begin + size) if call.keep_preactivation else None
                for call, begin, size in zip(calls, begins, behind, strict=True)
            ],
            options,
        )
        host = np.empty(end, np.float32)
        stage.download(buffers[1], host)
    finally:
        for buffer in buffers:
            buffer.free()

    def copied(call: GemmCall, begin: int) -> NDArray[np.float32]:
        shape = call.product.result_shape
        return host[begin : begin + contiguous(shape).size].reshape(shape).copy()

    return [
        (copied(call, begin), copied(call, begin + size) if call.keep_preactivation else None)
        for call, begin, size in zip(calls, begins, behind, strict=True)
    ]


def _identity(view: ArrayView) -> Any:
    assert view.host is not None  # operands are on the host
    return view.address, view.host.shape, view.host.strides
