"""Products in precision ``fp16x3`` on a GPU: packed and multiplied in one stream, and waited for nowhere."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewave.device.driver import bindings
from tilewave.errors import CaptureError
from tilewave.kernels import fp16x3
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.build import compile_instance
from tilewave.kernels.instances import Instance
from tilewave.planner.fp16x3 import plan_fp16x3
from tilewave.planner.gemm.records import GemmPlan
from tilewave.problem import GemmProblem
from tilewave.runtime import driver
from tilewave.runtime.execute import lacks_loops, launch_plan, workspace_of_plan
from tilewave.runtime.fp16x3_steps import Step, packing_steps, steps
from tilewave.runtime.kernels import GpuState, gpu_state, is_capturing
from tilewave.runtime.loop_launcher import load_kernel
from tilewave.runtime.tensor_maps import encode_for_driver
from tilewave.runtime.workspace import workspace_pool

if TYPE_CHECKING:
    from tilewave.packed import Packed
    from tilewave.planner.gemm.options import PlanOptions

_KEPT_PLANS = 1024
_KEPT_PRODUCTS = 64
"""Launches of products that are kept packed, by everything that they depend on."""


class Launch:
    """A step with its arguments where the driver reads them."""

    def __init__(self, step: Step, handle: Any) -> None:
        self._handle = handle
        self._step = step
        self._blocks = [ctypes.create_string_buffer(one, len(one)) for one in step.arguments]
        self._parameters = (ctypes.c_void_p * len(self._blocks))(*map(ctypes.addressof, self._blocks))
        self._config: Any = None
        attributes = _attributes(step)
        if attributes:
            cuda = bindings()
            config = self._config = cuda.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = step.blocks, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = step.threads, 1, 1
            config.sharedMemBytes = step.instance.shared_bytes
            config.attrs, config.numAttrs = attributes, len(attributes)

    def submit(self, stream: int) -> None:
        """Launch on a stream."""
        parameters = ctypes.addressof(self._parameters)
        if self._config is not None:
            self._config.hStream = stream
            driver._call("cuLaunchKernelEx", self._config, self._handle, parameters, 0)
            return
        step = self._step
        shape = (step.blocks, 1, 1, step.threads, 1, 1, step.instance.shared_bytes)
        driver._call("cuLaunchKernel", self._handle, *shape, stream, parameters, 0)


def _attributes(step: Step) -> list[Any]:
    """What a launch asks of the driver beside its shape."""
    cuda, found = bindings(), []
    kinds = cuda.CUlaunchAttributeID
    if step.early:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        found.append(attribute)
    if step.cluster > 1:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = step.cluster, 1, 1
        found.append(attribute)
    return found


class ModeState:
    """What this mode keeps for one GPU: kernels, plans, and the launches of late products."""

    def __init__(self, state: GpuState) -> None:
        self.state = state
        self._lock = threading.Lock()
        self._kernels: dict[str, Any] = {}
        self._libraries: list[Any] = []
        self._plans: OrderedDict[tuple[GemmProblem, PlanOptions], GemmPlan] = OrderedDict()
        self._launches: OrderedDict[Any, list[Launch]] = OrderedDict()

    def kernel(self, instance: Instance, stream: int) -> Any:
        """The handle to launch a kernel of the mode by; loaded at its first use, outside any capture."""
        handle = self._kernels.get(instance.name)
        if handle is not None:
            return handle
        if is_capturing(stream):
            raise CaptureError(
                f"{instance} would have to be loaded while the stream is captured into a graph: call "
                "tilewave.prepare() with this product before the capture begins"
            )
        program, kernel = compile_instance(instance, fp16x3.ARCHITECTURE)
        with self._lock, self.state.context():
            if instance.name not in self._kernels:
                library, handle = load_kernel(program.cubin, kernel, instance, self.state.handle)
                self._libraries.append(library)
                self._kernels[instance.name] = handle
            return self._kernels[instance.name]

    def plan(self, problem: GemmProblem, options: PlanOptions, stream: int) -> GemmPlan:
        """The plan of a problem, from those kept if it is there; its kernels run here with their loops."""
        key = (problem, options)
        with self._lock:
            plan = self._plans.get(key)
        while plan is None or lacks_loops(plan, self.state.ordinal, stream):
            plan = plan_fp16x3(problem, self.state.spec, options)
        self._keep(self._plans, key, plan, _KEPT_PLANS)
        return plan

    def launches(
        self,
        plan: GemmPlan,
        pointers: Pointers,
        scalars: tuple[float, float],
        memory: int,
        kept: tuple[int | None, int | None],
        stream: int,
    ) -> list[Launch]:
        """The launches of a product, whose workspace begins at address ``memory``."""
        # Scalars by their bits' spelling: 0.0 and -0.0 are equal keys otherwise.
        key = (
            plan.problem,
            plan.instance.name,
            plan.cut,
            pointers,
            tuple(map(float.hex, scalars)),
            memory,
            kept,
        )
        with self._lock:
            found = self._launches.get(key)
        if found is None:
            found = [
                Launch(step, self.kernel(step.instance, stream))
                for step in steps(
                    plan,
                    pointers,
                    *scalars,
                    memory=memory,
                    encode=encode_for_driver,
                    kept_a=kept[0],
                    kept_b=kept[1],
                )
            ]
        self._keep(self._launches, key, found, _KEPT_PRODUCTS)
        return found

    def _keep(self, cache: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
        with self._lock:
            cache[key] = value
            cache.move_to_end(key)
            if len(cache) > most:
                cache.popitem(last=False)


def run(
    problem: GemmProblem,
    pointers: Pointers,
    alpha: float,
    beta: float,
    *,
    device: int,
    stream: int,
    options: PlanOptions,
    workspace: tuple[int, int] | None = None,
    packed: Sequence[Packed] = (),
) -> GemmPlan:
    """Plan a problem for GPU ``device`` and submit it to ``stream``; nothing waits for it.

    As `runtime.execute.run`; ``packed`` may hold operands that were packed ahead. The plan tells whether
    ``fp16x3`` ran or ``ieee``, and why.
    """
    plan = mode_state(device).plan(problem, options, stream)
    if plan.instance.family == fp16x3.FAMILY:
        kept = _kept(plan, pointers, packed) if packed else (None, None)
        launch_fp16x3(
            plan, pointers, alpha, beta, device=device, stream=stream, workspace=workspace, kept=kept
        )
    else:
        launch_plan(plan, pointers, alpha, beta, device=device, stream=stream, workspace=workspace)
    return plan


def _kept(plan: GemmPlan, pointers: Pointers, packed: Sequence[Packed]) -> tuple[int | None, int | None]:
    """The addresses of the plan's operands where they were packed ahead."""
    operands = fp16x3.operands_of(plan.problem)

    def kept(operand: fp16x3.UnpackedOperand, source: int) -> int | None:
        found = (one.address_for(operand, source) for one in packed)
        return next((address for address in found if address is not None), None)

    return kept(operands[0], pointers.a), kept(operands[1], pointers.b)


