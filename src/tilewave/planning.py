"""Plans without running them: for sizes, for arrays, ahead of a capture; and their account in prose."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from tilewave.arrays import ArrayView
from tilewave.call import GemmCall, activation_of, check_precision, collect, scalar
from tilewave.device import DeviceSpec, get_spec, query_device
from tilewave.errors import NotBuiltError, UsageError
from tilewave.host import gpu_for_host_operands
from tilewave.kernels.new_loops import prospect, written_for_the_pass
from tilewave.messages import shown
from tilewave.normalise import Normalised, normalise
from tilewave.on_device import copy_problem, normalised_problem
from tilewave.packed import Packed
from tilewave.planner.fp16x3 import plan_fp16x3
from tilewave.planner.gemm import GemmPlan, PlanOptions, explain_plan, plan_gemm
from tilewave.planner.gemm.explain_group import explain_group
from tilewave.planner.gemm.group import GroupPlan
from tilewave.problem import Activation, GemmProblem, MatrixLayout, Precision
from tilewave.semantics import check_addressable, check_bias_axis, contiguous

LAYOUTS = ("NN", "NT", "TN", "TT")
"""Layouts of a and b in BLAS's letters: T where the matrix is stored transposed, columns next to one
another.
"""

MOST_BATCH_AXES = 62
"""Axes that a batch of matrices has at most in NumPy, whose arrays have up to 64."""


def plan(
    m: int,
    n: int,
    k: int,
    *,
    batch: int | Sequence[int] = 1,
    layouts: str = "NN",
    alignment: int = 16,
    beta: float = 0.0,
    bias_axis: int | None = None,
    activation: Activation | str | None = None,
    return_preactivation: bool = False,
    precision: Precision | str = Precision.IEEE,
    device: str | int | DeviceSpec | None = None,
    schedule: Any = None,
    deterministic: bool = True,
    batch_invariant: bool = False,
    max_sms: int | None = None,
) -> GemmPlan:
    """How a product of these sizes would be computed: kernel, tiles, schedule, prediction, candidates.

    A is ``m`` x ``k``, B is ``k`` x ``n``, both stored without gaps, as ``layouts`` says: "NN", "NT", "TN" or
    "TT", T for a matrix stored transposed. ``batch`` is the number of such products, or the extents of batch
    axes; ``alignment`` what all addresses are multiples of, 16, 8 or 4 bytes. A ``beta`` other than 0 adds C,
    ``bias_axis`` a bias. ``device`` is a GPU's name ("H200"), its number, a `DeviceSpec`, or None for GPU 0.
    The rest is as in `gemm`. A named device needs no GPU, and equal arguments give equal plans everywhere.

    Print the plan to read it; `explain` tells more. Raises ``UsageError``.
    """
    mode = _planned(check_precision(precision))
    m, n, k = (_size(value, name) for value, name in ((m, "m"), (n, "n"), (k, "k")))
    extents = batch if isinstance(batch, Sequence) else (batch,)
    if len(extents) > MOST_BATCH_AXES:
        raise UsageError(f"batch has {len(extents):,} axes; accepted are at most {MOST_BATCH_AXES}")
    batches = tuple(_size(extent, "batch") for extent in extents)
    if not isinstance(layouts, str) or layouts not in LAYOUTS:
        raise UsageError(f"layouts is {shown(layouts)}; accepted are {', '.join(LAYOUTS)}")
    if not isinstance(alignment, int) or alignment not in (4, 8, 16):
        raise UsageError(f"alignment is {shown(alignment)}; accepted are 16, 8 and 4 bytes")
    for name, rows, columns in (("a", m, k), ("b", k, n), ("the result", m, n)):
        check_addressable(name, (*batches, rows, columns))
    if bias_axis is not None:
        check_bias_axis(bias_axis)
    if not isinstance(return_preactivation, bool):
        raise UsageError(f"return_preactivation must be True or False, not {shown(return_preactivation)}")

    def stored(rows: int, columns: int, transposed: bool = False) -> MatrixLayout:
        shape = (*batches, columns, rows) if transposed else (*batches, rows, columns)
        strides = contiguous(shape).strides
        layout = MatrixLayout(strides[-2], strides[-1], strides[:-2], alignment)
        return layout.transposed if transposed else layout

    bias = None
    if bias_axis is not None:
        along = (1, 0) if bias_axis == -2 else (0, 1)
        bias = MatrixLayout(*along, (0,) * len(batches), alignment)
    problem = GemmProblem(
        m,
        n,
        k,
        batches,
        stored(m, k, layouts[0] == "T"),
        stored(k, n, layouts[1] == "T"),
        stored(m, n),
        stored(m, n) if scalar(beta, "beta") != 0 else None,
        bias,
        stored(m, n) if return_preactivation else None,
        activation_of(activation),
        product=k > 0,
        precision=mode if k > 0 else Precision.IEEE,
    )
    options = PlanOptions(schedule, deterministic, batch_invariant, max_sms)
    normalised = normalise(problem, batch_invariant=batch_invariant)
    return _noted(normalised, device_spec(device), options, ())


def plan_for(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    device: str | int | DeviceSpec | None = None,
    schedule: Any = None,
    deterministic: bool = True,
    batch_invariant: bool = False,
    max_sms: int | None = None,
    **call: Any,
) -> tuple[GemmPlan, ...]:
    """The plans that `gemm` would follow with these very arrays, one for each kernel that it would launch.

    Their layouts and addresses count, and ``notes`` name all that is done beside the kernel: operands staged
    from the host, a result made in temporary memory, launches repeated for batch axes. Nothing is run.
    ``device`` is asked for where the arrays are on the host of a machine without a GPU. Empty for an empty
    result. ``call`` are the other arguments of `gemm`; shapes are those of `matmul`.

    Raises as `gemm` does, and ``UsageError`` where no GPU is named or found.
    """
    checked = collect(a, b, c, **call)
    _planned(checked.precision)
    options = PlanOptions(schedule, deterministic, batch_invariant, max_sms)
    notes: list[str] = []
    if checked.device is None:
        spec = device_spec(device if device is not None else gpu_for_host_operands())
        checked = _as_staged(checked, notes)
    else:
        spec = device_spec(checked.device if device is None else device)
    shape = checked.product.result_shape
    fresh = ArrayView(None, "", 0, contiguous(shape), checked.device)  # memory from an allocator: aligned
    target = checked.out if checked.out is not None and checked.overlap is None else fresh
    before = fresh if checked.keep_preactivation else None
    main = normalised_problem(checked, target, before, batch_invariant=batch_invariant)
    if main is None:
        return ()
    if checked.overlap is not None:
        notes.append(
            f"out shares memory with {checked.overlap}: the result is made in {4 * fresh.layout.size:,} "
            "bytes of temporary memory and copied"
        )
    plans = [_noted(main, spec, options, notes)]
    if checked.overlap is not None and checked.out is not None:
        copying = copy_problem(checked.product, fresh, checked.out)
        plans.append(
            _noted(copying, spec, PlanOptions(max_sms=max_sms), ["the copy from temporary memory to out"])
        )
    return tuple(plans)


def explain(*arguments: Any, **keywords: Any) -> str:
    """A plan in prose: the choice, what binds it, what could be changed, and each rejected candidate.

    Takes the sizes and options that `plan` takes (``explain(4096, 4096, 4096, device="H200")``), or a plan,
    or several; or two arrays and what `plan_for` takes besides (``explain(a, b, precision="fp16x3")``): that
    also tells the bound on the error of these very operands, which are copied to the host for it. Raises
    ``UsageError`` for anything else.
    """
    arguments = tuple(each.array if isinstance(each, Packed) else each for each in arguments)
    first = arguments[0] if arguments else None
    if _is_array(first):
        if len(arguments) < 2 or not _is_array(arguments[1]):
            raise UsageError("explain takes two arrays (a, b), sizes (m, n, k) or plans")
        found = plan_for(*arguments, **keywords)
        bound = [_bound_of(found[0].problem.precision, *arguments[:2], **keywords)] if found else []
        return "\n\n".join([*map(explain, found), *bound])
    if isinstance(first, GemmPlan | GroupPlan):
        plans = arguments
    elif isinstance(first, tuple) and len(arguments) == 1:
        plans = first
    else:
        sizes = {*("m", "n", "k")[: len(arguments)], *keywords}
        if len(arguments) > 3 or not sizes >= {"m", "n", "k"}:
            given = ", ".join(map(shown, arguments)) or "no size"
            raise UsageError(f"explain takes two arrays (a, b), sizes (m, n, k) or plans, not {given}")
        plans = (plan(*arguments, **keywords),)
        keywords = {}
    if keywords or not all(isinstance(each, GemmPlan | GroupPlan) for each in plans):
        raise UsageError("explain takes a plan, the plans of plan_for or plan_grouped, or what plan takes")
    return "\n\n".join(
        explain_group(each) if isinstance(each, GroupPlan) else explain_plan(each, loop=_loop(each))
        for each in plans
    )


def prepare(
    problems: Iterable[Any], *, device: int = 0, branches: int = 1, **options: Any
) -> tuple[GemmPlan | GroupPlan, ...]:
    """Compile, load and set workspace aside, so that these products can run inside a CUDA graph's capture.

    Each of ``problems`` is a plan (of `plan`, `plan_for` or `plan_grouped`) or sizes (m, n, k), planned with
    ``options`` as by `plan`. ``device`` is the number of the GPU, ``branches`` the number of streams that
    take part in one capture side by side. Returns the plans. What a captured graph uses stays with it:
    prepare again before the next capture, which costs nothing but its workspace.

    Raises ``UsageError`` for other problems, and ``DeviceError`` or ``ToolchainError`` without a usable GPU.
    """
    plans: list[GemmPlan | GroupPlan] = []
    if not isinstance(problems, Iterable):
        raise UsageError(f"cannot prepare {shown(problems)}; accepted is a list of plans and sizes")
    for problem in problems:
        if isinstance(problem, GemmPlan | GroupPlan):
            plans.append(problem)
        elif isinstance(problem, Sequence) and all(
            isinstance(each, GemmPlan | GroupPlan) for each in problem
        ):
            plans += problem
        elif isinstance(problem, Sequence) and len(problem) == 3:
            plans.append(plan(*problem, device=device, **options))
        else:
            raise UsageError(
                f"cannot prepare {shown(problem)}; accepted is a list of plans and sizes (m, n, k); for "
                "arrays: prepare(plan_for(a, b))"
            )
    from tilewave.runtime.execute import prepare_plan
    from tilewave.runtime.group import prepare_group

    for each in plans:
        if isinstance(each, GroupPlan):
            prepare_group(each, device=device, branches=branches)
        else:
            prepare_plan(each, device=device, branches=branches)
    return tuple(plans)


def _loop(plan: GemmPlan) -> str | None:
    """Which steady loop a plan's kernel runs, or would run, in words; None for kernels that have but one."""
    if (kernels := sys.modules.get("tilewave.runtime.kernels")) is not None:
        in_use = kernels.loop_in_use(plan.device, plan.instance.name)
        if in_use is not None and written_for_the_pass(plan.instance):
            return str(in_use)
    try:
        arch = get_spec(plan.device).arch
    except UsageError:  # a GPU that only its driver knows
        arch = None
    return prospect(plan.instance, arch)


