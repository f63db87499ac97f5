"""Arrays of any library as addresses, shapes and strides: NumPy, PyTorch, CuPy, JAX, DLPack, CUDA interface.

No framework is imported: an object of one exists only where that framework was imported already. Nothing is
copied. What cannot be taken as it is (another dtype, a lazily negated view, a traced or sharded array) is
refused with a message that names the operand and the remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewave import dlpack
from tilewave.errors import OperandTypeError, TilewaveError, UsageError
from tilewave.messages import kind_of, shape_and_strides
from tilewave.semantics import Layout, alignment_of

FLOAT_BYTES = 4
ANYWHERE = -1
"""Device of an empty array whose library does not say where it would lie: it goes with any other."""

ACCEPTED = (
    "accepted are float32 arrays of NumPy, PyTorch, CuPy, JAX, or any with __dlpack__ or "
    "__cuda_array_interface__"
)


class ArrayView(NamedTuple):
    """A float32 array in memory.

    ``address`` is that of the element with all indices 0 (0 for an empty array without memory); ``device`` is
    the number of the GPU, or None for the host, where ``host`` is the same memory as a NumPy array.
    ``producer_stream`` is a stream whose work must be waited for before the array is touched.
    ``owner`` keeps the memory alive.
    """

    owner: Any
    framework: str
    address: int
    layout: Layout
    device: int | None
    host: NDArray[np.float32] | None = None
    readonly: bool = False
    producer_stream: int | None = None

    @property
    def alignment(self) -> int:
        """16, 8 or 4: what the address is a multiple of, in bytes; 16 for an empty array."""
        return alignment_of(self.address)

    @property
    def place(self) -> str:
        """Where the array lies, in words."""
        return "the host" if self.device is None else f"GPU {self.device}"


def view_of(array: Any, name: str, stream: int | None = None) -> ArrayView:
    """See ``array`` as memory; ``name`` is what messages call it.

    Arrays that come through DLPack are made ready for work submitted to ``stream`` next. Raises
    ``OperandTypeError`` (a ``TypeError``) for anything but float32 arrays, and ``UsageError`` for float32
    arrays that cannot be taken as they are.
    """
    kind = type(array)
    viewer = _viewers.get(kind)
    if viewer is None:
        known = {"numpy": _view_numpy, "torch": _view_torch, "cupy": _view_cupy, "jax": _view_jax}
        viewer = _viewers[kind] = known.get(_framework(kind), _view_other)
    return viewer(array, name, stream)


def framework_of(array: Any) -> str:
    """The library whose array this is: numpy, torch, cupy, jax, or "" for any other object."""
    return _framework(type(array))


def current_stream(array: Any) -> int | None:
    """The stream on which the array's library works now, or None where it does not say.

    For an object with ``__cuda_array_interface__`` that is the stream named there.
    """
    framework = framework_of(array)
    if framework == "torch":
        return torch_stream(array.get_device()) if array.is_cuda else None
    if framework == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream(array.device.id).ptr)
    if framework or isinstance(array, type):
        return None
    try:
        if hasattr(array, "__dlpack__"):
            return None
        interface = getattr(array, "__cuda_array_interface__", None)
        return None if interface is None else _interface_stream(interface, "the operand")
    except TilewaveError:
        raise
    except Exception:  # no answer of the protocol's: `view_of` says so
        return None


def torch_stream(device: int) -> int:
    """Handle of PyTorch's current stream on a GPU."""
    torch = sys.modules["torch"]
    # Far cheaper than building a Stream object, and what PyTorch's own compiler calls.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(device)) if raw is not None else int(torch.cuda.current_stream(device).cuda_stream)


