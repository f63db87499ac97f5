"""Bulk copies, of runs and of tensors: what lands where and when, and which faults are found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.emulator import Memory
from tilewave.emulator.tensor_maps import decode, encode_for_emulator
from tilewave.errors import BarrierError, EmulationError, MemoryFault, RaceError, TilewaveError, UsageError
from tilewave.tensor_map import ELEMENT_BYTES, TensorMap

Generator = np.random.Generator
SHARED = 16384
DECLARATIONS = f".shared .align 1024 .b8 data[{SHARED}]; .shared .align 8 .b8 bars[64];"
PARAMETERS = ".param .align 64 .b8 map[128], .param .u64 q1, .param .u64 q2"
START = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, bars; mov.u32 %r2, data; setp.eq.u32 %p0, %r0, 0;
    mov.b64 %d9, map; cvta.param.u64 %d8, %d9;
    ld.param.u64 %d1, [q1]; ld.param.u64 %d2, [q2];
"""
MAKE = """
    @%p0 mbarrier.init.shared.b64 [%r1], 1; @%p0 fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = """
W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra W;
"""
FILL = f"""
    shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; mov.u32 %r5, 0x7fff7fff;
P:  st.shared.u32 [%r4], %r5; add.u32 %r4, %r4, 512; add.u32 %r3, %r3, 512;
    setp.lt.u32 %p2, %r3, {SHARED}; @%p2 bra P; fence.proxy.async; bar.sync 0;
"""
DUMP = f"""
    shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d3, %r3; add.s64 %d3, %d2, %d3;
D:  ld.shared.u32 %r5, [%r4]; st.global.u32 [%d3], %r5;
    add.u32 %r4, %r4, 512; add.s64 %d3, %d3, 512; add.u32 %r3, %r3, 512;
    setp.lt.u32 %p2, %r3, {SHARED}; @%p2 bra D;
