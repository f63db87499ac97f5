"""How many passes shared memory needs, and how many 32-byte sectors global memory moves, for a warp's access.

The rules that every reading of single accesses on an H200 follows (docs/truth-table.md says how they were
found). Shared memory has 32 banks of 4 bytes.

Loads and stores:

* A request is served in *groups* of lanes: 4-byte and narrower accesses by the whole warp, 8-byte ones by
  half a warp, 16-byte ones by a quarter of a warp.
* Two groups of a *load* merge into one (the two halves of a warp at 8 bytes, the two quarters of each
  half-warp at 16 bytes) when over the *whole warp* every active lane has the address of lane^1, or every one
  has the address of lane^2; a lane that is off agrees with every address. Stores do not merge.
* A group costs as many *passes* (ncu: wavefronts) as the largest number of distinct 4-byte words that its
  active lanes touch in any one bank; a word that several lanes touch counts once. A group without active
  lanes is free.
* A *conflict* is a pass beyond the one that each group with active lanes needs.

Copies from global to shared memory (`cp.async`) through the L1 cache (`.ca`):

* Groups are those of a store, and each splits further by *lookups* of the L1 tags: one lookup takes one
  128-byte line from each of four sets, the first that waits there in the order of the lanes. `tag_sets`
  gives a line's set. If all of the source lies in L1 already, there is no such split.
* In a group, lanes pass in order: a lane goes one pass after the latest earlier lane with its bank of source
  or its bank of target (a bank being as wide as the access); words that lanes share count each time.
* Lanes that write zeros without reading (a source size of 0) form groups of their own.

Copies past the L1 cache (`.cg`) take no pass, but for lanes that write zeros: those pass as a store of theirs
would. Sectors are the pairs of source line and 32-byte sector of shared memory; of lanes with the same target
only those count whose line most lanes read (of equally many: the line that a lower lane has).

All functions take byte addresses of shape (warps, 32) and `active`, the lanes that take part (None: all), and
return one figure a warp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewave.errors import UsageError

Kind = Literal["load", "store"]
_Counted = Literal["load", "store", "sectors", "copy", "bypass"]
_Figures = tuple[int, ...]
Counts = npt.NDArray[np.int64]

WARP = 32
BANKS = 32
SECTOR_BYTES = 32
LINE_BYTES = 128

TAG_SET_BITS = (1, 2, 1, 2, 3, 1, 2, 3, 2, 1, 2, 1, 3, 1)
"""What each address bit from bit 7 to bit 20 contributes (by exclusive or) to the number of a line's tag set.
Higher bits were never read; they are taken to contribute nothing."""

_OFF = np.int64(-1)


def shared_passes(
    addresses: npt.NDArray[Any],
    active: npt.NDArray[np.bool_] | None,
    width: int,
    kind: Kind = "load",
) -> tuple[Counts, Counts]:
    """Passes and conflicts of each warp's shared-memory access of `width` bytes a lane (1, 2, 4, 8 or 16)."""
    addresses, active = _checked(addresses, active, width)
    words_per_lane = max(1, width // 4)
    groups = words_per_lane
    lanes = WARP // groups
    warps = len(addresses)
    first_words = np.where(active, addresses >> 2, _OFF).reshape(warps, groups, lanes)
    words = first_words[..., None] + np.arange(words_per_lane)
    words[first_words < 0] = _OFF
    words = words.reshape(warps, groups, WARP)
    passes = _largest_in_a_bank(words.reshape(-1, WARP)).reshape(warps, groups)
    cost, served = passes.sum(axis=1), (passes > 0).sum(axis=1)
    if groups == 1 or kind == "store":
        return cost, cost - served
    whole = first_words.reshape(warps, WARP)
    merged = np.flatnonzero(lanes_agree(whole, 1) | lanes_agree(whole, 2))
    pairs = words[merged].reshape(-1, 2 * WARP)
    together = _largest_in_a_bank(pairs).reshape(len(merged), groups // 2)
    cost[merged], served[merged] = together.sum(axis=1), (together > 0).sum(axis=1)
    return cost, cost - served


def global_sectors(addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int) -> Counts:
    """Distinct 32-byte sectors that each warp's access of `width` bytes a lane touches."""
    addresses, active = _checked(addresses, active, width)
    # A naturally aligned access of at most 16 bytes lies in one sector.
    return _distinct(np.where(active, addresses // SECTOR_BYTES, _OFF))


def local_sectors(offsets: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int) -> Counts:
    """Distinct 32-byte sectors that each warp's access to local memory touches.

    `offsets` count bytes from the start of each thread's own local memory. The hardware interleaves the
    4-byte words of a warp's lanes: word i of all 32 lanes fills 128 consecutive bytes.
    """
    offsets, active = _checked(offsets, active, width)
    words = offsets[..., None] // 4 + np.arange(max(1, width // 4))
    lane_groups = np.arange(WARP) // (SECTOR_BYTES // 4)
    sectors = words * (lane_groups[-1] + 1) + lane_groups[:, None]
    return _distinct(np.where(active[..., None], sectors, _OFF).reshape(len(offsets), -1))


def tag_sets(lines: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which of the four sets of L1 tags looks up each line (`lines`: addresses divided by 128)."""
    sets = np.zeros(lines.shape, dtype=np.int64)
    for bit in range(2):
        mask = sum(1 << i for i, value in enumerate(TAG_SET_BITS) if value >> bit & 1)
        sets |= (np.bitwise_count(lines & mask) & 1).astype(np.int64) << bit
    return sets


def copy_figures(
    targets: npt.NDArray[Any],
    sources: npt.NDArray[Any],
    active: npt.NDArray[np.bool_] | None,
    width: int,
    *,
    bypass: bool = False,
    reads: npt.NDArray[np.bool_] | None = None,
    hits: bool = False,
) -> tuple[Counts, Counts, Counts]:
    """Passes, conflicts and sectors of each warp's copy of `width` bytes a lane (4, 8 or 16).

    `targets` are addresses in shared memory and `sources` in global memory, of shape (warps, 32). `bypass`
    says that the copy goes past the L1 cache (`.cg`). `reads` are the lanes that read their source; other
    active ones write zeros (None: all read). `hits` says that L1 holds all of the source.
    """
    targets, active = _checked(targets, active, width)
    sources, reading = _checked(sources, reads, width)
    reading = reading & active
    lines = np.where(reading, sources // LINE_BYTES, _OFF)
    if bypass:
        passes, conflicts = shared_passes(targets, active & ~reading, width, "store")
        pairs = (lines << 20) | (targets // SECTOR_BYTES)
        return passes, conflicts, _distinct(np.where(_requested(targets, lines), pairs, _OFF))
    sectors = _distinct(np.where(reading, sources // SECTOR_BYTES, _OFF))
    banks = BANKS * 4 // width
    quarters = np.arange(WARP) // banks
    # With lanes that write zeros there are at most 31 lines, so the last number is free for them.
    lookups = np.where(reading, 0 if hits else _lookups(lines), WARP - 1)
    groups = np.where(active, quarters * WARP + lookups, _OFF)
    clash = (groups[:, :, None] == groups[:, None, :]) & active[:, :, None]
    target_banks, source_banks = targets // width % banks, np.where(reading, sources // width % banks, _OFF)
    same_source = (source_banks[:, :, None] == source_banks[:, None, :]) & reading[:, :, None]
    clash &= (target_banks[:, :, None] == target_banks[:, None, :]) | same_source
    turns = np.zeros(targets.shape, dtype=np.int64)
    for lane in range(WARP):
        turns[:, lane] = 1 + (turns[:, :lane] * clash[:, lane, :lane]).max(axis=1, initial=0)
    # Turns of a group are 1, 2, ... without gaps, so distinct ones are its passes.
    passes = _distinct(np.where(active, groups * (WARP + 1) + turns, _OFF))
    return passes, passes - _distinct(groups), sectors


def _requested(targets: npt.NDArray[np.int64], lines: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which lanes with a line count in a copy past L1: of those with one target, those of the first line.

    The line with the most lanes comes first; of equals, the one that a lower lane has.
    """
    same_line = lines[:, :, None] == lines[:, None, :]
    ranks = same_line.sum(axis=2) * WARP - np.argmax(same_line, axis=2)
    ranks = np.where(lines < 0, _OFF, ranks)
    rivals = np.where(targets[:, :, None] == targets[:, None, :], ranks[:, None, :], _OFF)
    requested: npt.NDArray[np.bool_] = (lines >= 0) & (ranks == rivals.max(axis=2))
    return requested


def _lookups(lines: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of the tag lookup that takes each lane's line (negative: no line, any number)."""
    first = _first_equal(lines)
    sets = tag_sets(lines)
    heads = (first == np.arange(WARP)) & (lines >= 0)
    earlier = heads[:, None, :] & (sets[:, :, None] == sets[:, None, :])
    before = (earlier & np.tri(WARP, k=-1, dtype=np.bool_)).sum(axis=2)
    lookups: npt.NDArray[np.int64] = np.take_along_axis(before, first, axis=1)
    return lookups


def _first_equal(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each lane the first lane of its row with the same value."""
    first: npt.NDArray[np.int64] = np.argmax(values[:, :, None] == values[:, None, :], axis=2)
    return first


class CopySums(NamedTuple):
    """Figures of several copies that miss L1; their passes and conflicts if all their sources are in it."""

    passes: int
    conflicts: int
    sectors: int
    hit_passes: int
    hit_conflicts: int


class PatternMemo:
    """The figures above, summed over warps, by remembering the patterns of addresses met so far.

    Passes do not change when all addresses move by the same multiple of 4 bytes, nor sectors when they move
    by a multiple of 32; how that is for copies, `copy_figures` says. Kernels repeat few patterns, so counting
    becomes a look-up by a 64-bit hash of the relative addresses (random odd multipliers drawn once per memo).
    """

    def __init__(self) -> None:
        draw = np.random.default_rng()
        self._factors = draw.integers(1, 1 << 62, WARP, dtype=np.int64) | 1
        self._off_factors = draw.integers(1, 1 << 62, WARP, dtype=np.int64) | 1
        self._source_factors = draw.integers(1, 1 << 62, (3, WARP), dtype=np.int64) | 1
        self._known: dict[tuple[str, int], dict[int, _Figures]] = {}

    def shared_passes(
        self,
        addresses: npt.NDArray[Any],
        active: npt.NDArray[np.bool_] | None,
        width: int,
        kind: Kind = "load",
    ) -> tuple[int, int]:
        """Passes and conflicts summed over all warps."""
        passes, conflicts = self._single(kind, addresses, active, width, granule=4)
        return passes, conflicts

    def global_sectors(
        self, addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int
    ) -> int:
        """Sectors summed over all warps."""
        return self._single("sectors", addresses, active, width, granule=SECTOR_BYTES)[0]

    def copy_figures(
        self,
        targets: npt.NDArray[Any],
        sources: npt.NDArray[Any],
        active: npt.NDArray[np.bool_] | None,
        width: int,
        *,
        bypass: bool = False,
        reads: npt.NDArray[np.bool_] | None = None,
    ) -> CopySums:
        """The figures of copies, summed over all warps.

        They do not change when all targets move by a multiple of 128 bytes, or all sources by a multiple of
        128 bytes that keeps which of the lines share a tag set.
        """
        if len(targets) == 0:
            return CopySums(0, 0, 0, 0, 0)
        if active is None:
            active = np.ones(targets.shape, dtype=np.bool_)
        reading = active if reads is None else active & reads
        hashes = self._hashes(targets, active, LINE_BYTES)
        offsets, first = _relative(sources, reading, LINE_BYTES)
        sets = tag_sets(sources.astype(np.int64) // LINE_BYTES)
        sets ^= np.take_along_axis(sets, first[:, None], axis=1)
        parts = (np.where(reading, offsets, 0), np.where(reading, sets, 0), ~reading)
        for part, factors in zip(parts, self._source_factors, strict=True):
            hashes += part @ factors

        def count(rows: npt.NDArray[np.intp]) -> list[_Figures]:
            on, read = active[rows], reading[rows]
            misses, hits = (
                copy_figures(targets[rows], sources[rows], on, width, bypass=bypass, reads=read, hits=hits)
                for hits in (False, True)
            )
            return list(zip(*(figure.tolist() for figure in (*misses, *hits[:2])), strict=True))

        return CopySums(*self._total("bypass" if bypass else "copy", width, hashes, count))

    def _single(
        self,
        kind: _Counted,
        addresses: npt.NDArray[Any],
        active: npt.NDArray[np.bool_] | None,
        width: int,
        granule: int,
    ) -> _Figures:
        if len(addresses) == 0:
            return 0, 0

        def count(rows: npt.NDArray[np.intp]) -> list[_Figures]:
            on = None if active is None else active[rows]
            return _figures(kind, addresses[rows], on, width)

        return self._total(kind, width, self._hashes(addresses, active, granule), count)

    def _hashes(
        self, addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, granule: int
    ) -> npt.NDArray[np.int64]:
        """One number for each warp's pattern of addresses, relative to a multiple of `granule`."""
        offsets, _ = _relative(addresses, active, granule)
        if active is None:
            hashes: npt.NDArray[np.int64] = offsets @ self._factors
        else:
            hashes = np.where(active, offsets, 0) @ self._factors + ~active @ self._off_factors
        return hashes

    def _total(
        self,
        kind: _Counted,
        width: int,
        hashes: npt.NDArray[np.int64],
        count: Callable[[npt.NDArray[np.intp]], list[_Figures]],
    ) -> _Figures:
        """The figures of all patterns, each times how often it occurs; `count` finds those of some rows."""
        known = self._known.setdefault((kind, width), {})
        patterns, rows, counts = np.unique(hashes, return_index=True, return_counts=True)
        keys = patterns.tolist()
        fresh = [i for i, pattern in enumerate(keys) if pattern not in known]
        if fresh:
            known.update(zip([keys[i] for i in fresh], count(rows[fresh]), strict=True))
        totals = [0] * len(known[keys[0]])
        for pattern, times in zip(keys, counts.tolist(), strict=True):
            for index, figure in enumerate(known[pattern]):
                totals[index] += figure * times
        return tuple(totals)


def _relative(
    addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, granule: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Addresses less that of the first active lane, rounded down to `granule`; and which lane that is."""
    first = np.zeros(len(addresses), dtype=np.intp) if active is None else np.argmax(active, axis=1)
    offsets = addresses.astype(np.int64)
    offsets -= np.take_along_axis(offsets, first[:, None], axis=1) & -granule
    return offsets, first


def _figures(
    kind: _Counted, addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int
) -> list[_Figures]:
    """Passes and conflicts, or sectors, of each warp."""
    if kind == "sectors":
        return [(sectors,) for sectors in global_sectors(addresses, active, width).tolist()]
    passes, conflicts = shared_passes(addresses, active, width, "store" if kind == "store" else "load")
    return list(zip(passes.tolist(), conflicts.tolist(), strict=True))


def _checked(
    addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    if width not in (1, 2, 4, 8, 16):
        raise UsageError(f"an access of {width} bytes does not exist; accepted are 1, 2, 4, 8 and 16")
    if addresses.ndim != 2 or addresses.shape[1] != WARP:
        raise UsageError(f"addresses have shape {addresses.shape}; accepted is (warps, {WARP})")
    if active is None:
        active = np.ones(addresses.shape, dtype=np.bool_)
    return addresses.astype(np.int64), active


def _largest_in_a_bank(words: npt.NDArray[np.int64]) -> Counts:
    """For each row of word indices (negative: none), the most distinct words that fall into one bank."""
    rows = len(words)
    # Sorting by (bank, word) brings equal words together.
    keys = np.where(words < 0, _OFF, (words % BANKS << 48) | words)
    keys.sort(axis=1)
    fresh = np.empty(keys.shape, dtype=np.bool_)
    fresh[:, 0] = True
    np.not_equal(keys[:, 1:], keys[:, :-1], out=fresh[:, 1:])
    fresh &= keys >= 0
    row, column = np.nonzero(fresh)
    banks = keys[row, column] >> 48
    counts = np.bincount(row * BANKS + banks, minlength=rows * BANKS).reshape(rows, BANKS)
    largest: Counts = counts.max(axis=1).astype(np.int64)
    return largest


def _distinct(values: npt.NDArray[np.int64]) -> Counts:
    """How many distinct values (negative: none) each row holds."""
    ordered = np.sort(values, axis=1)
    fresh = np.empty(ordered.shape, dtype=np.bool_)
    fresh[:, 0] = True
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=fresh[:, 1:])
    count: Counts = (fresh & (ordered >= 0)).sum(axis=1)
    return count


def lanes_agree(addresses: npt.NDArray[np.int64], bit: int) -> npt.NDArray[np.bool_]:
    """For each row of addresses (negative: off), whether every lane has that of lane^bit, or one is off."""
    partner = addresses[..., np.arange(addresses.shape[-1]) ^ bit]
    agree = (addresses == partner) | (addresses < 0) | (partner < 0)
    result: npt.NDArray[np.bool_] = agree.all(axis=-1)
    return result