def refuse_dtype(array: Any, name: str, dtype: str) -> OperandTypeError:
    """The error for an operand that is not float32, with the cast to make in the words of its library."""
    if name == "out":
        return OperandTypeError(
            f"out is {dtype}{shape_and_strides(array)}; the result is float32: allocate out as float32"
        )
    bare = dtype.lstrip("<>=|")
    if bare.startswith("complex"):
        remedy = "complex products are not offered; multiply real and imaginary parts, each as float32"
    else:
        cast = {
            "torch": f"{name}.float()",
            "cupy": f"{name}.astype(cupy.float32)",
            "jax": f"{name}.astype(jax.numpy.float32)",
        }.get(framework_of(array))
        if cast is None:
            exact = hasattr(array, "astype")
            cast = f"{name}.astype(numpy.float32)" if exact else f"numpy.asarray({name}, numpy.float32)"
        remedy = f"cast it yourself, {cast}, where its values allow that"
    return OperandTypeError(
        f"{name} is {dtype}{shape_and_strides(array)}; accepted is float32 only, and nothing is cast: "
        f"{remedy}"
    )


def refuse_layout(tensor: Any, name: str) -> UsageError:
    """The error for a tensor of PyTorch that has no strides."""
    return UsageError(
        f"{name} is a tensor of layout {tensor.layout}; accepted are strided ones: {name}.to_dense()"
    )


def refuse_negated(name: str) -> UsageError:
    """The error for a tensor of PyTorch whose memory holds the negated values."""
    return UsageError(
        f"{name} is a lazily negated view (as .imag of a conjugated tensor is): its memory holds "
        f"the negated values; pass {name}.resolve_neg()"
    )


def _framework(kind: type) -> str:
    if issubclass(kind, np.ndarray):
        return "numpy"
    for framework, attribute in (("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array")):
        base = getattr(sys.modules.get(framework), attribute, None)
        if base is not None and issubclass(kind, base):
            return framework
    return "jax" if _is_tracer(kind) else ""


def _is_tracer(kind: type) -> bool:
    """Whether objects of a type stand for arrays while JAX traces a function."""
    return any(base.__name__ == "Tracer" and base.__module__.startswith("jax") for base in kind.__mro__)


Viewer = Callable[[Any, str, "int | None"], ArrayView]


_viewers: dict[type, Viewer] = {}
"""The way to see arrays of each type of the four libraries that was met."""


def _view_other(array: Any, name: str, stream: int | None) -> ArrayView:
    """An object of no library that is known by name: what it offers may be an attribute of its own."""
    if isinstance(array, type):  # has the attributes of its instances, and no memory
        raise OperandTypeError(f"{name} is the class {array.__name__}; {ACCEPTED}")
    try:
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            return _view_dlpack(array, name, stream)
        if hasattr(array, "__cuda_array_interface__"):
            return _view_cuda_interface(array, name, stream)
    except (TilewaveError, MemoryError):
        raise
    except Exception as error:  # an object may answer anything, or fail in any way
        raise UsageError(
            f"{name} is {kind_of(array)} that cannot be shared: its __dlpack__ or __cuda_array_interface__ "
            f"does not answer as these protocols say ({type(error).__name__}: {error})"
        ) from error
    return _view_array_like(array, name, stream)


def _view_numpy(array: NDArray[Any], name: str, stream: int | None) -> ArrayView:
    kind, owner = type(array), array
    if kind is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise OperandTypeError(
                f"{name} is a masked array, whose mask a product would ignore; fill it first: "
                f"{name}.filled(0)"
            )
        if kind.__array_ufunc__ is not np.ndarray.__array_ufunc__:
            raise OperandTypeError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, which gives products a meaning of its "
                f"own; pass the plain array, numpy.asarray({name})"
            )
        array = array.view(np.ndarray)
    if array.dtype != np.float32 or not array.dtype.isnative:
        described = array.dtype.name if array.dtype.isnative else f"{array.dtype.str} (other byte order)"
        raise refuse_dtype(array, name, described)
    return _host_view(owner, array, name, "numpy")


def _host_view(owner: Any, array: NDArray[np.float32], name: str, framework: str) -> ArrayView:
    address = array.ctypes.data if array.size else 0
    # A field of a structured array may be 4 bytes wide and 5 apart; NumPy itself copes, and so does the host.
    # Rounded towards 0 in both directions, elements that are apart stay apart.
    strides = tuple(
        stride // FLOAT_BYTES if stride >= 0 else -(-stride // FLOAT_BYTES) for stride in array.strides
    )
    return ArrayView(
        owner, framework, address, Layout(array.shape, strides), None, array, not array.flags.writeable
    )


