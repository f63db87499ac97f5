"""Emulated memory: bits survive, poison shows, and every access outside one's own bounds is caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tilewave.emulator.memory import POISON, Buffer, LocalMemory, Memory, SharedMemory
from tilewave.errors import MemoryFault, UsageError

Generator = np.random.Generator
WIDTHS = [1, 2, 4, 8, 16]


def reference_load(raw: bytes, offset: int, width: int) -> list[int]:
    """The registers that a load of `width` bytes fills, from the bytes themselves."""
    size = min(width, 4)
    return [int.from_bytes(raw[offset + i : offset + i + size], "little") for i in range(0, width, size)]


def random_words(rng: Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, count, dtype=np.uint32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_global_load_returns_the_bytes_of_the_buffer(
    rng: Generator, width: int, dtype: type, masked: bool
) -> None:
    memory = Memory()
    values = random_words(rng, 4 * int(rng.integers(1, 50)))
    memory.put(random_words(rng, 8))
    buffer = memory.put(values)
    memory.put(random_words(rng, 8))
    lanes = int(rng.integers(1, 100))
    offsets = rng.integers(0, buffer.nbytes // width, lanes) * width
    addresses = (buffer.address + offsets).astype(dtype)
    mask = rng.random(lanes) < 0.5 if masked else None
    if mask is not None:
        addresses[~mask] = rng.integers(0, 1 << 60, int((~mask).sum()))
    before = random_words(rng, lanes)
    out = [before.copy() for _ in range(max(1, width // 4))]
    assert memory.load(addresses, width, mask, out) is out
    raw = values.tobytes()
    for lane in range(lanes):
        if mask is None or mask[lane]:
            assert [int(row[lane]) for row in out] == reference_load(raw, int(offsets[lane]), width)
        else:
            assert all(row[lane] == before[lane] for row in out)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("masked", [False, True])
def test_global_store_writes_exactly_the_active_lanes(rng: Generator, width: int, masked: bool) -> None:
    memory = Memory()
    buffer = memory.empty(4 * int(rng.integers(4, 50)), np.uint32)
    places = buffer.nbytes // width
    lanes = int(rng.integers(1, places + 1))
    offsets = rng.permutation(places)[:lanes] * width
    words = [random_words(rng, lanes) for _ in range(max(1, width // 4))]
    mask = rng.random(lanes) < 0.5 if masked else None
    memory.store(buffer.address + offsets, words, width, mask)
    expected = bytearray(np.full(buffer.nbytes // 4, POISON, np.uint32).tobytes())
    for lane in range(lanes):
        if mask is None or mask[lane]:
            raw = b"".join(int(row[lane]).to_bytes(4, "little") for row in words)[:width]
            expected[int(offsets[lane]) : int(offsets[lane]) + width] = raw
    assert memory.get(buffer).tobytes() == bytes(expected)


def test_signalling_nans_and_every_other_pattern_survive_wide_accesses(rng: Generator) -> None:
    patterns = np.array(
        [0x7F800001, 0xFF800001, 0x7FBFFFFF, 0xFFFFFFFF, 0x80000000, 1, 0x7FF00000, 0], np.uint32
    )
    memory = Memory()
    source, target = memory.put(patterns), memory.empty(8, np.uint32)
    for width in (4, 8, 16):
        offsets = np.arange(0, 32, width)
        memory.store(target.address + offsets, memory.load(source.address + offsets, width), width)
        assert (memory.get(target) == patterns).all()
        memory.set(target, random_words(rng, 8))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_fresh_memory_is_nan(dtype: type) -> None:
    memory = Memory()
    buffer = memory.empty((3, 5), dtype, "C")
    values = memory.get(buffer)
    assert values.shape == (3, 5)
    assert values.dtype == dtype
    assert np.isnan(values).all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.float64])
def test_put_and_get_round_trip(rng: Generator, shape: tuple[int, ...], dtype: type) -> None:
    memory = Memory()
    values = (rng.standard_normal(shape) * 50).astype(dtype)
    buffer = memory.put(values, "A", offset_bytes=int(rng.integers(0, 16)) * 4)
    assert (buffer.shape, buffer.nbytes, buffer.name) == (shape, values.nbytes, "A")
    assert np.array_equal(memory.get(buffer), values)
    copy = memory.get(buffer)
    copy[...] = 1
    assert np.array_equal(memory.get(buffer), values)


def test_put_copies_transposed_and_strided_arrays(rng: Generator) -> None:
    memory = Memory()
    values = rng.standard_normal((6, 10)).astype(np.float32)
    for view in (values.T, values[::2, 1::3], values[::-1]):
        assert np.array_equal(memory.get(memory.put(view)), view)


def test_addresses_need_64_bits_and_are_aligned() -> None:
    memory = Memory()
    buffers = [memory.empty(n) for n in (1, 63, 64, 65)]
    assert all(b.address % 256 == 0 and b.address > 1 << 32 for b in buffers)
    shifted = memory.empty(7, offset_bytes=4)
    assert shifted.address % 256 == 4
    gaps = [later.address - earlier.end for earlier, later in itertools.pairwise(buffers)]
    assert min(gaps) >= 1 << 32


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda b, w: b.address - w, "begins {width} bytes before buffer 'B'"),
        (lambda b, w: b.end, "ends {width} bytes behind buffer 'B'"),
        (lambda b, w: b.end + 4096 * w, "behind buffer 'B'"),
        (lambda b, w: b.address + (1 << 31), "behind buffer 'B'"),
        (lambda b, w: b.address & 0xFFFFFFFF, "before buffer 'A'"),
        (lambda b, w: -w, "before buffer 'A'"),
        (lambda b, w: 0, "before buffer 'A'"),
    ],
)
def test_access_outside_every_buffer_is_a_fault(
    rng: Generator,
    store: bool,
    masked: bool,
    width: int,
    place: Callable[[Buffer, int], int],
    words: str,
) -> None:
    memory = Memory()
    memory.put(random_words(rng, 64), "A")
    middle = memory.put(random_words(rng, 64), "B")
    memory.put(random_words(rng, 64), "C")
    lanes = 37
    addresses = np.full(lanes, middle.address, np.int64)
    first = int(rng.integers(0, lanes))
    address = place(middle, width)
    addresses[first] = address
    addresses[first + 1 :: 3] = address
    mask = None
    if masked:
        mask = np.ones(lanes, np.bool_)
        mask[first] = False
        assert_no_fault(memory, addresses[: first + 1], width, mask[: first + 1], store)
        mask[first] = True
        mask[:first] = rng.random(first) < 0.5
    before = [memory.get(b).tobytes() for b in memory.buffers]
    with pytest.raises(MemoryFault, match=words.format(width=width)) as caught:
        access(memory, addresses.view(np.uint64), width, mask, store)
    assert (caught.value.lane, caught.value.address) == (first, address)
    assert [memory.get(b).tobytes() for b in memory.buffers] == before


def access(
    memory: Memory | SharedMemory | LocalMemory,
    addresses: np.ndarray,
    width: int,
    mask: np.ndarray | None,
    store: bool,
) -> None:
    if store:
        words = [np.zeros(len(addresses), np.uint32) for _ in range(max(1, width // 4))]
        memory.store(addresses, words, width, mask)
    else:
        memory.load(addresses, width, mask)


assert_no_fault = access


def test_an_element_straddling_the_end_of_a_ragged_buffer_is_a_fault() -> None:
    memory = Memory()
    buffer = memory.empty(5)
    memory.load(np.array([buffer.address]), 16)
    with pytest.raises(MemoryFault, match="ends 12 bytes behind"):
        memory.load(np.array([buffer.address + 16]), 16)
    halves = memory.empty(3, np.float16)
    with pytest.raises(MemoryFault, match="ends 2 bytes behind"):
        memory.load(np.array([halves.address + 4]), 4)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_misaligned_access_is_a_fault(rng: Generator, store: bool, width: int) -> None:
    memory = Memory()
    buffer = memory.empty(64)
    shared = SharedMemory(2, 256, 8)
    first = int(rng.integers(0, 16))
    offsets = np.zeros(16, np.int64)
    offsets[first:] = int(rng.integers(1, width))
    for space, base in ((memory, buffer.address), (shared, 0)):
        with pytest.raises(MemoryFault, match="misaligned") as caught:
            access(space, base + offsets, width, None, store)
        assert caught.value.lane == first


def test_a_misaligned_base_faults_wide_accesses_only() -> None:
    memory = Memory()
    buffer = memory.put(np.arange(8, dtype=np.float32), offset_bytes=4)
    addresses = np.array([buffer.address, buffer.address + 16])
    assert [int(v) for v in memory.load(addresses, 4)[0].view(np.float32)] == [0, 4]
    with pytest.raises(MemoryFault, match="misaligned"):
        memory.load(addresses, 8)


@pytest.mark.parametrize("width", WIDTHS)
def test_lanes_may_spread_over_several_buffers(rng: Generator, width: int) -> None:
    memory = Memory()
    buffers = [memory.put(random_words(rng, 32)) for _ in range(4)]
    lanes = 50
    owner = rng.integers(0, 4, lanes)
    offsets = rng.integers(0, 128 // width, lanes) * width
    addresses = np.array([b.address for b in buffers])[owner] + offsets
    mask = rng.random(lanes) < 0.7
    out = memory.load(addresses, width, mask)
    raw = [memory.get(b).tobytes() for b in buffers]
    for lane in range(lanes):
        expected = reference_load(raw[owner[lane]], int(offsets[lane]), width)
        assert [int(row[lane]) for row in out] == (expected if mask[lane] else [0] * len(out))
    # Stores to distinct places, then the whole is read back.
    targets = [memory.empty(32, np.uint32) for _ in range(4)]
    every = np.concatenate([t.address + np.arange(0, 128, width) for t in targets])
    source = np.concatenate([b.address + np.arange(0, 128, width) for b in buffers])
    order = rng.permutation(len(every))
    memory.store(every[order], memory.load(source[order], width), width)
    assert [memory.get(t).tobytes() for t in targets] == raw


def test_a_fault_among_several_buffers_writes_nothing(rng: Generator) -> None:
    memory = Memory()
    buffers = [memory.put(random_words(rng, 8)) for _ in range(3)]
    before = [memory.get(b).tobytes() for b in buffers]
    addresses = np.array([buffers[2].address, buffers[0].address, buffers[1].end])
    with pytest.raises(MemoryFault) as caught:
        memory.store(addresses, [np.zeros(3, np.uint32)], 4)
    assert caught.value.lane == 2
    assert [memory.get(b).tobytes() for b in buffers] == before


def test_the_highest_of_colliding_lanes_wins(rng: Generator) -> None:
    memory = Memory()
    buffer = memory.empty(4, np.uint32)
    words = [np.arange(100, dtype=np.uint32) + i for i in range(4)]
    memory.store(np.full(100, buffer.address), words, 16)
    assert memory.get(buffer).tolist() == [99, 100, 101, 102]
    memory.store(np.full(100, buffer.address), words[:1], 4)
    assert memory.get(buffer)[0] == 99


def test_a_store_to_a_read_only_buffer_is_a_fault() -> None:
    memory = Memory()
    buffer = memory.put(np.ones(4, np.float32), "A", read_only=True)
    memory.load(np.array([buffer.address]), 16)
    with pytest.raises(MemoryFault, match="read-only"):
        memory.store(np.array([buffer.address]), [np.zeros(1, np.uint32)], 4)
    assert (memory.get(buffer) == 1).all()


def test_nonsense_is_refused() -> None:
    memory, other = Memory(), Memory()
    buffer = memory.empty(4)
    with pytest.raises(UsageError, match="does not exist"):
        memory.load(np.array([buffer.address]), 12)
    with pytest.raises(UsageError, match="fills 4 registers; 1"):
        memory.load(np.array([buffer.address]), 16, out=[np.zeros(1, np.uint32)])
    with pytest.raises(UsageError, match="takes 2 registers; 1"):
        memory.store(np.array([buffer.address]), [np.zeros(1, np.uint32)], 8)
    with pytest.raises(UsageError, match="does not belong"):
        other.get(buffer)
    with pytest.raises(UsageError, match="offset_bytes"):
        memory.empty(4, offset_bytes=-4)
    with pytest.raises(UsageError, match="shape"):
        memory.set(buffer, np.zeros(5, np.float32))
    with pytest.raises(UsageError, match="cannot live"):
        memory.put(np.array([object()]))
    with pytest.raises(MemoryFault, match="no buffers"):
        other.load(np.array([4096]), 4)


def test_no_lane_active_touches_nothing() -> None:
    memory, shared = Memory(), SharedMemory(1, 64, 4)
    addresses, off = np.full(4, 1 << 60), np.zeros(4, np.bool_)
    for space in (memory, shared):
        assert not space.load(addresses, 4, off)[0].any()
        space.store(addresses, [np.zeros(4, np.uint32)], 4, off)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("nbytes", [16, 52, 64])
def test_shared_memory_of_a_block_is_its_own(rng: Generator, width: int, nbytes: int) -> None:
    blocks, threads = 3, 8
    shared = SharedMemory(blocks, nbytes, threads)
    assert all((shared.part(i) == POISON).all() for i in range(blocks))
    lanes = blocks * threads
    offsets = (rng.integers(0, nbytes // width, lanes) * width).astype(np.uint32)
    mask = rng.random(lanes) < 0.7
    words = [random_words(rng, lanes) for _ in range(max(1, width // 4))]
    shared.store(offsets, words, width, mask)
    expected = [bytearray(np.full(-(-nbytes // 4), POISON, np.uint32).tobytes()) for _ in range(blocks)]
    for lane in np.flatnonzero(mask):
        raw = b"".join(int(row[lane]).to_bytes(4, "little") for row in words)[:width]
        expected[lane // threads][int(offsets[lane]) : int(offsets[lane]) + width] = raw
    assert [shared.part(i).tobytes() for i in range(blocks)] == [bytes(e) for e in expected]
    out = shared.load(offsets, width, mask)
    for lane in np.flatnonzero(mask):
        own = bytes(expected[lane // threads])
        assert [int(row[lane]) for row in out] == reference_load(own, int(offsets[lane]), width)
    shared.poison()
    assert all((shared.part(i) == POISON).all() for i in range(blocks))


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("address", [-16, 208, 192 + 16, 1 << 31])
def test_shared_access_outside_the_block_is_a_fault(rng: Generator, store: bool, address: int) -> None:
    shared = SharedMemory(4, 200, 8)
    offsets = np.zeros(32, np.int64)
    first = int(rng.integers(0, 32))
    offsets[first:] = address
    with pytest.raises(MemoryFault, match="outside the 200 bytes of shared memory") as caught:
        access(shared, offsets, 16, None, store)
    assert (caught.value.lane, caught.value.address) == (first, address)
    # 192 is aligned and starts inside, but only 8 of its 16 bytes exist.
    with pytest.raises(MemoryFault, match="outside"):
        access(shared, np.full(32, 192), 16, None, store)
    access(shared, np.full(32, 192), 8, None, store)


def test_local_memory_is_one_per_thread(rng: Generator) -> None:
    threads = 40
    local = LocalMemory(threads, 24)
    values = random_words(rng, threads)
    offsets = rng.integers(0, 6, threads) * 4
    local.store(offsets, [values], 4)
    assert (local.load(offsets, 4)[0] == values).all()
    for thread in range(threads):
        expected = np.full(6, POISON, np.uint32)
        expected[offsets[thread] // 4] = values[thread]
        assert (local.part(thread) == expected).all()
    with pytest.raises(MemoryFault, match="local"):
        local.load(np.full(threads, 24), 4)