"""

FLOATS = ["float16", "bfloat16", "float32", "float64"]


def launch(
    body: str, tensor: TensorMap | None, memory: Memory, source: int = 0, **options: Any
) -> np.ndarray[Any, Any]:
    """Run a kernel of 128 threads; returns the bytes that it stored at %d2."""
    out = memory.empty(SHARED, np.uint8)
    first = bytes(128) if tensor is None else encode_for_emulator(tensor)
    run(kernel(START + body, PARAMETERS, DECLARATIONS), [first, source, out], memory, block=128, **options)
    return memory.get(out)


def load(rank: int, coordinates: tuple[int, ...], nbytes: int, target: int = 0) -> str:
    """One thread loads a box and expects its bytes."""
    items = "".join(f"mov.u32 %r{10 + n}, {c & 0xFFFFFFFF};" for n, c in enumerate(coordinates))
    registers = ", ".join(f"%r{10 + n}" for n in range(rank))
    copy = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"""
    {items} add.u32 %r6, %r2, {target};
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {nbytes};
    @%p0 {copy} [%r6], [%d8, {{{registers}}}], [%r1];
    """


def random_tensor(
    rng: Generator, memory: Memory, swizzle: int, dtype: str, rank: int
) -> tuple[TensorMap, Any, np.ndarray[Any, Any]]:
    """A tensor map of a random array with room between its rows, its buffer, and the array as numbers."""
    size = ELEMENT_BYTES[dtype]
    shape = tuple(int(x) for x in rng.integers(1, [40, 12, 5, 4, 3][:rank]))
    width = swizzle or int(rng.integers(1, 9)) * 16
    box = [width // size, *(int(x) for x in rng.integers(1, [12, 4, 3, 3][: rank - 1]))]
    steps = [1, *(int(x) for x in rng.integers(1, 4, rank - 1))]
    while np.prod(box) * size > SHARED // 2:
        box[int(np.argmax(box[1:])) + 1] -= 1
    strides, at = [], shape[0] * size
    for extent in shape[1:]:
        at = -(-at // 16) * 16 + 16 * int(rng.integers(0, 3))
        strides.append(at)
        at *= extent
    buffer = memory.put(rng.integers(0, 256, -(-at // 16) * 16, dtype=np.uint8))
    tensor = TensorMap(dtype, buffer.address, shape, tuple(strides), tuple(box), swizzle, tuple(steps))
    raw = memory.get(buffer)
    view = np.lib.stride_tricks.as_strided(
        np.frombuffer(raw.tobytes().ljust(len(raw) + 16, b"\0"), dtype=f"u{size}"),
        shape[::-1],
        (*strides[::-1], size),
    )
    return tensor, buffer, view


Place = tuple[int, tuple[int, ...] | None]


def places(tensor: TensorMap, coordinates: tuple[int, ...], whole: int = 1) -> Iterator[Place]:
    """For each element of a box its byte in shared memory, from a multiple of 1024 on, and index or None.

    Elements in the last `whole` bytes of a row, of which a part is inside, have an index too.
    """
    row = -(-tensor.shape[0] * tensor.element_bytes // whole) * whole
    ends = (row // tensor.element_bytes, *tensor.shape[1:])
    steps = (1, *tensor.element_strides[1:])
    counts = [-(-box // step) for box, step in zip(tensor.box, steps, strict=True)]
    position = 0
    for index in itertools.product(*(range(count) for count in counts[::-1])):
        at = [c + i * s for c, i, s in zip(coordinates, index[::-1], steps, strict=True)]
        inside = all(0 <= a < end for a, end in zip(at, ends, strict=True))
        byte = position
        # The 16-byte piece's number within its pattern is exchanged by the number of the 128-byte line.
        piece, line = byte // 16, byte // 128
        piece ^= line % max(1, tensor.swizzle // 16)
        yield piece * 16 + byte % 16, tuple(at[::-1]) if inside else None
        position += tensor.element_bytes


def random_coordinates(rng: Generator, tensor: TensorMap, before: int = 3) -> tuple[int, ...]:
    """Coordinates whose box meets the tensor, and often leaves it; the first is a multiple of 16 bytes.

    The box begins at most `before` elements (pieces of 16 bytes) before the tensor along a dimension.
    """
    units = (16 // tensor.element_bytes, *[1] * (tensor.rank - 1))
    return tuple(
        unit * int(rng.integers(-min(before, box // unit - 1), -(-extent // unit)))
        for extent, box, unit in zip(tensor.shape, tensor.box, units, strict=True)
    )


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_random_tensors_are_loaded(swizzle: int, rank: int, rng: Generator) -> None:
    dtype = str(rng.choice(["uint8", "float16", "float32", "uint64"]))
    memory = Memory()
    tensor, _, array = random_tensor(rng, memory, swizzle, dtype, rank)
    coordinates = random_coordinates(rng, tensor)
    body = FILL + MAKE + load(rank, coordinates, tensor.box_bytes) + WAIT + DUMP
    found = launch(body, tensor, memory)
    expected = np.frombuffer(np.full(SHARED // 4, 0x7FFF7FFF, np.uint32).tobytes(), np.uint8).copy()
    size = tensor.element_bytes
    for byte, index in places(tensor, coordinates):
        value = int(array[index]) if index is not None else 0
        expected[byte : byte + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
    assert np.array_equal(found, expected), (tensor, coordinates)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("order", [None, 5])
def test_boxes_of_random_tensors_are_stored(
    swizzle: int, rank: int, order: int | None, rng: Generator
) -> None:
    dtype = str(rng.choice(["uint8", "float16", "float32"]))
    memory = Memory()
    tensor, buffer, _ = random_tensor(rng, memory, swizzle, dtype, rank)
    coordinates = random_coordinates(rng, tensor, before=0)
    items = "".join(f"mov.u32 %r{10 + n}, {c & 0xFFFFFFFF};" for n, c in enumerate(coordinates))
    registers = ", ".join(f"%r{10 + n}" for n in range(rank))
    body = f"""
    shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
S:  mul.lo.u32 %r5, %r3, 2654435761; st.shared.u32 [%r4], %r5;
    add.u32 %r4, %r4, 512; add.u32 %r3, %r3, 512; setp.lt.u32 %p2, %r3, {SHARED}; @%p2 bra S;
    fence.proxy.async.shared::cta; bar.sync 0; {items}
    @!%p0 bra E;
    cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%d8, {{{registers}}}], [%r2];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    st.shared.u32 [%r2], 0;
