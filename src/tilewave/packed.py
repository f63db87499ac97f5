"""Operands packed ahead for precision ``fp16x3``: scaled and split once, used in many products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewave.errors import CaptureError, UsageError
from tilewave.messages import shown

# What only a packed operand needs is imported where one is made: every call looks for the class.
if TYPE_CHECKING:
    from tilewave.arrays import ArrayView
    from tilewave.kernels.fp16x3 import UnpackedOperand
    from tilewave.runtime.shared import SharedArray


class Packed:
    """An array, and what `prepack` made of it; takes its place as an operand of `matmul` and `gemm`.

    ``array`` is the array itself, which products read where they do not run in the mode, and for elements
    that the mode leaves to ``ieee``: it must live on, and must not be changed. ``nbytes`` is the GPU memory
    that the packed form takes; 0 where nothing was packed.
    """

    def __init__(
        self, array: Any, view: ArrayView, operand: UnpackedOperand, storage: SharedArray | None
    ) -> None:
        self.array = array
        self.operand = operand
        self.device = view.device
        self.source = view.address
        self.shape = view.layout.shape
        self._storage = storage

    def __repr__(self) -> str:
        place = "nothing packed" if self._storage is None else f"{self.nbytes:,} bytes on GPU {self.device}"
        return f"Packed({type(self.array).__name__} of shape {self.shape}, {place})"

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the packed form takes."""
        return self.operand.packed_bytes if self._storage is not None else 0

    def address_for(self, operand: UnpackedOperand, source: int) -> int | None:
        """Where the packed form lies, if it is that of this operand at this address, else None."""
        if self._storage is None or source != self.source:
            return None
        if operand != self.operand and not self.operand.packs_as(operand):
            return None
        from tilewave.kernels.fp16x3 import aligned

        return aligned(self._storage.address)


def prepack(array: Any, *, operand: str = "b", transpose: bool = False, stream: Any = None) -> Packed:
    """Pack an operand of products in precision ``fp16x3`` that is used again: constant weights, say.

    ``array`` is a float32 matrix, or a batch of them, on a GPU. ``operand`` is the place that it will take:
    "b", of shape (..., K, N), or "a", of shape (..., M, K); ``transpose`` stands for ``transpose_b=True`` or
    ``transpose_a=True`` of `gemm`. What is returned takes the array's place in `matmul` and `gemm`. Results
    have the same bits as with the array, which must not be changed as long as the packed form is used.

    The packed form takes 4 bytes an element, K rounded up to a multiple of 64. Where it does not fit a
    product (the place, a transposition or a batch is another one), the array is packed anew for it. In other
    modes, on the host, and on GPUs that are no Hopper, nothing is packed and the array itself is used. The
    work is submitted to ``stream``, by default the current one of the array's library, and waited for; it may
    not be captured.

    Raises ``OperandTypeError`` and ``UsageError`` as `gemm` does.
    """
    from tilewave.arrays import current_stream, view_of
    from tilewave.runtime.interop import stream_handle

    if not isinstance(operand, str) or operand not in ("a", "b"):
        raise UsageError(f"operand is {shown(operand)}; accepted are 'a' and 'b'")
    if not isinstance(transpose, bool):
        raise UsageError(f"transpose must be True or False, not {shown(transpose)}")
    if isinstance(array, Packed):
        raise UsageError("array is packed already; accepted is a float32 array")
    handle = (current_stream(array) or 0) if stream is None else stream_handle(stream)
    view = view_of(array, "array", handle)
    found = _as_operand(view, (operand == "b") is not transpose)
    storage = None
    if view.device is not None and found.packed_rows and found.k:
        storage = _packed_on_gpu(view, found, handle)
    return Packed(array, view, found, storage)


def _as_operand(view: ArrayView, columns: bool) -> UnpackedOperand:
    """The array as it is packed: its columns are the packed rows, or its rows are."""
    from tilewave.kernels import fp16x3

    shape, strides = view.layout.shape, view.layout.strides
    if len(shape) < 2:
        raise UsageError(
            f"array of {view.layout} has {len(shape)} axes; accepted are matrices and batches of them"
        )
    packed, along_k = (-1, -2) if columns else (-2, -1)
    found = fp16x3.unpacked_operand(
        shape[packed],
        shape[along_k],
        strides[packed],
        strides[along_k],
        *fp16x3.merged_axes(strides[:-2], shape[:-2]),
        view.alignment,
    )
    if found.k >= fp16x3.K_LIMIT:
        raise UsageError(f"K is {found.k}; accepted by precision 'fp16x3' is less than 2^24")
    return found


def _packed_on_gpu(view: ArrayView, operand: UnpackedOperand, stream: int) -> SharedArray | None:
    """The packed form in memory of its own, or None on a GPU that is no Hopper."""
    from tilewave.kernels.fp16x3 import PACKED_ALIGNMENT
    from tilewave.planner.fp16x3 import COMPUTE_CAPABILITY
    from tilewave.runtime.fp16x3 import pack_on_gpu
    from tilewave.runtime.kernels import gpu_state, is_capturing
    from tilewave.runtime.shared import SharedArray

    assert view.device is not None  # the array is on a GPU
    if gpu_state(view.device).spec.compute_capability != COMPUTE_CAPABILITY:
        return None
    if is_capturing(stream):
        raise CaptureError("prepack would allocate memory while the stream is captured: call it before")
    floats = (operand.packed_bytes + operand.scratch_bytes + PACKED_ALIGNMENT) // 4
    storage = SharedArray.allocate((floats,), view.device, stream)
    pack_on_gpu(operand, view.address, storage.address, device=view.device, stream=stream)
    return storage
