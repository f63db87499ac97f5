"""Results in the library of the operands: memory for them on a GPU, and host results handed back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.arrays import ArrayView, torch_stream
from tilewave.semantics import contiguous


def empty_on_device(framework: str, shape: tuple[int, ...], device: int, stream: int) -> ArrayView:
    """Uninitialised float32 memory on a GPU, allocated by ``framework`` in the order of ``stream``.

    PyTorch's and CuPy's pools reuse memory within a stream without waiting, so that memory for work on
    another stream than their current one is taken from that stream's pool.
    """
    if framework == "torch":
        torch = sys.modules["torch"]
        with _torch_on(torch, device, stream):
            owner = torch.empty(shape, dtype=torch.float32, device=f"cuda:{device}")
            address = int(owner.data_ptr())
    elif framework == "cupy":
        cupy = sys.modules["cupy"]
        with _cupy_on(cupy, device, stream):
            owner = cupy.empty(shape, dtype=np.float32)
            address = int(owner.data.ptr)
    else:
        from tilewave.runtime.shared import SharedArray

        owner = SharedArray.allocate(shape, device, stream)
        address = owner.address
    return ArrayView(owner, framework, address, contiguous(shape), device)


def finished(framework: str, array: Any) -> Any:
    """What the caller is given for memory of `empty_on_device`: JAX takes it over, the others have it."""
    return sys.modules["jax"].dlpack.from_dlpack(array) if framework == "jax" else array


def written(view: ArrayView) -> Any:
    """The caller's out, after it was written; PyTorch is told, so that a gradient that needs the old values
    raises instead of using the new ones."""
    if view.framework == "torch" and not view.owner.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(view.owner)
    return view.owner


def keep_tensors(tensors: Sequence[Any], stream: int, device: int) -> None:
    """Tell PyTorch that work on a stream uses tensors, where that is not its current stream.

    Their memory is not given to others then before the stream has passed this point. PyTorch asks the stream
    when a tensor is freed, so it is told of one that still exists then.
    """
    if not tensors or stream == torch_stream(device):
        return
    from tilewave.runtime.interop import lasting_stream

    cuda = sys.modules["torch"].cuda
    user = cuda.ExternalStream(lasting_stream(stream, device), device=f"cuda:{device}")
    for tensor in tensors:
        tensor.record_stream(user)


def from_host(framework: str, array: NDArray[np.float32]) -> Any:
    """A result on the host in the library of the operands."""
    if framework == "torch":
        return sys.modules["torch"].from_numpy(array)
    if framework == "jax":
        return sys.modules["jax"].numpy.asarray(array)
    return array if array.ndim else array[()]  # NumPy's own functions return a scalar here


@contextlib.contextmanager
def _torch_on(torch: Any, device: int, stream: int) -> Iterator[None]:
    if stream == torch_stream(device):
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=f"cuda:{device}")):
        yield


@contextlib.contextmanager
def _cupy_on(cupy: Any, device: int, stream: int) -> Iterator[None]:
    with cupy.cuda.Device(device):
        if stream == int(cupy.cuda.get_current_stream().ptr):
            yield
            return
        with cupy.cuda.ExternalStream(stream, device):
            yield
