"""Who takes part: tilewave under any schedule or forced plan, cuBLAS through torch or CuPy, cuBLASLt."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewave.bench.products.gpu import Buffers, Workbench
from tilewave.bench.suite import SuiteProduct
from tilewave.errors import DeviceError, ToolchainError, UsageError
from tilewave.planner.gemm import GemmPlan, PlanOptions
from tilewave.planner.schedules import Schedule
from tilewave.runtime.driver import DeviceArray

Work = Callable[[], None]

ACCEPTED = (
    "accepted are ours, ours:SCHEDULE (such as ours:split_k:8), ours:INSTANCE@SCHEDULE (such as "
    "ours:large_tile_128x256_nn_16@data_parallel), torch, cupy, cublaslt"
)


@dataclass(frozen=True)
class Entry:
    """A contender on one product: what submits it to the bench's stream, and our plan if it is ours."""

    work: Work
    plan: GemmPlan | None = None


class Contestant(Protocol):
    """One way to compute products."""

    name: str
    """With its version, as tables show it."""

    def enter(self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers]) -> list[Entry]:
        """What computes the product, an entry for each set of buffers. Raises ``TilewaveError`` if it
        cannot.
        """
        ...


def views(library: str, product: SuiteProduct, one: Buffers, ordinal: int) -> tuple[Any, Any, Any]:
    """A, B and C as arrays of torch or cupy over the very memory: 2-D, or 3-D for a batch."""
    module: Any = importlib.import_module(library)

    def as_array(memory: Any) -> Any:
        if library == "torch":
            array = module.as_tensor(memory, device=f"cuda:{ordinal}")
            address = array.data_ptr()
        else:
            array = module.asarray(memory)
            address = array.data.ptr
        if address != memory.address:
            raise DeviceError(f"{library} copied memory instead of sharing it")
        return array

    def operand(memory: Any, transposed: bool, shared: bool) -> Any:
        array = as_array(memory)
        array = array.swapaxes(1, 2) if transposed else array
        if product.batch == 1:
            return array[0]
        if not shared:
            return array
        shape = (product.batch, *array.shape[1:])
        return array.expand(shape) if library == "torch" else module.broadcast_to(array, shape)

    out = as_array(one.out)
    return (
        operand(one.a, product.transposed_a, product.shared_a),
        operand(one.b, product.transposed_b, product.shared_b),
        out[0] if product.batch == 1 else out,
    )


class TorchContestant:
    """``torch.matmul`` into given memory, which calls cuBLAS."""

    def __init__(self) -> None:
        self._torch = _usable("torch")
        self.name = f"cuBLAS through torch {self._torch.__version__}"

    def enter(self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers]) -> list[Entry]:
        """An entry for each set."""
        torch = self._torch
        external = torch.cuda.ExternalStream(bench.stream.handle, device=f"cuda:{bench.device.ordinal}")

        def entry(one: Buffers) -> Entry:
            a, b, out = views("torch", product, one, bench.device.ordinal)

            def work() -> None:
                with torch.cuda.stream(external):
                    torch.matmul(a, b, out=out)

            return Entry(work)

        return [entry(one) for one in sets]


class CupyContestant:
    """``cupy.matmul`` into given memory, which calls cuBLAS."""

    def __init__(self) -> None:
        self._cupy = _usable("cupy")
        self.name = f"cuBLAS through cupy {self._cupy.__version__}"

    def enter(self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers]) -> list[Entry]:
        """An entry for each set."""
        cupy = self._cupy
        external = cupy.cuda.ExternalStream(bench.stream.handle, bench.device.ordinal)

        def entry(one: Buffers) -> Entry:
            a, b, out = views("cupy", product, one, bench.device.ordinal)

            def work() -> None:
                with external:
                    cupy.matmul(a, b, out=out)

            return Entry(work)

        return [entry(one) for one in sets]


class DeviceView:
    """A matrix, or a batch, over device memory with any strides, for those who read CUDA array interfaces."""

    def __init__(self, memory: DeviceArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (memory.address, False),
            "strides": tuple(4 * stride for stride in strides),
            "version": 3,
        }


