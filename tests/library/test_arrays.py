"""Arrays of each library as addresses, shapes and strides; what cannot be taken as it is."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from host_gpu import LASTING_OFFSET, CupyArray, ExchangedArray, FakeGpu, InterfaceArray, TorchTensor
from numpy.lib.stride_tricks import as_strided

import tilewave
from tilewave import dlpack
from tilewave.arrays import ANYWHERE, view_of
from tilewave.errors import OperandTypeError, UsageError

Rng = np.random.Generator
F = np.float32


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)


def every_kind(host: np.ndarray[Any, Any]) -> list[Any]:
    return [CupyArray(host), TorchTensor(host), InterfaceArray(host)]


def test_address_shape_and_strides(gpu: FakeGpu, rng: Rng) -> None:
    base = rng.standard_normal((6, 7, 8), dtype=F)
    for host in (base, base.T, base[::2, 1:], base[::-1, :, ::-2], np.broadcast_to(base[:1], (6, 7, 8))):
        for array in every_kind(host):
            view = view_of(array, "a")
            assert view.address == host.ctypes.data
            assert view.layout.shape == host.shape
            assert view.layout.strides == tuple(stride // 4 for stride in host.strides)
            assert view.device == 0
            assert view.host is None


def test_alignment_is_that_of_the_address(gpu: FakeGpu) -> None:
    storage = np.zeros(64, F)
    start = -storage.ctypes.data % 16 // 4
    for offset, alignment in ((0, 16), (1, 4), (2, 8), (3, 4), (4, 16)):
        for array in every_kind(storage[start + offset :]):
            assert view_of(array, "a").alignment == alignment


def test_empty_arrays_lie_nowhere(gpu: FakeGpu) -> None:
    empty = np.empty((3, 0, 2), F)
    for array in every_kind(empty):
        view = view_of(array, "a")
        assert (view.address, view.layout.shape) == (0, (3, 0, 2))
        assert view.alignment == 16
    assert view_of(InterfaceArray(empty), "a").device == ANYWHERE


def test_interface_without_strides_is_in_c_order(gpu: FakeGpu) -> None:
    host = np.zeros((4, 5, 6), F)
    assert view_of(InterfaceArray(host, contiguous=True), "a").layout.strides == (30, 6, 1)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_of_both_versions(gpu: FakeGpu, rng: Rng, old: bool) -> None:
    host = rng.standard_normal((4, 5), dtype=F)
    produced = ExchangedArray(host, old=old)
    view = view_of(produced, "a", 7)
    assert (view.address, view.layout) == (host.ctypes.data, ((4, 5), (5, 1)))
    assert produced.streams == [7]


def test_host_dlpack_is_seen_through_numpy(rng: Rng) -> None:
    class Exchanged:
        def __init__(self, host: np.ndarray[Any, Any]) -> None:
            self.host = host

        def __dlpack__(self, **arguments: Any) -> object:
            return self.host.__dlpack__(**arguments)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.host.__dlpack_device__()

    a = rng.standard_normal((4, 5), dtype=F)
    got = tilewave.matmul(Exchanged(a[::-1]), Exchanged(a.T))
    assert np.array_equal(got, np.matmul(a[::-1], a.T))
    with pytest.raises(OperandTypeError, match="a is float64"):
        tilewave.matmul(Exchanged(a.astype(np.float64)), a.T)


def test_byte_strides_and_addresses_that_no_gpu_takes(gpu: FakeGpu) -> None:
    odd = np.zeros((4, 4), [("pad", "u1"), ("value", "<f4")])["value"]
    for array in (CupyArray(odd), InterfaceArray(odd)):
        with pytest.raises(UsageError, match=r"a has strides of .* bytes; accepted are multiples of 4"):
            view_of(array, "a")
    shifted = np.frombuffer(bytearray(41), np.uint8)[1:].view(F)
    for array in every_kind(shifted):
        with pytest.raises(UsageError, match="multiple of 4"):
            view_of(array, "a")
    # Strides of axes that are never stepped along may be anything.
    single = as_strided(np.zeros((1, 4), F), (1, 4), (7, 4))
    assert view_of(CupyArray(single), "a").layout.shape == (1, 4)


def test_masked_arrays_and_arrays_with_a_meaning_of_their_own(rng: Rng) -> None:
    a = rng.standard_normal((3, 3), dtype=F)

    class Quantity(np.ndarray[Any, Any]):
        def __array_ufunc__(self, *arguments: Any, **keywords: Any) -> Any:
            return NotImplemented

    class Plain(np.ndarray[Any, Any]):
        pass

    with pytest.raises(OperandTypeError, match=r"b is a masked array.*b\.filled\(0\)"):
        tilewave.matmul(a, np.ma.array(a, mask=a > 0))
    with pytest.raises(OperandTypeError, match="Quantity, which gives products a meaning of its own"):
        tilewave.matmul(a.view(Quantity), a)
    got = tilewave.matmul(a.view(Plain), a)
    assert type(got) is np.ndarray
    assert np.array_equal(got, a @ a)


def test_read_only_arrays_are_operands_and_never_out(gpu: FakeGpu, rng: Rng) -> None:
    a = rng.standard_normal((3, 3), dtype=F)
    a.flags.writeable = False
    assert np.array_equal(tilewave.matmul(a, a), a @ a)
    with pytest.raises(UsageError, match="out is read-only"):
        tilewave.matmul(a, a, out=a)
    locked = InterfaceArray(a, data=(a.ctypes.data, True))
    with pytest.raises(UsageError, match="out is read-only"):
        tilewave.matmul(locked, locked, out=locked)
    assert gpu.run.submissions == []


def test_what_is_no_array() -> None:
    a = np.ones((3, 3), F)
    for thing in ("text", None, object(), {"a": 1}, [[1, 2], [3]], [object()]):
        with pytest.raises(OperandTypeError, match=r"^b is "):
            tilewave.matmul(a, thing)
    for thing in ("text", object(), [1.0], 3):
        with pytest.raises(OperandTypeError, match=r"^out is "):
            tilewave.matmul(a, a, out=thing)


def test_lists_are_what_numpy_makes_of_them() -> None:
    with pytest.raises(OperandTypeError, match=r"a is float64 .*numpy\.asarray\(a, numpy\.float32\)"):
        tilewave.matmul([[1.0, 2.0]], np.ones((2, 1), F))
    rows = [np.arange(3, dtype=F), np.ones(3, F)]
    assert np.array_equal(tilewave.matmul(rows, np.ones((3, 1), F)), [[3], [3]])


def test_the_cast_is_in_the_words_of_the_library(gpu: FakeGpu) -> None:
    half = np.ones((3, 3), np.float16)
    for array, words in (
        (half, r"a\.astype\(numpy\.float32\)"),
        (CupyArray(half), r"a\.astype\(cupy\.float32\)"),
        (TorchTensor(half), r"a\.float\(\)"),
    ):
        with pytest.raises(OperandTypeError, match=f"a is float16 of shape .*{words}"):
            view_of(array, "a")


def test_torch_tensors_that_do_not_hold_what_they_mean(gpu: FakeGpu) -> None:
    host = np.ones((3, 3), F)
    for traits, words in (
        ({"layout": "torch.sparse_coo"}, r"layout torch\.sparse_coo.*to_dense\(\)"),
        ({"negated": True}, r"resolve_neg\(\)"),
        ({"without_memory": True}, "without memory of its own"),
        ({"device": "meta"}, "accepted are tensors on cuda and cpu"),
    ):
        with pytest.raises(UsageError, match=words):
            view_of(TorchTensor(host, **traits), "a")
    # As an array a tensor has no gradient: `tilewave.tensors` asks about that before a product is made.
    assert view_of(TorchTensor(host, requires_grad=True), "a").layout.shape == (3, 3)


def test_torch_tensors_of_the_host(gpu: FakeGpu, rng: Rng) -> None:
    a = rng.standard_normal((3, 4), dtype=F)
    got = tilewave.matmul(TorchTensor(a, "cpu"), TorchTensor(a.T, "cpu"))
    assert isinstance(got, TorchTensor)
    assert np.array_equal(got.host, np.matmul(a, a.T))


def test_torch_is_told_of_work_on_another_stream(gpu: FakeGpu, rng: Rng) -> None:
    a, out = TorchTensor(rng.standard_normal((3, 3), dtype=F)), TorchTensor(np.zeros((3, 3), F))
    with gpu.torch.on(0x52):
        tilewave.matmul(a, a, out=out)
        assert a.used_by == out.used_by == []
        tilewave.matmul(a, a, out=out, stream=0x52)
        assert a.used_by == out.used_by == []
        tilewave.matmul(a, a, out=out, stream=0x77)
    assert set(a.used_by) == set(out.used_by) == {0x77 + LASTING_OFFSET}


@pytest.mark.parametrize("grouped", [False, True])
def test_torch_is_told_of_workspace_on_another_stream(gpu: FakeGpu, rng: Rng, grouped: bool) -> None:
    """Nobody but the call may hold it, and its memory would be given to others at once."""
    a, out = TorchTensor(rng.standard_normal((3, 3), dtype=F)), TorchTensor(np.zeros((3, 3), F))
    memory = TorchTensor(np.zeros(1 << 16, F))
    for stream in (0x52, 0x77):
        with gpu.torch.on(0x52):
            if grouped:
                tilewave.grouped_gemm([(a, a)] * 2, workspace=memory, stream=stream)
            else:
                tilewave.gemm(a, a, out=out, workspace=memory, stream=stream)
        assert set(memory.used_by) == ({0x77 + LASTING_OFFSET} if stream == 0x77 else set())


def test_torch_is_told_of_a_write(gpu: FakeGpu, rng: Rng) -> None:
    a, out = TorchTensor(rng.standard_normal((3, 3), dtype=F)), TorchTensor(np.zeros((3, 3), F))
    tilewave.matmul(a, a, out=out)
    assert gpu.torch.changed == [out]


def test_traced_and_sharded_jax_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = type("DynamicJaxprTracer", (type("Tracer", (), {"__module__": "jax._src.core"}),), {})
    with pytest.raises(UsageError, match="traced by JAX"):
        view_of(tracer(), "a")


class TestDlpack:
    def test_an_unconsumed_capsule_lets_go(self) -> None:
        owner = np.zeros(4, F)
        before = sys.getrefcount(owner)
        capsule = dlpack.make_capsule(owner, owner.ctypes.data, (4,), 0)
        assert sys.getrefcount(owner) == before + 1
        del capsule
        gc.collect()
        assert sys.getrefcount(owner) == before

    def test_a_view_keeps_the_memory(self) -> None:
        owner = np.zeros(4, F)
        before = sys.getrefcount(owner)
        seen = dlpack.read_capsule(dlpack.make_capsule(owner, owner.ctypes.data, (2, 2), 3))
        assert (seen.shape, seen.strides, seen.dtype) == ((2, 2), (2, 1), "float32")
        assert (seen.device_type, seen.device_id, seen.readonly) == (dlpack.CUDA, 3, False)
        assert sys.getrefcount(owner) == before + 1
        del seen
        gc.collect()
        assert sys.getrefcount(owner) == before

    def test_numpy_reads_what_we_write_and_we_what_numpy_writes(self, rng: Rng) -> None:
        host = rng.standard_normal((3, 5), dtype=F)[:, ::2]
        for capsule in (host.__dlpack__(), host.__dlpack__(max_version=(1, 0))):
            seen = dlpack.read_capsule(capsule)
            assert (seen.address, seen.shape) == (host.ctypes.data, host.shape)
            assert seen.strides == (5, 2)
            assert seen.device_type == dlpack.CPU
        locked = host.copy()
        locked.flags.writeable = False
        assert dlpack.read_capsule(locked.__dlpack__(max_version=(1, 0))).readonly

    def test_other_dtypes_have_their_names(self) -> None:
        for dtype in ("float16", "float64", "int8", "uint32", "bool", "complex64"):
            assert dlpack.read_capsule(np.zeros(3, dtype).__dlpack__()).dtype == dtype

    def test_what_is_no_capsule(self) -> None:
        with pytest.raises(UsageError, match="no DLPack capsule"):
            dlpack.read_capsule(object())
