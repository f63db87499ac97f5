"""The register file: rows of lanes for each width of slot, and views of them by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.flow import Slots
from tilewave.emulator.memory import POISON

_DTYPES = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_PARTS = {"p": 1, "h": 16, "r": 32, "d": 64}
_FEW = 256  # lanes up to which NumPy's cost per call outweighs that of copying in two dimensions
_UNWRITTEN = {1: False, 16: POISON & 0xFFFF, 32: POISON, 64: POISON << 32 | POISON}


class RegisterFile:
    """Registers of up to `lanes` lanes, poisoned; `rows` gives views of the first n lanes of named rows."""

    def __init__(self, slots: Slots, scratch_rows: int, lanes: int) -> None:
        self.parts: dict[int, npt.NDArray[Any]] = {
            width: np.full((count, lanes), _UNWRITTEN[width], dtype=_DTYPES[width])
            for width, count in slots.counts.items()
        }
        self._scratch = np.zeros((scratch_rows, lanes), dtype=np.uint64)
        self._whole: dict[str, npt.NDArray[Any]] = {}  # views of all lanes
        self._known: dict[tuple[int, int, int], tuple[npt.NDArray[Any], ...]] = {}

    def rows(self, key: int, names: list[str], n: int, start: int = 0) -> tuple[npt.NDArray[Any], ...]:
        """Views of n lanes from `start` on of the named rows; `key` identifies the list of names."""
        place = (key, n, start)
        if place not in self._known:
            if len(self._known) > 5000:
                self._known.clear()
            self._known[place] = tuple(self.row(name, n, start) for name in names)
        return self._known[place]

    def row(self, name: str, n: int, start: int = 0) -> npt.NDArray[Any]:
        """A view such as `r5_f4` of n lanes from `start` on; scratch space has no lanes of its own."""
        view = self._whole.get(name)
        if view is None:
            view = self._whole[name] = self._view(name)
        return view[:n] if name[0] == "t" else view[start : start + n]

    def _view(self, name: str) -> npt.NDArray[Any]:
        place, code = name.split("_")
        dtype = np.dtype(code)
        if place[0] == "t":
            scratch: npt.NDArray[Any] = self._scratch[int(place[1:])].view(dtype)
            return scratch
        row: npt.NDArray[Any] = self.parts[_PARTS[place[0]]][int(place[1:])]
        step = row.itemsize // dtype.itemsize  # a narrower view takes the low part of each value
        return row.view(dtype)[::step] if step > 1 else row.view(dtype)

    def copy_lanes(
        self, source: RegisterFile, lanes: npt.NDArray[np.intp], slots: dict[int, list[int]]
    ) -> None:
        """Gather some lanes of another file into the first lanes of this one."""
        n = len(lanes)
        for width, numbers in slots.items():
            if n <= _FEW:
                self.parts[width][numbers, :n] = source.parts[width][np.ix_(np.asarray(numbers), lanes)]
                continue
            for slot in numbers:
                np.take(source.parts[width][slot], lanes, out=self.parts[width][slot][:n], mode="clip")

    def return_lanes(
        self, target: RegisterFile, lanes: npt.NDArray[np.intp], slots: dict[int, list[int]]
    ) -> None:
        """Scatter the first lanes of this file to some lanes of another one."""
        n = len(lanes)
        for width, numbers in slots.items():
            if n <= _FEW:
                target.parts[width][np.ix_(np.asarray(numbers), lanes)] = self.parts[width][numbers, :n]
                continue
            for slot in numbers:
                target.parts[width][slot][lanes] = self.parts[width][slot][:n]

    def compact(self, keep: npt.NDArray[np.intp]) -> None:
        """Move the lanes to keep to the front."""
        for part in self.parts.values():
            part[:, : len(keep)] = part[:, keep]
