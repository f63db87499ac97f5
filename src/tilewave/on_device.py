"""Running a checked call on a GPU: one form for the problem, memory for the result, launches in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

from tilewave.arrays import ArrayView, view_of
from tilewave.call import GemmCall
from tilewave.errors import UsageError
from tilewave.kernels.arguments import Pointers
from tilewave.normalise import Normalised, normalise
from tilewave.outputs import empty_on_device, finished
from tilewave.planner.gemm.options import PlanOptions
from tilewave.problem import Activation, GemmProblem
from tilewave.semantics import Alignments, Product, Strides, contiguous, gemm_problem, share_memory

COPY_ALPHA = -0.0
"""Alpha of a copy, made as out = alpha * 0 + 1 * C: the sum -0.0 + C has the bits of C, -0.0 included."""


class Executor(Protocol):
    """What runs one problem on a GPU: `tilewave.runtime.execute.run`, or a stand-in for tests."""

    def __call__(
        self,
        problem: GemmProblem,
        pointers: Pointers,
        alpha: float,
        beta: float,
        *,
        device: int,
        stream: int,
        options: PlanOptions,
        workspace: tuple[int, int] | None = None,
    ) -> object:
        """Submit the problem to a stream of a device."""
        ...


def executor() -> Executor:
    """The executor of this process; its module is imported at the first product on a GPU."""
    from tilewave.runtime.execute import run

    return run


def run_on_device(call: GemmCall, options: PlanOptions, workspace: Any) -> Any:
    """Compute a call whose operands lie on a GPU, and return the result in the library of a."""
    assert call.device is not None  # operands are on a GPU
    shape = call.product.result_shape
    memory = _workspace_memory(call, workspace)

    def allocate(name: str, framework: str = call.framework) -> ArrayView:
        assert call.device is not None
        return view_of(empty_on_device(framework, shape, call.device, call.stream), name, call.stream)

    direct = call.out is not None and call.overlap is None
    target = call.out if direct else allocate("out")
    assert target is not None
    before = allocate("preactivation") if call.keep_preactivation else None
    with _ordered(call):
        submit = executor()
        common: dict[str, Any] = {"device": call.device, "stream": call.stream, "options": options}
        normalised = normalised_problem(call, target, before)
        if normalised is not None:
            for pointers in normalised.pointers(_pointers(call, target, before)):
                submit(
                    normalised.problem,
                    pointers,
                    call.alpha if call.reads_product else 0.0,
                    call.beta,
                    workspace=memory,
                    **common,
                )
            if call.out is not None and not direct:
                copying = copy_problem(call.product, target, call.out)
                for pointers in copying.pointers(Pointers(0, 0, call.out.address, c=target.address)):
                    submit(copying.problem, pointers, COPY_ALPHA, 1.0, **common)
    result = call.out.owner if call.out is not None else finished(call.framework, target.owner)
    return result if before is None else (result, finished(call.framework, before.owner))


def normalised_problem(
    call: GemmCall, target: ArrayView, before: ArrayView | None = None
) -> Normalised | None:
    """What kernels are to compute for a call whose result goes to ``target``; None for an empty result."""
    product = call.product
    if 0 in product.result_shape:
        return None
    return _normalised(
        product,
        product.along_result(target.layout.strides),
        Alignments(
            call.a.alignment,
            call.b.alignment,
            target.alignment,
            16 if call.c is None else call.c.alignment,
            16 if call.bias is None else call.bias.alignment,
            16 if before is None else before.alignment,
        ),
        call.c_strides,
        call.bias_strides,
        None if before is None else product.along_result(before.layout.strides),
        call.activation,
        call.reads_product,
    )


@lru_cache(maxsize=4096)
def _normalised(
    product: Product,
    out: Strides,
    alignments: Alignments,
    c: Strides | None,
    bias: Strides | None,
    preactivation: Strides | None,
    activation: Activation,
    reads_product: bool,
) -> Normalised:
    return normalise(
        gemm_problem(
            product,
            out,
            alignments,
            c=c,
            bias=bias,
            preactivation=preactivation,
            activation=activation,
            reads_product=reads_product,
        )
    )


def copy_problem(product: Product, source: ArrayView, target: ArrayView) -> Normalised:
    """Copying an array of a product's shape, as a gemm without a product."""
    return _normalised(
        product,
        product.along_result(target.layout.strides),
        Alignments(out=target.alignment, c=source.alignment),
        product.along_result(source.layout.strides),
        None,
        None,
        Activation.NONE,
        False,
    )


def _pointers(call: GemmCall, target: ArrayView, before: ArrayView | None) -> Pointers:
    return Pointers(
        call.a.address,
        call.b.address,
        target.address,
        0 if call.c is None else call.c.address,
        0 if call.bias is None else call.bias.address,
        0 if before is None else before.address,
    )


def _workspace_memory(call: GemmCall, workspace: Any) -> tuple[int, int] | None:
    """Address and bytes of the caller's workspace, which must be contiguous, writable and apart."""
    if workspace is None:
        return None
    view = view_of(workspace, "workspace", call.stream)
    if view.device != call.device:
        raise UsageError(f"workspace lies on {view.place}, the operands on GPU {call.device}")
    if view.readonly or view.layout != contiguous(view.layout.shape):
        raise UsageError(f"workspace has {view.layout}; accepted is a writable array in C order")
    for name in ("a", "b", "c", "bias", "out"):
        operand = getattr(call, name)
        if operand is not None and share_memory(view.address, view.layout, operand.address, operand.layout):
            raise UsageError(f"workspace shares memory with {name}; accepted is memory of its own")
    return view.address, 4 * view.layout.size


@contextlib.contextmanager
def _ordered(call: GemmCall) -> Iterator[None]:
    """Work inside begins after what other libraries submitted to their streams, and they go on after it."""
    if not call.others:
        yield
        return
    from tilewave.runtime.interop import wait_for

    assert call.device is not None
    for other in call.others:
        wait_for(call.stream, other, call.device)
    yield
    for other in call.others:
        wait_for(other, call.stream, call.device)