def own_views(product: SuiteProduct, one: Buffers) -> tuple[DeviceView, DeviceView, DeviceView]:
    """A, B and C without a framework."""

    def view(memory: DeviceArray, transposed: bool, shared: bool) -> DeviceView:
        _, rows, columns = memory.shape
        steps = (0 if shared else rows * columns, columns, 1)
        shape = (product.batch, rows, columns)
        if transposed:
            shape, steps = (shape[0], columns, rows), (steps[0], 1, columns)
        first = 1 if product.batch == 1 else 0
        return DeviceView(memory, shape[first:], steps[first:])

    return (
        view(one.a, product.transposed_a, product.shared_a),
        view(one.b, product.transposed_b, product.shared_b),
        view(one.out, False, False),
    )


class OurContestant:
    """``tilewave.matmul``, or `gemm` under a schedule, or one instance under one schedule.

    Operands are arrays of torch or CuPy where one is installed, as users have them, else our own.
    """

    def __init__(self, wanted: str = "", library: str | None = None) -> None:
        self.name = f"tilewave {wanted}".strip()
        self._library = library
        instance, _, schedule = wanted.rpartition("@")
        self._instance = instance or None
        self._options = PlanOptions(schedule or None)  # refuses an unknown schedule at once
        kind, pieces = self._options.wanted
        self._forced: Schedule | None = None
        if self._instance is not None:
            if kind is None or pieces is None:
                raise UsageError(f"ours:{wanted} needs a schedule with its number of pieces; {ACCEPTED}")
            self._forced = Schedule(kind, pieces)

    def enter(self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers]) -> list[Entry]:
        """An entry for each set; kernel and workspace are ready afterwards."""
        if self._forced is not None:
            return self._force(bench, product, sets, self._forced)
        import tilewave

        arrays = [
            own_views(product, one)
            if self._library is None
            else views(self._library, product, one, bench.device.ordinal)
            for one in sets
        ]
        a, b, out = arrays[0]
        schedule, stream = self._options.schedule, bench.stream.handle
        plans = tilewave.plan_for(a, b, out=out, schedule=schedule, stream=stream)
        tilewave.prepare(plans, device=bench.device.ordinal)

        def entry(one: tuple[Any, Any, Any]) -> Entry:
            a, b, out = one
            if schedule is None:
                return Entry(functools.partial(tilewave.matmul, a, b, out=out, stream=stream), plans[0])
            return Entry(
                functools.partial(tilewave.gemm, a, b, out=out, schedule=schedule, stream=stream), plans[0]
            )

        return [entry(one) for one in arrays]

    def _force(
        self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers], schedule: Schedule
    ) -> list[Entry]:
        """Entries of one instance under one schedule, launched without the front door."""
        from tilewave.call import collect
        from tilewave.kernels.arguments import Pointers
        from tilewave.on_device import normalised_problem
        from tilewave.planner.gemm.select import planner_of
        from tilewave.runtime.execute import launch_plan, prepare_plan

        ordinal, stream = bench.device.ordinal, bench.stream.handle
        a, b, out = own_views(product, sets[0])
        call = collect(a, b, out=out, stream=stream)
        assert call.out is not None  # it was given
        normalised = normalised_problem(call, call.out)
        assert normalised is not None  # sizes are at least 1
        planner = planner_of(bench.spec)
        instances = {one.name: one for family in planner.families for one in family.instances()}
        if self._instance not in instances:
            raise UsageError(f"no kernel is called {self._instance!r}; `tilewave bench` shows their names")
        plan = planner.plan_with(normalised.problem, instances[self._instance], schedule)
        prepare_plan(plan, device=ordinal)

        def entry(one: Buffers) -> Entry:
            given = Pointers(one.a.address, one.b.address, one.out.address)
            launches = list(normalised.pointers(given))

            def work() -> None:
                for pointers in launches:
                    launch_plan(plan, pointers, device=ordinal, stream=stream)

            return Entry(work, plan)

        return [entry(one) for one in sets]


