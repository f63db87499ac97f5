"""Many processes and threads at one cache, and processes killed at the worst moment."""

from __future__ import annotations

import hashlib
import multiprocessing
import secrets
import time
from collections import defaultdict
from pathlib import Path

import cache_worker
import numpy as np
import pytest

from tilewave.compiler import cache, program

SPAWN = multiprocessing.get_context("spawn")


def torture(base: Path, rounds: cache_worker.Kernels, processes: int, threads: int) -> None:
    """Let them all ask at once, round by round; every answer must be right and equal, without a warning."""
    barrier, results = SPAWN.Barrier(processes), SPAWN.Queue()
    workers = [
        SPAWN.Process(
            target=cache_worker.run, args=(str(base), rounds, threads, barrier, results), daemon=True
        )
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    reports = [results.get(timeout=280) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    count = 0
    for answers, messages in reports:
        assert messages == []
        for index, thread, answer in answers:
            assert not answer.startswith("error"), answer
            digests[index, thread % len(rounds[index])].add(answer)
            count += 1
    assert count == processes * threads * len(rounds)
    assert all(len(found) == 1 for found in digests.values()), "two processes got different machine code"
    for index, numbers in enumerate(rounds):
        names = [path.name for path in (base / str(index)).iterdir()]
        assert len(names) == len(numbers)
        assert all(name.endswith(".program") for name in names), "a temporary file was left behind"


def same_and_different(rounds: int) -> cache_worker.Kernels:
    """Rounds in turn with one kernel for all, and with one for each of sixteen threads; all of them new."""
    return [[secrets.randbits(30) for _ in range(1 if index % 2 == 0 else 16)] for index in range(rounds)]


def test_h079_processes_at_one_empty_cache(tmp_path: Path) -> None:
    """Handed case H079 (deepseek-ai/DeepGEMM#301): 8 processes, an empty cache, one kernel at once, 20 times.

    Entries are renamed into place and no file is ever locked, which is all that a network directory offers.
    """
    torture(tmp_path, [[secrets.randbits(30)] for _ in range(20)], processes=8, threads=1)


def test_eight_processes_with_sixteen_threads(tmp_path: Path) -> None:
    torture(tmp_path, same_and_different(4), processes=8, threads=16)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_processes_with_sixteen_threads_fifty_times(tmp_path: Path) -> None:
    for _ in range(5):
        torture(tmp_path / secrets.token_hex(4), same_and_different(20), processes=8, threads=16)


def test_killed_between_write_and_rename(cold_cache: Path) -> None:
    worker = SPAWN.Process(target=cache_worker.stop_before_rename, args=(str(cold_cache),), daemon=True)
    worker.start()
    deadline = time.monotonic() + 60
    while not list(cold_cache.glob("*.tmp")):
        assert time.monotonic() < deadline, "the worker wrote nothing"
        time.sleep(0.01)
    worker.kill()
    worker.join()
    assert list(cold_cache.glob("*.program")) == []
    cache_worker.ask(4711)
    assert len(list(cold_cache.glob("*.program"))) == 1
    program._programs.clear()
    cache_worker.ask(4711)


@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=pytest.mark.long)])
def test_killed_at_any_moment(kills: int, cold_cache: Path, rng: np.random.Generator) -> None:
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(16)]
    whole = 0
    for _ in range(kills):
        worker = SPAWN.Process(target=cache_worker.write_for_ever, args=(str(cold_cache),), daemon=True)
        worker.start()
        deadline = time.monotonic() + 60
        while not (cold_cache / f"{keys[-1]}.program").exists():
            assert time.monotonic() < deadline, "the worker wrote nothing"
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.02))
        worker.kill()
        worker.join()
        for key in keys:
            path = cold_cache / f"{key}.program"
            assert cache.decode(path.read_bytes(), key) is not None, "a reader could meet half an entry"
            path.unlink()
            whole += 1
    assert whole == kills * len(keys)