E:
    """
    before = memory.get(buffer)
    launch(body, tensor, memory, order=order, detect_races=True)
    words = (np.arange(0, SHARED, 4, dtype=np.uint64) * 2654435761 % (1 << 32)).astype(np.uint32)
    shared = np.frombuffer(words.tobytes(), np.uint8)
    expected, size = before.copy(), tensor.element_bytes
    strides = (*tensor.strides[::-1], size)
    for byte, index in places(tensor, coordinates, whole=16):
        if index is not None:
            at = sum(i * s for i, s in zip(index, strides, strict=True))
            expected[at : at + size] = shared[byte : byte + size]
    assert np.array_equal(memory.get(buffer), expected), (tensor, coordinates)


@pytest.mark.parametrize("order", [None, 1])
def test_runs_of_bytes_go_both_ways(order: int | None, rng: Generator) -> None:
    nbytes = 16 * int(rng.integers(1, 200))
    memory = Memory()
    values = rng.integers(0, 256, nbytes, dtype=np.uint8)
    source = memory.put(values)
    target = memory.empty(nbytes, np.uint8)
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""
    {MAKE} mov.u32 %r6, {nbytes};
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r6;
    @%p0 {copy} [%r2], [%d1], %r6, [%r1];
    {WAIT} mov.b64 %d4, {target.address};
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d4], [%r2], %r6;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
    @%p0 ld.global.u8 %r7, [%d4]; @%p0 st.global.u8 [%d4], %r7;
    """
    launch(body, None, memory, source.address, order=order, detect_races=True)
    assert np.array_equal(memory.get(target), values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_elements_outside_can_be_nan(dtype: str, rng: Generator) -> None:
    """One 16-byte piece and one row of the box are outside, and the end of a piece."""
    size = ELEMENT_BYTES[dtype]
    memory = Memory()
    values = rng.integers(0, 256, (4, 32), dtype=np.uint8)
    buffer = memory.put(values)
    tensor = TensorMap(dtype, buffer.address, (32 // size - 1, 4), (32,), (32 // size, 4), 0, nan_fill=True)
    found = launch(MAKE + load(2, (16 // size, -1), 128) + WAIT + DUMP, tensor, memory)[:128]
    expected = np.full((4, 16), 0x7FF7, "<u2").view(np.uint8)
    expected[1:, : 16 - size] = values[:3, 16 : 32 - size]
    assert np.array_equal(found.reshape(4, 32), expected)
    assert np.isnan(expected[0].view({2: "<f2", 4: "<f4", 8: "<f8"}[size])).all()


def one_box(rng: Generator, memory: Memory) -> TensorMap:
    """A tensor map of 64 x 16 halves with boxes of 64 x 8."""
    buffer = memory.put(rng.standard_normal((16, 64)).astype(np.float16))
    return TensorMap("float16", buffer.address, (64, 16), (128,), (64, 8), 128)


BOX = 1024
PLANTED: dict[str, tuple[str, type[TilewaveError], str]] = {
    "too many bytes expected": (
        MAKE + load(2, (0, 0), BOX + 16) + WAIT,
        BarrierError,
        "deadlock.*lacks 16 bytes that were expected",
    ),
    "too few bytes expected": (
        MAKE + load(2, (0, 0), BOX - 16) + WAIT,
        BarrierError,
        "deadlock.*lacks 16 bytes to be expected that have already come",
    ),
    "only the first of two copies expected": (
        MAKE
        + load(2, (0, 0), BOX)
        + "@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        + "[%r2+2048], [%d8, {%r10, %r11}], [%r1];"
        + WAIT
        + "bar.sync 0;\n",
        TilewaveError,
        "fewer bytes were expected than copied|the block has ended|its block has ended",
    ),
    "not waited for": (
        MAKE + load(2, (0, 0), BOX),
        RaceError,
        "its block has ended without waiting",
    ),
    "misaligned target": (MAKE + load(2, (0, 0), BOX, 64) + WAIT, MemoryFault, "no multiple of 128"),
    "target outside": (MAKE + load(2, (0, 0), BOX, SHARED) + WAIT, MemoryFault, "do not fit the 16448 bytes"),
    "target before all variables": (
        MAKE + "mov.u32 %r2, 0;" + load(2, (0, 0), BOX) + WAIT,
        MemoryFault,
        "do not fit the 16448 bytes of shared memory from byte 1024 on",
    ),
    "a first coordinate within 16 bytes": (
        MAKE + load(2, (4, 0), BOX) + WAIT,
        EmulationError,
        "first coordinate, 4, is byte 8 of a row: it must be a multiple of 16",
    ),
    "the same of a store": (
        "mov.u32 %r3, 0; mov.u32 %r4, 12;"
        + "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d8, {%r4, %r3}], [%r2];",
        EmulationError,
        "first coordinate, 12, is byte 24 of a row",
    ),
    "a store before the tensor": (
        "mov.u32 %r3, 0; mov.u32 %r4, -8;"
        + "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d8, {%r4, %r3}], [%r2];",
        EmulationError,
        r"at the coordinates \(-8, 0\), before its beginning: accepted are coordinates from 0 on",
    ),
    "a store before the tensor's rows": (
        "mov.u32 %r3, -1; mov.u32 %r4, 8;"
        + "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d8, {%r4, %r3}], [%r2];",
        EmulationError,
        r"at the coordinates \(8, -1\), before its beginning",
    ),
    "over the mbarrier": (
        MAKE.replace("[%r1]", "[%r2+256]") + load(2, (0, 0), BOX),
        TilewaveError,
        "overwrites the mbarrier|there is no mbarrier",
    ),
    "another rank": (MAKE + load(3, (0, 0, 0), BOX) + WAIT, EmulationError, "3 coordinates .* of rank 2"),
    "no tensor map": (
        MAKE + "add.u64 %d8, %d8, 64;" + load(2, (0, 0), BOX) + WAIT,
        TilewaveError,
        "no tensor map|outside the parameters",
    ),
    "a map between two": (
        MAKE + "add.u64 %d8, %d8, 8;" + load(2, (0, 0), BOX) + WAIT,
        MemoryFault,
        "no multiple of 64",
    ),
}
FENCED = MAKE + load(2, (0, 0), BOX) + WAIT
RACES = {
    "read too early": (
        MAKE + load(2, (0, 0), BOX) + "ld.shared.u32 %r5, [%r2];" + WAIT,
        "(reads|writes) byte 1024",
    ),
    "no fence after the making of the mbarrier": (
        FENCED.replace("@%p0 fence.mbarrier_init.release.cluster;", ""),
        "no fence.mbarrier_init",
    ),
    "overwritten while others read": (
        MAKE + "setp.eq.u32 %p3, %r0, 32; @%p3 ld.shared.u32 %r5, [%r2];" + load(2, (0, 0), BOX) + WAIT,
        "writes byte 1024 .* which warp 1 has read|reads byte 1024",
    ),
    "stored before without a proxy fence": (
        MAKE + "@%p0 st.shared.u32 [%r2+8], %r0;" + load(2, (0, 0), BOX) + WAIT,
        "no fence.proxy.async",
    ),
    "a store without a proxy fence": (
        "st.shared.u32 [%r2], 0;".replace("0;", "%r0;").replace("st", "@%p0 st", 1)
        + "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d8, {%r0, %r0}], [%r2];"
        + "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;",
        "no fence.proxy.async",
    ),
    "the source of a store overwritten": (
        "@%p0 st.shared.u32 [%r2], %r0; fence.proxy.async;"
        + "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d8, {%r0, %r0}], [%r2];"
        + "@%p0 cp.async.bulk.commit_group; @%p0 st.shared.u32 [%r2], %r0;"
        + "@%p0 cp.async.bulk.wait_group.read 0;",
        "writes byte 1024 .* a bulk copy of warp 0 has read",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("order", [None, 1, 2])
def test_planted_faults_are_found(name: str, order: int | None, rng: Generator) -> None:
    body, error, message = PLANTED[name]
    memory = Memory()
    with pytest.raises(error, match=message):
        launch(body, one_box(rng, memory), memory, order=order)


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("order", [None, 1, 2])
def test_races_are_found(name: str, order: int | None, rng: Generator) -> None:
    body, message = RACES[name]
    memory = Memory()
    with pytest.raises(RaceError, match=message):
        launch(body, one_box(rng, memory), memory, order=order, detect_races=True)


def test_the_fenced_kernel_has_no_race(rng: Generator) -> None:
    for order in range(3):
        memory = Memory()
        launch(FENCED + DUMP, one_box(rng, memory), memory, order=order, detect_races=True)


def test_who_reads_too_early_finds_poison(rng: Generator) -> None:
    """Without race detection it still shows: the copy lands as late as it may."""
    memory = Memory()
    body = MAKE + load(2, (0, 0), BOX) + "bar.sync 0; ld.shared.u32 %r19, [%r2];" + WAIT
    found = launch(body + "st.global.u32 [%d2], %r19;", one_box(rng, memory), memory)
    assert found[:4].view(np.uint32)[0] == 0x7FFF7FFF


def test_a_tensor_map_in_global_memory(rng: Generator) -> None:
    memory = Memory()
    tensor = one_box(rng, memory)
    encoded = memory.put(np.frombuffer(encode_for_emulator(tensor), np.uint8))
    body = MAKE + "mov.u64 %d8, %d1; prefetch.tensormap [%d8];" + load(2, (0, 8), BOX) + WAIT + DUMP
    assert np.array_equal(
        launch(body, None, memory, encoded.address)[:BOX],
        launch(MAKE + load(2, (0, 8), BOX) + WAIT + DUMP, tensor, memory)[:BOX],
    )
    with pytest.raises(MemoryFault, match="outside every buffer"):
        launch(body, None, memory, encoded.address + 64)


def test_a_fault_in_global_memory_names_the_copy(rng: Generator) -> None:
    memory = Memory()
    buffer = memory.put(np.zeros((16, 64), np.float16), name="A")
    tensor = TensorMap("float16", buffer.address, (64, 17), (128,), (64, 8))
    with pytest.raises(MemoryFault, match=r"PTX line .*cp.async.bulk.*buffer 'A'"):
        launch(MAKE + load(2, (0, 10), BOX) + WAIT, tensor, memory)


BAD_MAPS: dict[str, dict[str, Any]] = {
    "a tensor map of 'int4'": {"dtype": "int4"},
    "of 0 dimensions": {"shape": (), "strides": (), "box": ()},
    "rank 2 has 1 strides": {"strides": (16, 16)},
    "no multiple of 16": {"address": 1 << 40 | 8},
    "shape .0, 16.: accepted": {"shape": (0, 16)},
    "box .64, 257.: accepted are 1 to 256": {"box": (64, 257)},
    "strides .24,. are not all multiples": {"strides": (24,)},
    "is 6 bytes wide": {"box": (3, 8)},
    "swizzle 16": {"swizzle": 16},
    "does not fit a swizzle of 64": {"swizzle": 64},
    "element_strides .1, 9.": {"element_strides": (1, 9)},
    "l2_promotion 32": {"l2_promotion": 32},
    "nan_fill needs a floating-point type": {"dtype": "uint16", "nan_fill": True},
}


@pytest.mark.parametrize("message", BAD_MAPS)
def test_tensor_maps_that_the_driver_would_refuse(message: str) -> None:
    good = {"dtype": "float16", "address": 1 << 40, "shape": (64, 16), "strides": (128,), "box": (64, 8)}
    TensorMap(**good)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        TensorMap(**{**good, **BAD_MAPS[message]})


def test_encoding_keeps_everything(rng: Generator) -> None:
    for rank, swizzle in itertools.product(range(1, 6), (0, 32, 64, 128)):
        tensor, _, _ = random_tensor(rng, Memory(), swizzle, "float32", rank)
        data = encode_for_emulator(tensor)
        assert len(data) == 128
        assert decode(data) == tensor
