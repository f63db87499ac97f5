"""The front door: products of arrays wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from numbers import Integral
from typing import Any

from tilewave import recording, warm
from tilewave.call import GemmCall, collect
from tilewave.errors import TilewaveError, UsageError
from tilewave.group import Member, check_apart, check_member, run_members
from tilewave.host import gpu_for_host_operands, run_on_host
from tilewave.messages import kind_of, shown
from tilewave.on_device import run_on_device
from tilewave.planner.gemm.options import PlanOptions
from tilewave.problem import Activation, Precision
from tilewave.tensors import as_arrays, front_for

_DEFAULT = PlanOptions()
_IEEE = Precision.IEEE


def matmul(
    a: Any,
    b: Any,
    /,
    *,
    out: Any = None,
    precision: Precision | str = Precision.IEEE,
    stream: Any = None,
) -> Any:
    """The matrix product of two float32 arrays, by the rules of `numpy.matmul`.

    ``a`` is (..., M, K) or (K,), ``b`` is (..., K, N) or (K,); leading axes broadcast, and a vector's axis is
    missing in the result. Both lie on one GPU (PyTorch, CuPy, JAX, or anything with ``__dlpack__`` or
    ``__cuda_array_interface__``) or on the host, with any strides; so does the result, an array of the
    library of ``a``. ``out`` receives the result instead and is returned; it may overlap an operand.

    ``precision="ieee"`` is float32 products and float32 sums, whatever switches the libraries have; other
    modes (docs/precision.md) run only where they are asked for by name. Work is submitted to ``stream``, by
    default the current stream of the library of the operands, and not waited for.

    Raises ``OperandTypeError`` (a ``TypeError``) for anything but float32 arrays and ``UsageError`` (a
    ``ValueError``) for shapes that do not fit; nothing is written then.
    """
    found = warm.compute(a, b, None, None, out, stream, None) if _is_ieee(precision) else warm.MISSED
    if type(found) is not warm.Miss:
        return found
    front = front_for(a, b, out)
    if front is not None:
        return front.matmul(a, b, out=out, precision=precision, stream=stream)
    call = collect(a, b, out=out, precision=precision, stream=stream)
    result = _execute(call, _DEFAULT, None)
    warm.keep(found, call, _DEFAULT)
    return result


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    bias_axis: int = -1,
    activation: Activation | str | None = None,
    return_preactivation: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Any = None,
    precision: Precision | str = Precision.IEEE,
    schedule: Any = None,
    deterministic: bool = True,
    batch_invariant: bool = False,
    max_sms: int | None = None,
    workspace: Any = None,
    stream: Any = None,
) -> Any:
    """activation(alpha * A B + beta * C + bias), the gemm of BLAS with its last steps fused.

    Shapes are those of `matmul`; ``transpose_a`` and ``transpose_b`` exchange an operand's last two axes
    first. ``c`` broadcasts to the result; it is not read where ``beta`` is 0, the default. ``a`` and ``b``
    are not read where ``alpha`` is 0. ``bias`` is a vector along axis ``bias_axis`` of the result, -1 (one
    value a column) or -2 (one a row), possibly with batch axes before. ``activation`` is None, "relu", "gelu"
    (with erf), "gelu_tanh" or "silu". With ``return_preactivation`` the answer is a pair: the result, and
    what the activation was applied to.

    ``out`` may be ``c`` itself (in place); where it overlaps an operand otherwise, the result is made in
    temporary memory and copied. ``schedule``, ``deterministic``, ``batch_invariant`` and ``max_sms`` are the
    planner's (`PlanOptions`); they mean nothing on the host. ``workspace`` is memory of the caller's on the
    same GPU for partial sums, in place of tilewave's pool, or the most bytes that may be used of that.

    Raises as `matmul` does.
    """
    settings = (
        *(alpha, beta, bias_axis, activation, transpose_a, transpose_b, precision),
        *(schedule, deterministic, batch_invariant, max_sms),
    )
    found: Any = warm.MISSED
    if workspace is None and return_preactivation is False and _is_ieee(precision):
        # 1, 1.0 and True are equal, and not all of them are accepted.
        found = warm.compute(a, b, c, bias, out, stream, (settings, *map(type, settings)))
        if type(found) is not warm.Miss:
            return found
    front = front_for(a, b, c, bias, out)
    if front is not None:
        return front.gemm(
            a,
            b,
            c,
            alpha=alpha,
            beta=beta,
            bias=bias,
            bias_axis=bias_axis,
            activation=activation,
            return_preactivation=return_preactivation,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            out=out,
            precision=precision,
            schedule=schedule,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
            max_sms=max_sms,
            workspace=workspace,
            stream=stream,
        )
    call, options, memory = _collected(
        a,
        b,
        c,
        alpha=alpha,
        beta=beta,
        bias=bias,
        bias_axis=bias_axis,
        activation=activation,
        return_preactivation=return_preactivation,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        out=out,
        precision=precision,
        schedule=schedule,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        max_sms=max_sms,
        workspace=workspace,
        stream=stream,
    )
    result = _execute(call, options, memory)
    warm.keep(found, call, options)
    return result


_ARGUMENTS = tuple(signature(gemm).parameters)


def _is_ieee(precision: Any) -> bool:
    return isinstance(precision, str) and precision == _IEEE  # an array cannot be asked


def grouped_gemm(problems: Iterable[Any], **common: Any) -> list[Any]:
    """Products of differing sizes in one launch: a list of what `gemm` returns for each.

    Each of ``problems`` is a pair (a, b), a triple (a, b, c), or a mapping of arguments of `gemm`, with the
    shapes that `gemm` takes; ``common`` are arguments for all of them. Layouts, scalars and epilogues may
    differ, and problems may be empty. On a GPU one launch computes all problems that go to one stream with
    the same options; `plan_grouped` tells how. A problem whose tiles are not cut along K has the bits of
    ``gemm(..., batch_invariant=True)``, and ``batch_invariant`` forbids cuts. ``schedule`` may be
    "data_parallel" or "split_k".

    Problems are computed side by side: none may read or write what another one writes. All are checked before
    the first one runs, so that a bad one leaves everything unwritten.

    Raises as `gemm` does, with the place of the bad problem in front, counted from 0.
    """
    members, fronts = collect_members(problems, common)
    results = {}
    for place, arguments in fronts.items():
        with _naming(place):
            results[place] = gemm(**arguments)
    rest = [place for place in range(len(members)) if place not in fronts]
    if recording.ACTIVE:
        for place in rest:
            recording.note(members[place].call)
    found = run_members([members[place] for place in rest], lambda member: _computed(*member))
    results.update(zip(rest, found, strict=True))
    return [results[place] for place in range(len(members))]


def listed(problems: Any, what: str) -> Iterator[Any]:
    """An iterator over what is given as a list of problems; a mapping is one problem, not a list."""
    if isinstance(problems, Iterable) and not isinstance(problems, Mapping | str):
        return iter(problems)
    raise UsageError(f"{what} are given as {kind_of(problems)}; accepted is a list of them")


def collect_members(
    problems: Iterable[Any], common: Mapping[str, Any]
) -> tuple[list[Member], dict[int, dict[str, Any]]]:
    """The members of a group, checked one by one and against each other.

    Beside them, by place, the arguments of those that PyTorch must see one at a time, for their gradients or
    the like.
    """
    members: list[Member] = []
    fronts: dict[int, dict[str, Any]] = {}
    for place, problem in enumerate(listed(problems, "problems of a group")):
        with _naming(place):
            arguments = _arguments(problem, common)
            if front_for(*(arguments.get(name) for name in ("a", "b", "c", "bias", "out"))) is not None:
                fronts[place] = arguments
            with as_arrays() if place in fronts else nullcontext():
                members.append(Member(*_collected(**arguments)))
            check_member(members[-1])
    check_apart([member.call for member in members])
    return members, fronts


@contextmanager
def _naming(place: int) -> Iterator[None]:
    """Errors inside say which problem of a group they are about."""
    try:
        yield
    except TilewaveError as error:
        error.args = (f"problem {place}: {error}", *error.args[1:])
        raise


def _arguments(problem: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of gemm for one problem of a group."""
    if isinstance(problem, dict | Mapping):
        own = dict(problem)
    elif isinstance(problem, tuple | Sequence) and len(problem) in (2, 3):
        own = dict(zip(("a", "b", "c"), problem, strict=False))
    else:
        raise UsageError(
            f"this is {kind_of(problem)}; accepted are (a, b), (a, b, c) or a mapping of gemm's arguments"
        )
    unknown = [name for name in (*own, *common) if name not in _ARGUMENTS]
    if unknown:
        raise UsageError(f"gemm has no argument {shown(unknown[0])}; accepted are {', '.join(_ARGUMENTS)}")
    for name in ("a", "b"):
        if name not in own and name not in common:
            raise UsageError(f"{name} is missing")
    twice = [name for name in own if name in common]
    if twice:
        raise UsageError(f"{twice[0]} is given for this problem and for all of them; accepted is one of both")
    return own | dict(common)