def _view_torch(array: Any, name: str, stream: int | None) -> ArrayView:
    torch = sys.modules["torch"]
    kind = type(array)
    if kind is not torch.Tensor and _dispatch(kind) is not _dispatch(torch.Tensor):
        raise UsageError(
            f"{name} is a {kind.__name__}, which gives products a meaning of its own (a fake, distributed or "
            "otherwise wrapped tensor); pass the plain tensor"
        )
    if array.dtype is not torch.float32:
        raise refuse_dtype(array, name, str(array.dtype).removeprefix("torch."))
    if array.layout is not torch.strided:
        raise refuse_layout(array, name)
    if array.is_nested:
        raise UsageError(f"{name} is a nested tensor; accepted are tensors of one shape: pass its parts")
    if array.is_neg():
        raise refuse_negated(name)
    where = array.device.type
    if where not in ("cpu", "cuda"):
        raise UsageError(f"{name} is a tensor on {array.device}; accepted are tensors on cuda and cpu")
    try:
        address = int(array.data_ptr())
        host: NDArray[np.float32] | None = array.detach().numpy() if where == "cpu" else None
    except RuntimeError as error:  # tensors of torch.func and torch.compile have no memory
        raise UsageError(f"{name} is {kind_of(array)} without memory of its own: {error}") from error
    if host is not None:
        if address == 0 and host.size:
            raise UsageError(
                f"{name} has no memory: the storage of this tensor of shape {tuple(array.shape)} was freed "
                f"(it holds {array.untyped_storage().nbytes()} bytes)"
            )
        return _host_view(array, host, name, "torch")
    layout = Layout(tuple(array.shape), tuple(array.stride()))
    return _device_view(array, "torch", name, address, layout, array.get_device())


def _dispatch(kind: type) -> object:
    return getattr(kind, "__torch_dispatch__", None)


def _view_cupy(array: Any, name: str, stream: int | None) -> ArrayView:
    if array.dtype != np.float32 or not array.dtype.isnative:
        raise refuse_dtype(array, name, str(array.dtype))
    layout = Layout(tuple(array.shape), _elements(tuple(array.strides), tuple(array.shape), name))
    return _device_view(array, "cupy", name, int(array.data.ptr), layout, int(array.device.id))


def _view_jax(array: Any, name: str, stream: int | None) -> ArrayView:
    if _is_tracer(type(array)):
        raise UsageError(
            f"{name} is being traced by JAX (jit, grad, vmap) and holds no values; call this function outside"
        )
    if str(array.dtype) != "float32":
        raise refuse_dtype(array, name, str(array.dtype))
    devices = array.devices()
    if len(devices) != 1:
        raise UsageError(f"{name} is sharded over {len(devices)} devices; accepted are arrays on one device")
    (device,) = devices
    if device.platform == "cpu":
        return _host_view(array, np.asarray(array), name, "jax")
    seen = _from_dlpack(array, name, stream)
    # What JAX shares is immutable, whatever the capsule says.
    return ArrayView(seen.owner, "jax", seen.address, seen.layout, seen.device, None, True)


def _view_dlpack(array: Any, name: str, stream: int | None) -> ArrayView:
    device_type, _ = array.__dlpack_device__()
    if int(device_type) in dlpack.HOST_DEVICES:
        try:
            host: NDArray[Any] = np.from_dlpack(array)
        except BufferError as error:
            raise UsageError(f"{name} cannot be shared through DLPack: {error}") from error
        if host.dtype != np.float32:
            raise refuse_dtype(array, name, host.dtype.name)
        return _host_view(array, host, name, "dlpack")
    return _from_dlpack(array, name, stream)


def _from_dlpack(array: Any, name: str, stream: int | None) -> ArrayView:
    device_type, _ = array.__dlpack_device__()
    if int(device_type) not in dlpack.GPU_DEVICES:
        raise UsageError(
            f"{name} lies on a device of DLPack type {int(device_type)}; accepted are the host and "
            "NVIDIA GPUs"
        )
    try:
        seen = dlpack.exchange(array, 0 if stream is None else stream)
    except (BufferError, UsageError) as error:
        raise UsageError(f"{name} cannot be shared through DLPack: {error}") from error
    if seen.dtype != "float32":
        raise refuse_dtype(array, name, seen.dtype)
    layout = Layout(seen.shape, seen.strides)
    view = _device_view((array, seen.capsule), "dlpack", name, seen.address, layout, seen.device_id)
    return _readonly(view) if seen.readonly else view


