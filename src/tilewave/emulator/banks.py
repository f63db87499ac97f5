"""Where each word of a warp's shared-memory access lies: its bank, and the pass that serves it.

`passes.shared_passes` says how many passes an access takes; this says which lanes are in which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.passes import BANKS, WARP, Kind, lanes_agree, shared_passes
from tilewave.errors import UsageError


@dataclass(frozen=True)
class BankWord:
    """A 4-byte word that some lanes of one group touch.

    ``group`` counts the groups of lanes that are served together, ``turn`` the words of this bank in the
    group before this one, and ``number`` the passes of the whole access before the word's. Which of a bank's
    words goes first is not known; they are numbered by the first lane that wants them.
    """

    group: int
    turn: int
    number: int
    bank: int
    address: int
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class BankMap:
    """One access of a warp, word by word. ``groups`` holds the active lanes of each group that has any."""

    width: int
    kind: Kind
    addresses: tuple[int | None, ...]
    groups: tuple[tuple[int, ...], ...]
    words: tuple[BankWord, ...]
    passes: int
    conflicts: int

    def in_conflict(self, word: BankWord) -> bool:
        """Whether other words of the word's group lie in its bank."""
        return any(
            other is not word and (other.group, other.bank) == (word.group, word.bank) for other in self.words
        )


def bank_map(
    addresses: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None, width: int, kind: Kind = "load"
) -> BankMap:
    """The words of one warp's access of `width` bytes a lane; `addresses` and `active` hold 32 lanes."""
    if addresses.shape != (WARP,):
        raise UsageError(f"addresses have shape {addresses.shape}; accepted is ({WARP},)")
    on = np.ones(WARP, dtype=np.bool_) if active is None else active
    passes, conflicts = shared_passes(addresses[None], on[None], width, kind)
    per_lane = max(1, width // 4)
    lanes_together = WARP // per_lane
    first_words = np.where(on, addresses.astype(np.int64) >> 2, -1)
    if kind == "load" and per_lane > 1 and any(lanes_agree(first_words[None], bit)[0] for bit in (1, 2)):
        lanes_together *= 2
    words: list[BankWord] = []
    groups: list[tuple[int, ...]] = []
    before = 0
    for start in range(0, WARP, lanes_together):
        lanes = tuple(lane for lane in range(start, start + lanes_together) if on[lane])
        if not lanes:
            continue
        wanted: dict[int, list[int]] = {}
        for lane in lanes:
            for word in range(int(first_words[lane]), int(first_words[lane]) + per_lane):
                wanted.setdefault(word, []).append(lane)
        turns = [0] * BANKS
        for word, by in wanted.items():
            bank = word % BANKS
            turn = turns[bank]
            turns[bank] += 1
            words.append(BankWord(len(groups), turn, before + turn, bank, 4 * word, tuple(by)))
        groups.append(lanes)
        before += max(turns)
    places = tuple(int(address) if here else None for address, here in zip(addresses, on, strict=True))
    return BankMap(width, kind, places, tuple(groups), tuple(words), int(passes[0]), int(conflicts[0]))
