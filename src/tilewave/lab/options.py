"""Reading what a user typed: sizes, rungs, budget, output files. Every mistake is one clear line."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tilewave.errors import UsageError

#: Above this, even one matrix of a product takes more than 4 GiB.
LARGEST_SIZE = 32768
#: The emulator keeps the three matrices in main memory: 0.8 GB at this size.
LARGEST_EMULATED_SIZE = 8192


def parse_sizes(text: str, largest: int = LARGEST_SIZE) -> tuple[int, ...]:
    """Sizes from "1024,2048", ascending and without repeats."""
    sizes = set()
    for word in text.split(","):
        size = _integer(word)
        if size is None or not 1 <= size <= largest:
            raise UsageError(f"size {word.strip()!r}: whole numbers from 1 to {largest} are accepted")
        sizes.add(size)
    return tuple(sorted(sizes))


def parse_numbers(text: str, known: Iterable[int], what: str = "rung") -> tuple[int, ...]:
    """Numbers of rungs (or of ``what``) from "1-5,9", ascending, without repeats; each must be known."""
    available = sorted(known)
    chosen: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.partition("-")
        low, high = _integer(first), _integer(last if dash else first)
        if low is None or high is None or low > high:
            raise UsageError(f"{what}s {word.strip()!r}: a number or a range such as 1-5 is accepted")
        chosen_here = range(low, high + 1)
        unknown = next((number for number in chosen_here if number not in available), None)
        if unknown is not None:
            raise UsageError(f"{what} {unknown} is unknown: there are {_as_ranges(available)}")
        chosen.update(chosen_here)
    return tuple(sorted(chosen))


def check_budget(seconds: float | None) -> float | None:
    """A budget in seconds, which must be positive and finite."""
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"budget {seconds:g}: a positive number of seconds is accepted")
    return seconds


def check_jobs(jobs: int | None) -> int:
    """A number of processes; by default as many as this process may use cores."""
    if jobs is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs < 1:
        raise UsageError(f"jobs {jobs}: 1 or more is accepted")
    return jobs


def check_writable(path: Path) -> None:
    """Make sure, before long work, that a file can be written there."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"cannot write {path}: permission denied")
    try:
        with tempfile.TemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _integer(text: str) -> int | None:
    """A plain decimal number, or None: "0x10", "1_000", "1e3" and "٣" are not what a user meant."""
    word = text.strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else None


def _as_ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 5] as "1-3, 5"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
