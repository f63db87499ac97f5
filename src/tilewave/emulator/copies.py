"""Asynchronous copies (`cp.async`): they are invisible until their thread has waited for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.codegen import Access
from tilewave.emulator.lanes import Lanes
from tilewave.emulator.memory import POISON

if TYPE_CHECKING:
    from tilewave.emulator.machine import Machine


@dataclass
class _Copy:
    """Copies that some lanes started with one instruction: where each goes, its words, its commit group."""

    access: Access
    ids: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]  # word index in the machine's shared memory
    words: list[npt.NDArray[np.uint32]]
    groups: npt.NDArray[np.int64]

    def select(self, chosen: npt.NDArray[Any]) -> _Copy:
        """The copies of some of the lanes."""
        words = [word[chosen] for word in self.words]
        ids, addresses = self.ids[chosen], self.addresses[chosen]
        return _Copy(self.access, ids, addresses, self.places[chosen], words, self.groups[chosen])


class CopyQueue:
    """Copies in flight of all lanes of a machine.

    Their targets are poisoned meanwhile: a thread that reads one too early finds NaN, not old data.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._committed = np.zeros(machine.lane_count, dtype=np.int64)
        self._flying: list[_Copy] = []

    def start(
        self,
        lanes: Lanes,
        access: Access,
        addresses: npt.NDArray[np.int64],
        words: list[npt.NDArray[np.uint32]],
    ) -> None:
        """Queue one copy for each lane, to (checked) shared addresses."""
        places = (addresses + lanes.shared_bases) >> 2
        for offset in range(len(words)):
            self._machine.shared_words[places + offset] = POISON
        groups = self._committed[lanes.ids]
        self._flying.append(_Copy(access, lanes.ids, addresses, places, words, groups))
        self._note_write(self._flying[-1])

    def commit(self, lanes: Lanes) -> None:
        """Close the lanes' current group of copies."""
        self._committed[lanes.ids] += 1

    def wait(self, lanes: Lanes, newest: int | None) -> None:
        """Finish the lanes' copies but those of their `newest` groups; None: all, uncommitted ones too."""
        if not self._flying:
            return
        limits = np.full(len(self._committed), -1, dtype=np.int64)
        committed = self._committed[lanes.ids]
        limits[lanes.ids] = committed + 1 if newest is None else committed - newest
        remaining = []
        for copy in self._flying:
            ready = copy.groups < limits[copy.ids]
            if ready.all():
                self._finish(copy)
            elif ready.any():
                self._finish(copy.select(ready))
                remaining.append(copy.select(~ready))
            else:
                remaining.append(copy)
        self._flying = remaining

    def _note_write(self, copy: _Copy) -> None:
        """Tell the race detector. A copy may write until the wait for it ends."""
        machine = self._machine
        if machine.races is not None:
            lanes = Lanes(machine, copy.ids)
            machine.races.write(lanes, copy.access, copy.addresses, 4 * len(copy.words), None)

    def _finish(self, copy: _Copy) -> None:
        self._note_write(copy)
        for offset, word in enumerate(copy.words):
            self._machine.shared_words[copy.places + offset] = word
