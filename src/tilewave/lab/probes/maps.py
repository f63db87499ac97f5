"""Lane maps: which byte offset each lane of a warp accesses, and which lanes take part.

The named maps take each branch of the pass rule (`tilewave.emulator.passes`) and of what could be true in
its place; the random ones look for what nobody thought of. `access.cu` executes them, on a GPU or in the
emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SHARED_BYTES = 16384
"""Shared memory of a probe's block: offsets stay below it."""

GLOBAL_BYTES = 1 << 21
"""Size of the global buffer that probes access: a page of GPU memory, so its address is a multiple of it."""

KINDS = (
    *(f"shared_{what}_{width}" for what in ("load", "store") for width in (4, 8, 16)),
    *(f"global_{what}_{width}" for what in ("load", "store") for width in (4, 8, 16)),
    *(f"copy_ca_{width}" for width in (4, 8, 16)),
    "copy_cg_16",
    "copy_zfill_ca_4",
    "copy_zfill_cg_16",
)
"""The probes of `access.cu`, each the kernel `probe_<kind>`: space, what it does, bytes per lane. In the last
two all lanes take part, and those that are not active write zeros."""

ONCE, REPEATED = ", once", ", repeated"
"""How the names of the two maps of a pair end (`repeated_maps`)."""

_LANE = np.arange(32)
_BIT = [(_LANE >> i) & 1 for i in range(5)]


@dataclass(frozen=True, eq=False)
class LaneMap:
    """One warp-wide access: byte offsets of 32 lanes, which of them are active; for copies, of the source
    too."""

    name: str
    kind: str
    offsets: Lanes
    active: Mask
    sources: Lanes

    @property
    def width(self) -> int:
        """Bytes per lane."""
        return int(self.kind.rsplit("_", 1)[1])

    @property
    def space(self) -> str:
        """ "shared", "global" or "copy"."""
        return self.kind.split("_", 1)[0]

    @property
    def is_of_a_pair(self) -> bool:
        """Whether its launch repeats the same copy, so that only sums of the launch are known."""
        return self.name.endswith((ONCE, REPEATED))

    @property
    def mask_bits(self) -> int:
        """The active lanes, lane i as bit i."""
        return int((self.active.astype(np.int64) << _LANE).sum())


def _without_bit(bit: int) -> Lanes:
    """Lane number with one bit removed: lanes that differ in it share a place."""
    low = _LANE & ((1 << bit) - 1)
    return low | ((_LANE >> (bit + 1)) << bit)