def _readonly(view: ArrayView) -> ArrayView:
    return ArrayView(view.owner, view.framework, view.address, view.layout, view.device, view.host, True)


def _view_cuda_interface(array: Any, name: str, stream: int | None) -> ArrayView:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise OperandTypeError(f"{name} is a masked array, whose mask a product would ignore")
    dtype = np.dtype(interface["typestr"])
    if dtype != np.float32 or not dtype.isnative:
        raise refuse_dtype(array, name, dtype.name if dtype.isnative else f"{dtype.str} (other byte order)")
    shape = tuple(int(extent) for extent in interface["shape"])
    address, readonly = interface["data"]
    given = interface.get("strides")
    if given is None:
        steps = [FLOAT_BYTES] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            steps[axis] = steps[axis + 1] * max(1, shape[axis + 1])
        given = tuple(steps)
    layout = Layout(shape, _elements(tuple(given), shape, name))
    device = _device_of(int(address or 0))
    view = _device_view(array, "cuda array interface", name, int(address or 0), layout, device)
    return ArrayView(
        view.owner,
        view.framework,
        view.address,
        layout,
        device,
        None,
        bool(readonly),
        _interface_stream(interface, name),
    )


def _interface_stream(interface: dict[str, Any], name: str) -> int | None:
    """The stream of a CUDA array interface as a handle; None when there is nothing to wait for."""
    stream = interface.get("stream")
    if stream is None:
        return None
    if stream == 0:
        raise UsageError(
            f"the CUDA array interface of {name} names stream 0, which version 3 does not allow: 1 is the "
            "legacy default stream and 2 the one of each thread"
        )
    return int(stream)


def _view_array_like(array: Any, name: str, stream: int | None) -> ArrayView:
    """Lists, scalars and objects with __array__, as `numpy.asarray` sees them."""
    if name == "out":
        raise OperandTypeError(f"out is {kind_of(array)}; {ACCEPTED}")
    try:
        host = np.asarray(array)
    except Exception as error:
        raise OperandTypeError(f"{name} is {kind_of(array)}: {error}; {ACCEPTED}") from error
    if host.dtype.kind not in "biufc" or (host.ndim == 0 and host.dtype != np.float32):
        raise OperandTypeError(f"{name} is {kind_of(array)}; {ACCEPTED}")
    if host.dtype != np.float32:
        raise refuse_dtype(array, name, f"{host.dtype.name} (as numpy.asarray reads it)")
    return _host_view(array, host, name, "numpy")


def _elements(strides: tuple[int, ...], shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Byte strides in elements; those of axes of one element or of empty arrays may be anything."""
    idle = 0 in shape
    for stride, extent in zip(strides, shape, strict=True):
        if stride % FLOAT_BYTES and extent > 1 and not idle:
            raise UsageError(
                f"{name} has strides of {strides} bytes; accepted are multiples of {FLOAT_BYTES}: pass a copy"
            )
    return tuple(stride // FLOAT_BYTES for stride in strides)


def _device_view(
    owner: Any, framework: str, name: str, address: int, layout: Layout, device: int
) -> ArrayView:
    if 0 in layout.shape:
        return ArrayView(owner, framework, 0, layout, device)
    if address == 0:
        raise UsageError(f"{name} has no memory: {kind_of(owner)} of {layout} at address 0")
    if address % FLOAT_BYTES:
        raise UsageError(
            f"{name} lies at address {address:#x}; float32 on a GPU must lie at a multiple of {FLOAT_BYTES}: "
            "pass a copy"
        )
    return ArrayView(owner, framework, address, layout, device)


def _device_of(address: int) -> int:
    """The GPU on which an address lies."""
    if address == 0:
        return ANYWHERE
    from tilewave.runtime.interop import device_of_pointer

    return device_of_pointer(address)


def loaded(framework: str) -> ModuleType:
    """A framework that is known to be imported, because there is an array of it."""
    return sys.modules[framework]