def _collected(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    schedule: Any = None,
    deterministic: bool = True,
    batch_invariant: bool = False,
    max_sms: int | None = None,
    workspace: Any = None,
    **call: Any,
) -> tuple[GemmCall, PlanOptions, Any]:
    """A checked call, its options, and the caller's workspace memory if any."""
    limits: dict[str, Any] = {}
    if workspace is not None and isinstance(workspace, bool | Integral):
        if isinstance(workspace, bool) or int(workspace) < 0:
            raise UsageError(
                f"workspace is {shown(workspace)}; accepted are memory on the GPU of the operands, or the "
                "most bytes that may be used, at least 0"
            )
        limits["workspace_limit"] = int(workspace)
        workspace = None
    options = PlanOptions(schedule, deterministic, batch_invariant, max_sms, **limits)
    return collect(a, b, c, **call), options, workspace


def _execute(call: GemmCall, options: PlanOptions, workspace: Any) -> Any:
    if recording.ACTIVE:
        recording.note(call)
    return _computed(call, options, workspace)


def _computed(call: GemmCall, options: PlanOptions, workspace: Any) -> Any:
    if call.precision is not Precision.IEEE and call.reads_product:
        return _in_mode(call, options, workspace)
    if call.device is None:
        if workspace is not None:
            raise UsageError(
                "workspace is memory on a GPU, but the operands are on the host; accepted is None"
            )
        gpu = gpu_for_host_operands()
        return run_on_host(call) if gpu is None else _staged(call, gpu, options)
    return run_on_device(call, options, workspace)


def _in_mode(call: GemmCall, options: PlanOptions, workspace: Any) -> Any:
    from tilewave.precision.dispatch import run_in_mode  # most calls do without the models

    return run_in_mode(call, options, workspace)


def _staged(call: GemmCall, gpu: int, options: PlanOptions) -> Any:
    from tilewave.staged import run_staged  # what it imports is of no use without a GPU

    return run_staged(call, gpu, options)