def pack_on_gpu(
    operand: fp16x3.UnpackedOperand, source: int, memory: int, *, device: int, stream: int
) -> None:
    """Pack an operand into ``memory``, with its scratch memory behind, and wait until that is done."""
    mode = mode_state(device)
    target = fp16x3.aligned(memory)
    addresses = fp16x3.PackedAddresses.at(target, operand)
    with mode.state.context():
        for step in packing_steps([(operand, source, addresses, target + operand.packed_bytes)]):
            Launch(step, mode.kernel(step.instance, stream)).submit(stream)
        driver._call("cuStreamSynchronize", stream)


def launch_fp16x3(
    plan: GemmPlan,
    pointers: Pointers,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    device: int,
    stream: int,
    workspace: tuple[int, int] | None = None,
    kept: tuple[int | None, int | None] = (None, None),
) -> None:
    """Submit a plan of the mode to a stream; ``kept`` are the addresses of operands packed ahead."""
    mode = mode_state(device)
    kept_a, kept_b = (address is not None for address in kept)
    if kept_a or kept_b:
        plan = replace(plan, mode_workspace=(fp16x3.workspace_bytes(plan.problem, kept_a, kept_b), 0))
    with mode.state.context(), workspace_pool(mode.state).submitting:
        _, memory = workspace_of_plan(plan, device, stream, workspace)
        for launch in mode.launches(plan, pointers, (alpha, beta), memory, kept, stream):
            launch.submit(stream)


def prepare_fp16x3(plan: GemmPlan, *, device: int, branches: int = 1) -> None:
    """Load the kernels of a plan of the mode and set workspace aside, so that it can be captured."""
    mode = mode_state(device)
    with mode.state.context():
        for instance in (plan.instance, fp16x3.SCAN, fp16x3.PACK, fp16x3.COLUMNS):
            mode.kernel(instance, 0)
        workspace_pool(mode.state).reserve(plan.ticket_bytes, plan.partial_bytes, branches)


_modes: dict[int, ModeState] = {}
_modes_lock = threading.Lock()


def mode_state(device: int) -> ModeState:
    """The mode's state on GPU ``device``."""
    with _modes_lock:
        mode = _modes.get(device)
        if mode is None:
            mode = _modes[device] = ModeState(gpu_state(device))
        return mode
