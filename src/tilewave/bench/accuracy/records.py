"""A run of `tilewave accuracy` as data, and its file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewave.errors import UsageError

FORMAT = "tilewave accuracy 1"


@dataclass(frozen=True, slots=True)
class Point:
    """The error of one contender on one pair of operands, against float64.

    ``relative`` is the error in Frobenius's norm over that of the exact product; ``componentwise`` the
    largest |error| / sum |a||b|, in units of u = 2^-24; ``in_bounds`` the largest error in units of the bound
    of the contender's mode; ``recomputed`` the share of elements that fp16x3 computes as ieee. None is an
    infinity or NaN: where a product overflows, or is zero.
    """

    data: str
    k: int
    contender: str
    relative: float | None
    componentwise: float | None
    in_bounds: float | None
    recomputed: float
    seconds: float


@dataclass(frozen=True, slots=True)
class AccuracyRun:
    """All points, and what they were made with. ``m`` and ``n`` are the sizes of the products."""

    m: int
    n: int
    seed: int
    contenders: dict[str, str]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()
    points: tuple[Point, ...] = field(default=())

    @property
    def data(self) -> list[str]:
        """Names of the data sets, in order."""
        return list(dict.fromkeys(point.data for point in self.points))

    def series(self, data: str, contender: str) -> list[Point]:
        """The points of one line, by K."""
        found = [point for point in self.points if (point.data, point.contender) == (data, contender)]
        return sorted(found, key=lambda point: point.k)

    def write(self, path: Path) -> None:
        """Write the run as JSON. Raises ``UsageError`` where that cannot be done."""
        try:
            path.write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def load_accuracy(path: Path) -> AccuracyRun:
    """Read a run. Raises ``UsageError`` for anything but a file of `AccuracyRun.write`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        points = tuple(Point(**point) for point in content.pop("points"))
        return AccuracyRun(**content | {"notes": tuple(content["notes"])}, points=points)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a file of `tilewave accuracy --json`: {why}") from error
