"""How many passes shared memory needs, and how many 32-byte sectors global memory moves, for a warp's access.

Shared memory has 32 banks of 4 bytes. The rule that all readings on an H200 follow:

* A request is served in *groups* of lanes: 4-byte and narrower accesses by the whole warp, 8-byte ones by
  half a warp, 16-byte ones by a quarter of a warp.
* Two groups of a *load* merge into one (the two halves of a warp at 8 bytes, the two quarters of each
  half-warp at 16 bytes) when every active lane of the pair has the address of lane^1, or every one has the
  address of lane^2; a lane that is off agrees with every address. Stores do not merge.
* A group costs as many *passes* (ncu: wavefronts) as the largest number of distinct 4-byte words that its
  active lanes touch in any one bank; a word that several lanes touch counts once. A group without active
  lanes is free.
* A *conflict* is a pass beyond the one that each group with active lanes needs.

All functions take `addresses`, byte addresses of shape (warps, 32), and `active`, the lanes that take part
(None: all), and return one figure a warp.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilewave.errors import UsageError

Kind = Literal["load", "store"]
_Counted = Literal["load", "store", "sectors"]
Counts = npt.NDArray[np.int64]

WARP = 32
BANKS = 32
SECTOR_BYTES = 32

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
    if groups == 1 or kind == "store":
        total = passes.sum(axis=1)
        return total, total - (passes > 0).sum(axis=1)
    pairs = first_words.reshape(warps, groups // 2, 2 * lanes)
    merged = _agrees(pairs, 1) | _agrees(pairs, 2)
    halves = words.reshape(-1, 2 * WARP)
    together = np.zeros(len(halves), dtype=np.int64)
    chosen = np.flatnonzero(merged.reshape(-1))
    together[chosen] = _largest_in_a_bank(halves[chosen])
    apart = passes.reshape(-1, 2)
    flat = merged.reshape(-1)
    cost = np.where(flat, together, apart.sum(axis=1))
    served = np.where(flat, together > 0, (apart > 0).sum(axis=1))
    cost, served = cost.reshape(warps, -1).sum(axis=1), served.reshape(warps, -1).sum(axis=1)
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


class PatternMemo:
    """`shared_passes` and `global_sectors` that remember the patterns of addresses they have met.

    Passes do not change when all addresses move by the same multiple of 4 bytes, nor sectors when they move
    by a multiple of 32. Kernels repeat few patterns, so counting becomes a look-up by a 64-bit hash of the
    relative addresses (random odd multipliers drawn once per memo).
    """

    def __init__(self) -> None:
        self._factors = np.random.default_rng().integers(1, 1 << 62, WARP, dtype=np.int64) | 1
        self._off_factors = np.random.default_rng().integers(1, 1 << 62, WARP, dtype=np.int64) | 1
        self._known: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}

    def shared_passes(
        self,
        addresses: npt.NDArray[Any],
        active: npt.NDArray[np.bool_] | None,
        width: int,
        kind: Kind = "load",
    ) -> tuple[int, int]:
        """Passes and conflicts summed over all warps."""
        return self._total(kind, addresses, active, width, granule=4)

    def global_sectors(
        self, addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int
    ) -> int:
        """Sectors summed over all warps."""
        return self._total("sectors", addresses, active, width, granule=SECTOR_BYTES)[0]

    def _total(
        self,
        kind: _Counted,
        addresses: npt.NDArray[Any],
        active: npt.NDArray[np.bool_] | None,
        width: int,
        granule: int,
    ) -> tuple[int, int]:
        if len(addresses) == 0:
            return 0, 0
        offsets = addresses.astype(np.int64)
        if active is None:
            base = offsets[:, :1] & -granule
            offsets -= base
            hashes = offsets @ self._factors
        else:
            first = np.argmax(active, axis=1)
            base = offsets[np.arange(len(offsets)), first][:, None] & -granule
            offsets -= base
            hashes = np.where(active, offsets, 0) @ self._factors + ~active @ self._off_factors
        known = self._known.setdefault((kind, width), {})
        patterns, rows, counts = np.unique(hashes, return_index=True, return_counts=True)
        keys = patterns.tolist()
        fresh = [i for i, pattern in enumerate(keys) if pattern not in known]
        if fresh:
            chosen = rows[fresh]
            on = None if active is None else active[chosen]
            known.update(
                zip([keys[i] for i in fresh], _figures(kind, addresses[chosen], on, width), strict=True)
            )
        passes = conflicts = 0
        for pattern, count in zip(keys, counts.tolist(), strict=True):
            figures = known[pattern]
            passes += figures[0] * count
            conflicts += figures[1] * count
        return passes, conflicts


def _figures(
    kind: _Counted, addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int
) -> list[tuple[int, int]]:
    """Passes and conflicts, or sectors and 0, of each warp."""
    if kind == "sectors":
        return [(sectors, 0) for sectors in global_sectors(addresses, active, width).tolist()]
    passes, conflicts = shared_passes(addresses, active, width, kind)
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


def _agrees(addresses: npt.NDArray[np.int64], bit: int) -> npt.NDArray[np.bool_]:
    """Whether each active lane of the last axis has the address of lane^bit, or that lane is off."""
    partner = addresses[..., np.arange(addresses.shape[-1]) ^ bit]
    agree = (addresses == partner) | (addresses < 0) | (partner < 0)
    result: npt.NDArray[np.bool_] = agree.all(axis=-1)
    return result
