"""Running a checked call on a GPU: one form for the problem, memory for the result, launches in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from tilewave.arrays import ArrayView, framework_of, loaded, view_of
from tilewave.call import GemmCall
from tilewave.errors import UsageError
from tilewave.kernels.arguments import Pointers
from tilewave.normalise import Normalised, normalise
from tilewave.outputs import empty_on_device, finished, keep_tensors, written
from tilewave.planner.gemm.options import PlanOptions
from tilewave.problem import Activation, GemmProblem, Precision
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
    memory = workspace_memory(call, workspace)
    target = call.out if call.out is not None and call.overlap is None else allocate(call)
    before = allocate(call) if call.keep_preactivation else None
    with ordered(call) if call.others else _UNORDERED:
        submit(call, target, before, options, memory)
        if call.out is not None and target is not call.out:
            submit_copy(call, target, call.out, options)
    keep_exchanged(call, workspace)
    result = written(call.out) if call.out is not None else finished(call.framework, target.owner)
    return result if before is None else (result, finished(call.framework, before.owner))


def submit(
    call: GemmCall,
    target: ArrayView,
    before: ArrayView | None,
    options: PlanOptions,
    workspace: tuple[int, int] | None = None,
) -> None:
    """Launch what a call computes, into ``target``; ``before`` receives what the activation is applied to."""
    normalised = normalised_problem(call, target, before, batch_invariant=options.batch_invariant)
    if normalised is None:
        return
    given = given_pointers(call, target, before)
    # Without a product alpha has nothing to scale; 0 keeps its sign and its NaN out of the result.
    alpha = call.alpha if call.reads_product else 0.0
    run = executor()
    in_mode = normalised.problem.precision is not Precision.IEEE
    packed: dict[str, Any] = {"packed": call.packed} if in_mode and call.packed else {}
    for pointers in normalised.pointers(given):
        run(
            normalised.problem,
            pointers,
            alpha,
            call.beta,
            device=_gpu(call),
            stream=call.stream,
            options=options,
            workspace=workspace,
            **packed,
        )


def given_pointers(call: GemmCall, target: ArrayView, before: ArrayView | None) -> Pointers:
    """The addresses of a call's operands; 0 where one is absent or not read."""
    return Pointers(
        call.a.address if call.reads_product else 0,
        call.b.address if call.reads_product else 0,
        target.address,
        0 if call.c is None else call.c.address,
        0 if call.bias is None else call.bias.address,
        0 if before is None else before.address,
    )


def submit_copy(call: GemmCall, source: ArrayView, target: ArrayView, options: PlanOptions) -> None:
    """Copy an array of a call's result shape to another place on the GPU."""
    if 0 in call.product.result_shape:
        return
    copying = copy_problem(call.product, source, target)
    run = executor()
    for pointers in copying.pointers(Pointers(0, 0, target.address, c=source.address)):
        run(
            copying.problem,
            pointers,
            COPY_ALPHA,
            1.0,
            device=_gpu(call),
            stream=call.stream,
            options=PlanOptions(max_sms=options.max_sms),
        )


def _gpu(call: GemmCall) -> int:
    assert call.device is not None  # operands are on a GPU
    return call.device


def allocate(call: GemmCall) -> ArrayView:
    """Memory for a result of a call, in the library of its operands."""
    return empty_on_device(call.framework, call.product.result_shape, _gpu(call), call.stream)


def normalised_problem(
    call: GemmCall, target: ArrayView, before: ArrayView | None = None, *, batch_invariant: bool = False
) -> Normalised | None:
    """What kernels are to compute for a call whose result goes to ``target``; None for an empty result.

    ``batch_invariant`` is the call's option.
    """
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
        call.precision,
        batch_invariant and call.precision is not Precision.IEEE,
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
    precision: Precision = Precision.IEEE,
    batch_invariant: bool = False,
) -> Normalised:
    problem = gemm_problem(
        product,
        out,
        alignments,
        c=c,
        bias=bias,
        preactivation=preactivation,
        activation=activation,
        reads_product=reads_product,
    )
    if precision is not Precision.IEEE and problem.product:  # nothing of a mode is left without a product
        problem = replace(problem, precision=precision)
    return normalise(problem, batch_invariant=batch_invariant)


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


def workspace_memory(call: GemmCall, workspace: Any) -> tuple[int, int] | None:
    """Address and bytes of the caller's workspace, which must be contiguous, writable and apart."""
    if workspace is None:
        return None
    view = view_of(_as_floats(workspace), "workspace", call.stream)
    if view.device != call.device:
        raise UsageError(f"workspace lies on {view.place}, the operands on GPU {call.device}")
    if view.readonly or view.layout != contiguous(view.layout.shape):
        raise UsageError(f"workspace has {view.layout}; accepted is a writable array in C order")
    for name in ("a", "b", "c", "bias", "out"):
        operand = getattr(call, name)
        if operand is not None and share_memory(view.address, view.layout, operand.address, operand.layout):
            raise UsageError(f"workspace shares memory with {name}; accepted is memory of its own")
    return view.address, 4 * view.layout.size


def _as_floats(workspace: Any) -> Any:
    """The float32 elements within a tensor of PyTorch or CuPy of any dtype; others as they are.

    Bytes before the first whole element and behind the last are left out.
    """
    framework = framework_of(workspace)
    if framework not in ("torch", "cupy"):
        return workspace
    if str(workspace.dtype).endswith("float32"):
        return workspace
    library = loaded(framework)
    contiguous_memory = workspace.is_contiguous() if framework == "torch" else workspace.flags.c_contiguous
    if not contiguous_memory:
        raise UsageError("workspace has gaps between its elements; accepted is memory in C order")
    octets = workspace.reshape(-1).view(library.uint8)
    address = octets.data_ptr() if framework == "torch" else octets.data.ptr
    first = -address % 4
    count = (octets.shape[0] - first) // 4 * 4
    return octets[first : first + max(0, count)].view(library.float32)


_UNORDERED = contextlib.nullcontext()


@contextlib.contextmanager
def ordered(call: GemmCall) -> Iterator[None]:
    """Work inside begins after what other libraries submitted to their streams, and they go on after it."""
    from tilewave.runtime.interop import wait_for

    for other in call.others:
        wait_for(call.stream, other, _gpu(call))
    yield
    for other in call.others:
        wait_for(other, call.stream, _gpu(call))


def keep_exchanged(call: GemmCall, workspace: Any = None) -> None:
    """Keep memory until the work on it is done, where its owner knows nothing of our stream.

    That is memory that came through DLPack, which may be reused as soon as it is given back, and PyTorch's
    where work is submitted to another stream than its current one; the caller's ``workspace`` among it, which
    PyTorch's own stream never waits for.
    """
    views = [view for view in (call.a, call.b, call.c, call.bias, call.out) if view is not None]
    owners = [view.owner for view in views if view.framework in ("jax", "dlpack")]
    if not call.others:  # else PyTorch's own stream goes on after the product
        keep_tensors([view.owner for view in views if view.framework == "torch"], call.stream, _gpu(call))
    if workspace is not None:
        library = framework_of(workspace)
        if library == "torch":
            keep_tensors([workspace], call.stream, _gpu(call))
        elif library != "cupy":
            owners.append(workspace)
    if owners:
        from tilewave.runtime.interop import keep_until_passed

        keep_until_passed(owners, call.stream, _gpu(call))
