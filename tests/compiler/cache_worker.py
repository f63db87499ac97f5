"""What a process of the torture tests does; a module of its own, so that spawned processes import little."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
import warnings
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

Kernels = list[list[int]]
"""For each round, the numbers that the kernels of the round store."""


def ask(number: int) -> str:
    """Ask for the kernel that stores ``number``; the digest of its cubin, once sure it is that kernel."""
    from tilewave.compiler import Source, compile_source

    text = f'extern "C" __global__ void k(int* p) {{ p[0] = {number}; }}\n'
    built = compile_source(Source.from_text("asked.cu", text), ["k"], "sm_90")
    if f"{number};" not in built.ptx or struct.pack("<I", number) not in built.cubin:
        raise AssertionError(f"asked for {number}, got another kernel:\n{built.ptx}")
    return hashlib.sha256(built.cubin).hexdigest()


def run(base: str, rounds: Kernels, threads: int, barrier: Barrier, results: Any) -> None:
    """All rounds: meet the other processes, forget everything, then all threads ask at once.

    Thread ``t`` asks for number ``t % len(numbers)``: a round of one number has all want the same kernel.
    Puts one list of (round, thread, digest or error) and the number of warnings into ``results``.
    """
    from tilewave.compiler import program

    answers: list[tuple[int, int, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, numbers in enumerate(rounds):
            os.environ["TILEWAVE_CACHE_DIR"] = str(Path(base) / str(index))
            program._programs.clear()
            start = threading.Barrier(threads)

            def work(thread: int, index: int = index, numbers: list[int] = numbers) -> None:
                start.wait()  # noqa: B023  (joined before the next round)
                try:
                    answer = ask(numbers[thread % len(numbers)])
                except BaseException as error:
                    answer = f"error: {error!r}"
                answers.append((index, thread, answer))

            workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
            barrier.wait(timeout=120)
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    results.put((answers, [str(one.message) for one in caught]))


def write_for_ever(base: str) -> None:
    """Write entries until killed, so that the kill strikes at any point of a write."""
    from tilewave.compiler import cache, program

    os.environ["TILEWAVE_CACHE_DIR"] = base
    ask(1)
    built = next(iter(program._programs.values()))
    while True:
        for number in range(16):
            cache.store(hashlib.sha256(bytes([number])).hexdigest(), built)


def stop_before_rename(base: str) -> None:
    """Compile, write the temporary file, and then wait to be killed instead of renaming it."""
    os.environ["TILEWAVE_CACHE_DIR"] = base
    os.replace = lambda *_, **__: time.sleep(600)  # type: ignore[assignment]
    ask(4711)
