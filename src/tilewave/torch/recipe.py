"""What a call of gemm says besides its tensors, and which tensors PyTorch must be asked about."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from tilewave.call import scalar
from tilewave.errors import UsageError
from tilewave.messages import shown
from tilewave.planner.gemm.options import OFFERED
from tilewave.planner.schedules import PIECE_BOUNDS, Schedule
from tilewave.problem import Activation

ACTIVATION_NAMES = {
    Activation.NONE: None,
    Activation.RELU: "relu",
    Activation.GELU: "gelu",
    Activation.GELU_TANH: "gelu_tanh",
    Activation.SILU: "silu",
}
"""Activations as the operators of `tilewave.torch` spell them."""


class Recipe(NamedTuple):
    """The arguments of `tilewave.gemm` that are no tensors, as plain values that a graph can hold.

    They are the keyword-only arguments of the operators in the namespace ``torch.ops.tilewave``, by the same
    names and with the same defaults.
    """

    alpha: float = 1.0
    beta: float = 0.0
    bias_axis: int = -1
    activation: str | None = None
    transpose_a: bool = False
    transpose_b: bool = False
    precision: str = "ieee"
    schedule: str | None = None
    deterministic: bool = True
    batch_invariant: bool = False
    max_sms: int | None = None
    workspace_limit: int | None = None

    def arguments(self) -> dict[str, Any]:
        """As arguments of `tilewave.gemm`."""
        arguments = self._asdict()
        arguments["workspace"] = arguments.pop("workspace_limit")
        return arguments

    def of_gradient(self, transpose_a: bool, transpose_b: bool, alpha: float) -> Recipe:
        """A plain product under the same promises; its schedule is the planner's, for it has other sizes."""
        return Recipe(
            alpha=alpha,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            precision=self.precision,
            deterministic=self.deterministic,
            batch_invariant=self.batch_invariant,
            max_sms=self.max_sms,
            workspace_limit=self.workspace_limit,
        )


PLAIN = Recipe()
"""A product and nothing else."""


def spelled(schedule: Any) -> str | None:
    """A schedule as a graph can hold it: its kind, and its pieces behind a colon."""
    if schedule is None or isinstance(schedule, str):
        return None if schedule is None else str(schedule)
    if not isinstance(schedule, Schedule) or schedule.kind not in OFFERED:
        raise UsageError(
            f"schedule is {shown(schedule)}; where a product is differentiated, compiled or mapped, accepted "
            f"are None and the names {', '.join(OFFERED)}, with a number of pieces behind a colon if wanted"
        )
    least, most = PIECE_BOUNDS[schedule.kind]
    return str(schedule.kind) if least == most else f"{schedule.kind}:{schedule.pieces}"


def rounded(value: Any, name: str) -> float:
    """alpha or beta as the kernel receives it; while PyTorch compiles, it is rounded where it arrives."""
    return value if torch.compiler.is_compiling() else scalar(value, name)


PASSIVE_MODES: set[type] = {DeviceContext}
"""Modes of PyTorch's functions that have nothing to say about a product of tilewave."""


# Looked up once: these are asked in every product.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state


def watching() -> bool:
    """Whether a mode of PyTorch's functions is active that may want to see products."""
    count = _function_modes()
    return count > 0 and any(
        type(torch._C._get_function_stack_at(place)) not in PASSIVE_MODES for place in range(count)
    )


PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors to which PyTorch's functions do nothing beside their work."""


def is_plain(*tensors: Any) -> bool:
    """Whether these are nothing but memory with a shape, and nobody watches what is done with them.

    A transform of ``torch.func``, a dispatch mode (fake tensors, tracing), forward-mode AD and a subclass
    must all be asked; they are by going through PyTorch's dispatcher. None is plain.
    """
    for tensor in tensors:
        if tensor is not None and not (type(tensor) in PLAIN_TYPES and (tensor.is_cuda or tensor.is_cpu)):
            return False
    return not (
        _dispatch_modes()
        or _transforms()
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or watching()
    )


def wants_gradient(*tensors: Any) -> bool:
    """Whether PyTorch records what is done with any of these for a backward pass."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