def shared_patterns() -> dict[str, Lanes]:
    """Named maps in units of the access width."""
    quarter, in_quarter, half = _LANE // 8, _LANE % 8, _LANE // 16
    pairs, lane2 = _without_bit(0), _without_bit(1)
    patterns = {
        "contiguous": _LANE,
        "reversed": 31 - _LANE,
        "rotated by 3": (_LANE + 3) % 32,
        "one place for all": 0 * _LANE,
        **{f"stride {stride}": _LANE * stride for stride in (2, 3, 4, 5, 8, 16, 32, 33)},
        # Sharing that lets groups of a load merge (lane^1, lane^2, both), and sharing that might.
        "lane^1 shares": pairs,
        "lane^2 shares": lane2,
        "quads share": _LANE // 4,
        "octets share": _LANE // 8,
        "halves share": _LANE // 16,
        "lane^3 shares": (_LANE // 4) * 2 + (_BIT[0] ^ _BIT[1]),
        "lane^4 shares": _without_bit(2),
        "lane^8 shares": _without_bit(3),
        "lane^16 shares": _without_bit(4),
        "lane^1 shares, reversed": 15 - pairs,
        # Different rules in different parts of the warp.
        "lane^1 in the first half only": np.where(half == 0, pairs, _LANE),
        "lane^2 in the second half only": np.where(half == 1, lane2, _LANE),
        "lane^1 in one half, lane^2 in the other": np.where(half == 0, pairs, lane2),
        "lane^1 in one quarter, lane^2 in the next": np.where(quarter % 2 == 0, pairs, lane2),
        "lane^1 in the first quarter only": np.where(quarter == 0, pairs, _LANE),
        "lane^1 in three quarters": np.where(quarter < 3, pairs, _LANE),
        "lane^1 in one half, one place in the other": np.where(half == 0, pairs, 20),
        "lane^2 in one half, one place in the other": np.where(half == 0, 20, lane2),
        "lane^1 but for lane 5": np.where(_LANE == 5, 40, pairs),
        # Merged groups that conflict: across the two (in the same banks), within each, both.
        "lane^1, conflict across": quarter * 8 + in_quarter // 2,
        "lane^1, conflict within": quarter % 2 * 4
        + quarter // 2 * 16
        + in_quarter // 4 * 8
        + in_quarter // 2 % 2,
        "lane^1, conflict in both": quarter * 16 + in_quarter // 4 * 8 + in_quarter // 2 % 2,
        "lane^2, conflict across": quarter * 8 + lane2 % 4,
        "halves with the same places": _LANE % 16,
        "quarters with the same places": _LANE % 8,
        # Fragments of matrix-multiply kernels.
        "rows of 4 x 8 lanes": _LANE // 8,
        "columns of 4 x 8 lanes": _LANE % 8,
        "columns of 2 x 16 lanes, stride 2": _LANE % 16 * 2,
        "columns of 4 x 4 lanes twice": _LANE % 4 + 4 * half,
        "rows bit 0, 3": _BIT[0] + 2 * _BIT[3],
        "columns bit 1, 2, 4": _BIT[1] + 2 * _BIT[2] + 4 * _BIT[4],
        "rows bit 0, 4, stride 8": 8 * (_BIT[0] + 2 * _BIT[4]),
        "transposing store, depth 32": _LANE % 8 * 128 + _LANE // 8,
        "transposing store, padded": _LANE % 8 * 33 + _LANE // 8,
    }
    return {name: np.asarray(places, dtype=np.int64) for name, places in patterns.items()}


def masks() -> dict[str, Mask]:
    """Named sets of active lanes."""
    return {
        "odd lanes": _LANE % 2 == 1,
        "lanes 2, 3 of 4": _LANE % 4 >= 2,
        "first half": _LANE < 16,
        "last quarter": _LANE >= 24,
        "lane 13": _LANE == 13,
        "all but lane 7": _LANE != 7,
        "17 lanes": _LANE < 17,
        "lanes 0 and 31": (_LANE == 0) | (_LANE == 31),
        "no lane": _LANE < 0,
    }


_MASKED = ("contiguous", "one place for all", "stride 2", "lane^1 shares", "lane^2 shares", "lane^3 shares")
_MASKED_LOADS = ("lane^1 in one half, lane^2 in the other", "lane^1 but for lane 5")
_ALL = np.ones(32, dtype=np.bool_)
_REPEATED = (
    "contiguous from contiguous",
    "contiguous from stride 257",
    "contiguous from 8 rows of 4, stride 33",
)


def named_maps(kind: str) -> Iterator[LaneMap]:
    """All named maps of a kind of access."""
    width = int(kind.rsplit("_", 1)[1])
    if kind.startswith("shared"):
        patterns = shared_patterns()
        for name, places in patterns.items():
            yield LaneMap(name, kind, places * width, _ALL, 0 * _LANE)
        for mask_name, mask in masks().items():
            for name in _MASKED + (_MASKED_LOADS if kind.startswith("shared_load") else ()):
                yield LaneMap(f"{name}; {mask_name}", kind, patterns[name] * width, mask, 0 * _LANE)
    elif kind.startswith("global"):
        for name, offsets in _global_patterns(width).items():
            yield LaneMap(name, kind, offsets, _ALL, 0 * _LANE)
        for mask_name, mask in masks().items():
            for name in ("contiguous", "one element off", "stride 3"):
                yield LaneMap(f"{name}; {mask_name}", kind, _global_patterns(width)[name], mask, 0 * _LANE)
    elif "zfill" in kind:
        yield from _zero_fills(kind, width)
    else:
        yield from _copies(kind, width)


def _global_patterns(width: int) -> dict[str, Lanes]:
    elements = {
        "contiguous": _LANE,
        "one element off": _LANE + 1,
        "three elements off": _LANE + 3,
        "reversed": 31 - _LANE,
        "one place for all": 0 * _LANE,
        "lane^1 shares": _LANE // 2,
        "halves with the same places": _LANE % 16,
        "quarters with the same places": _LANE % 8,
        "interleaved halves": _LANE % 2 * 16 + _LANE // 2,
        **{f"stride {stride}": _LANE * stride for stride in (2, 3, 4, 8, 9, 32, 257)},
        "4 rows of 8, stride 1025": _LANE // 8 * 1025 + _LANE % 8,
        "8 rows of 4, stride 1024": _LANE // 4 * 1024 + _LANE % 4,
        "8 rows of 4, stride 33": _LANE // 4 * 33 + _LANE % 4,
    }
    return {name: np.asarray(places * width, dtype=np.int64) for name, places in elements.items()}


def _zero_fills(kind: str, width: int) -> Iterator[LaneMap]:
    sources = _global_patterns(width)
    for mask_name, mask in masks().items():
        for name in ("contiguous", "one place for all", "8 rows of 4, stride 33"):
            yield LaneMap(f"contiguous from {name}; {mask_name}", kind, _LANE * width, mask, sources[name])
        yield LaneMap(f"stride 8; {mask_name}", kind, _LANE * 8 * width, mask, _LANE * width)


def _copies(kind: str, width: int) -> Iterator[LaneMap]:
    shared, sources = shared_patterns(), _global_patterns(width)
    for name in (
        "contiguous",
        "reversed",
        "stride 2",
        "stride 3",
        "stride 8",
        "stride 32",
        "one place for all",
        "lane^1 shares",
        "transposing store, depth 32",
        "transposing store, padded",
        "columns of 2 x 16 lanes, stride 2",
    ):
        yield LaneMap(f"{name} from contiguous", kind, shared[name] * width, _ALL, sources["contiguous"])
    for name, offsets in sources.items():
        if name != "contiguous":
            yield LaneMap(f"contiguous from {name}", kind, _LANE * width, _ALL, offsets)
    rows = "8 rows of 4, stride 1024"
    yield LaneMap(f"reversed from {rows}", kind, (31 - _LANE) * width, _ALL, sources[rows])
    yield LaneMap(f"stride 2 from {rows}", kind, _LANE * 2 * width, _ALL, sources[rows])
    for mask_name, mask in masks().items():
        yield LaneMap(f"contiguous; {mask_name}", kind, _LANE * width, mask, _LANE * width)
        yield LaneMap(f"stride 8; {mask_name}", kind, _LANE * 8 * width, mask, _LANE * width)
    if width == 4:
        # Four lines of 8 lanes each, all in different banks: one lookup only if their tag sets differ.
        for low in (0, 1):
            for high in range(2, (GLOBAL_BYTES // 128).bit_length() - 1):
                lines = (_BIT[3] << low) + (_BIT[4] << high)
                name = f"contiguous from four lines, address bits {7 + low} and {7 + high}"
                yield LaneMap(name, kind, _LANE * width, _ALL, lines * 128 + _LANE * width)


def repeated_maps(kind: str) -> Iterator[tuple[LaneMap, LaneMap]]:
    """Copies to be made once, and the same copies to be repeated, when L1 holds their source."""
    for lane_map in named_maps(kind):
        if lane_map.name in _REPEATED:
            once, repeated = (f"{lane_map.name}{ending}" for ending in (ONCE, REPEATED))
            yield replace(lane_map, name=once), replace(lane_map, name=repeated)


def random_maps(kind: str, count: int, rng: np.random.Generator, first: int = 0) -> Iterator[LaneMap]:
    """Random maps: scattered, strided, permuted, with shared places of many structures, randomly masked."""
    width = int(kind.rsplit("_", 1)[1])
    limit = (SHARED_BYTES if not kind.startswith("global") else GLOBAL_BYTES) // width
    for index in range(first, first + count):
        places, sources = random_places(rng) % limit, 0 * _LANE
        if kind.startswith("copy"):
            # As in a kernel half of the time: no two lanes write to one place.
            places = random_rows(rng, limit) if rng.random() < 0.5 else places
            sources = random_places(rng)
            if rng.random() < 0.7:
                sources = random_rows(rng, GLOBAL_BYTES // width)
        yield LaneMap(f"random {index}", kind, places * width, random_mask(rng), sources * width)


def random_rows(rng: np.random.Generator, limit: int) -> Lanes:
    """32 different places below `limit`: rows of 1 to 32, scattered or with one pitch between them."""
    row = int(rng.choice([1, 2, 4, 8, 16, 32]))
    rows = 32 // row
    if rng.random() < 0.5:
        starts = rng.permutation(limit // row)[:rows] * row
    else:
        starts = np.arange(rows) * int(rng.integers(row, limit // rows + 1))
    places = np.asarray(starts[_LANE // row] + _LANE % row, dtype=np.int64)
    return places if rng.random() < 0.7 else rng.permutation(places)


def random_places(rng: np.random.Generator) -> Lanes:
    """32 places in units of the access width, below 16384."""
    span = int(rng.choice([2, 4, 8, 16, 32, 64, 512]))
    places = rng.integers(0, span, 32)
    structure = int(rng.integers(0, 8))
    if structure == 0:
        places = _LANE * int(rng.integers(0, 40))
    elif structure == 1:
        places = rng.permutation(32)
    elif structure in (2, 3):
        # Lanes that differ only in some bits share a place.
        places = places[_LANE & ~int(rng.choice([1, 2, 3, 4, 8, 16, 17, 18, 12]))]
    elif structure == 4:
        # Nearly: one lane is an exception.
        places = places[_LANE & ~int(rng.choice([1, 2]))]
        places[rng.integers(0, 32)] = rng.integers(0, span)
    elif structure == 5:
        places = (_LANE // int(rng.choice([2, 4, 8, 16]))) * int(rng.integers(1, 34)) + places % 2
    elif structure == 6:
        places = np.where(_LANE < 16, places[_LANE & ~1], places[_LANE & ~2])
    return np.asarray(places, dtype=np.int64)


def random_mask(rng: np.random.Generator) -> Mask:
    """All lanes half of the time, else one of many sets of lanes."""
    if rng.random() < 0.5:
        return _ALL
    choices = [*masks().values(), rng.random(32) < 0.5, rng.random(32) < 0.9, rng.integers(0, 33) > _LANE]
    return choices[int(rng.integers(0, len(choices)))]