def _planned(precision: Precision) -> Precision:
    """A mode that has plans."""
    if precision not in (Precision.IEEE, Precision.FP16X3):
        raise NotBuiltError(
            f"plans of precision {precision.value!r} are not built yet; accepted are 'ieee' and 'fp16x3'"
        )
    return precision


def _bound_of(
    mode: Precision, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, **_: Any
) -> str:
    """The bound on the error of a product of these arrays in the mode that runs, in words."""
    from tilewave.checking import operands_on_host
    from tilewave.precision.account import account_of_bound

    left, right = operands_on_host(a, b, transpose_a, transpose_b)
    return account_of_bound(mode.value, left, right)


def _is_array(value: Any) -> bool:
    """Whether something has a shape, be it one that it does not tell (as PyTorch's nested tensors)."""
    if isinstance(value, type | Integral):
        return False
    try:
        return hasattr(value, "shape")
    except Exception:
        return True


def _size(value: Any, name: str) -> int:
    """A size as an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        hint = "; plan_for plans for arrays" if _is_array(value) else ""
        raise UsageError(f"{name} is {shown(value)}; accepted are integers of at least 0{hint}")
    return int(value)


def device_spec(device: str | int | DeviceSpec | None) -> DeviceSpec:
    """The record of a GPU, by name, by number, or GPU 0."""
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, str):
        return get_spec(device)
    if device is None and gpu_for_host_operands() is None:
        raise UsageError(
            "this machine has no usable GPU; name one to plan for, such as device='H200' "
            "(in a command: --device H200)"
        )
    if device is not None and (not isinstance(device, int) or isinstance(device, bool)):
        raise UsageError(
            f"device is {shown(device)}; accepted are a GPU's name, its number, and a DeviceSpec"
        )
    from tilewave.runtime.kernels import gpu_state

    ordinal = 0 if device is None else device
    return gpu_state(ordinal).spec if gpu_for_host_operands() is not None else query_device(ordinal)


def _as_staged(call: GemmCall, notes: list[str]) -> GemmCall:
    from tilewave.staged import staged_bytes, staged_call

    notes.append(
        f"operands are on the host: {staged_bytes(call):,} bytes are copied to the GPU through pinned "
        f"memory, and {4 * contiguous(call.product.result_shape).size:,} bytes of result back"
    )
    return staged_call(call, 0, 0, {})


def _noted(normalised: Normalised, spec: DeviceSpec, options: PlanOptions, notes: Sequence[str]) -> GemmPlan:
    planner = plan_fp16x3 if normalised.problem.precision is Precision.FP16X3 else plan_gemm
    found = planner(normalised.problem, spec, options)
    said = list(notes)
    if normalised.swapped:
        said.append("the transposed product is computed, out^T = b^T a^T: A here is b, and B is a")
    if normalised.launches > 1:
        said.append(f"the batch has more axes than a kernel walks: launched {normalised.launches:,} times")
    return replace(found, notes=(*found.notes, *said))