class CublasLtContestant:
    """cuBLASLt's first heuristic through nvmath-python's stateful ``Matmul``, planned ahead."""

    def __init__(self) -> None:
        if importlib.util.find_spec("nvmath") is None:
            raise ToolchainError("nvmath is not installed (pip install 'nvmath-python[cu13]')")
        self._library = _library()
        if self._library is None:
            raise ToolchainError("nvmath works on arrays of torch or cupy, and neither can be used")
        try:
            self._advanced: Any = importlib.import_module("nvmath.linalg.advanced")
            nvmath: Any = importlib.import_module("nvmath")
        except Exception as error:  # it loads libraries of CUDA, which may be missing or too old
            raise ToolchainError(f"nvmath is installed but unusable ({error})") from error
        self.name = f"cuBLASLt through nvmath {nvmath.__version__}"

    def enter(self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers]) -> list[Entry]:
        """An entry for each set, each planned for its own operands."""
        advanced, library = self._advanced, self._library
        assert library is not None  # or the contestant would not exist
        stream = bench.stream.handle
        # In place with beta 0: the result goes to our memory, which is not read.
        compute: Any = importlib.import_module("nvmath.bindings.cublas").ComputeType.COMPUTE_32F
        options = advanced.MatmulOptions(inplace=True, compute_type=compute)

        def entry(one: Buffers) -> Entry:
            a, b, out = views(library, product, one, bench.device.ordinal)
            matmul = advanced.Matmul(a, b, c=out, alpha=1.0, beta=0.0, options=options, stream=stream)
            matmul.plan(preferences=advanced.MatmulPlanPreferences(limit=1), stream=stream)
            return Entry(functools.partial(matmul.execute, stream=stream, release_workspace=False))

        return [entry(one) for one in sets]


_KNOWN: dict[str, Callable[[], Contestant]] = {
    "torch": TorchContestant,
    "cupy": CupyContestant,
    "cublaslt": CublasLtContestant,
}


def contestants(words: Sequence[str]) -> dict[str, Contestant]:
    """The contenders that were asked for, by their words.

    Raises ``UsageError`` for a word that is none, and ``ToolchainError`` for one that cannot be had here.
    """
    twice = next((word for word in words if list(words).count(word) > 1), None)
    if twice is not None:
        raise UsageError(f"contender {twice!r} is named twice")
    found: dict[str, Contestant] = {}
    for word in words:
        if word == "ours" or word.startswith("ours:"):
            found[word] = OurContestant(word.partition(":")[2], _library())
        elif word in _KNOWN:
            found[word] = _KNOWN[word]()
        else:
            raise UsageError(f"contender {word!r} is unknown; {ACCEPTED}")
    return found


def default_contestants() -> tuple[dict[str, Contestant], list[str]]:
    """Ours, cuBLAS by the first framework found, cuBLASLt where nvmath is; and why others are missing."""
    found: dict[str, Contestant] = {"ours": OurContestant("", _library())}
    notes = []
    for word in ("torch", "cupy", "cublaslt"):
        if word == "cupy" and "torch" in found:
            continue
        try:
            found[word] = _KNOWN[word]()
        except ToolchainError as error:
            notes.append(f"no {word}: {error}")
    return found, notes


@functools.cache
def _library() -> str | None:
    """The framework whose arrays operands are; None where there is none."""
    for name in ("torch", "cupy"):
        with contextlib.suppress(ToolchainError):
            _usable(name)
            return name
    return None


def _usable(name: str) -> Any:
    """The framework, which reaches a GPU. Raises ``ToolchainError`` if it cannot."""
    if importlib.util.find_spec(name) is None:
        raise ToolchainError(f"{name} is not installed")
    try:
        module: Any = importlib.import_module(name)
        usable = module.cuda.is_available()
    except Exception as error:  # a broken framework is one more that is not there
        raise ToolchainError(f"{name} is installed but unusable ({error})") from error
    if not usable:
        raise ToolchainError(f"{name} is installed but finds no GPU")
    return module


@contextlib.contextmanager
def strict_float32() -> Iterator[None]:
    """TF32 is off inside, in torch and CuPy where they are loaded, and as it was afterwards."""
    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:
            stack.enter_context(_torch_without_tf32())
        if "cupy" in sys.modules:
            stack.enter_context(_cupy_without_tf32())
        yield


@contextlib.contextmanager
def _torch_without_tf32() -> Iterator[None]:
    """PyTorch 2.9 has an old switch and a new one, and the old one refuses to be read where only the new one
    was used; setting the old one sets both.
    """
    torch = sys.modules["torch"]
    matmul = torch.backends.cuda.matmul
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the old switch
        new = getattr(matmul, "fp32_precision", None)
        try:
            old, precision = matmul.allow_tf32, torch.get_float32_matmul_precision()
            matmul.allow_tf32 = False
        except RuntimeError:
            old, precision = None, ""
            matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if old is not None:
                matmul.allow_tf32 = old
            if precision == "medium":  # more than the switch can say
                torch.set_float32_matmul_precision(precision)
            if new is not None:
                matmul.fp32_precision = new


@contextlib.contextmanager
def _cupy_without_tf32() -> Iterator[None]:
    """CuPy asks a variable of the environment at each product."""
    before = os.environ.pop("CUPY_TF32", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUPY_TF32"] = before
