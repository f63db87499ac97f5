"""Work without a GPU, spread over processes and held to a budget of wall-clock time."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Budget:
    """Wall-clock time that may be spent; without a limit it never ends."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = math.inf if seconds is None else now() + seconds

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        return self._end - self._now()


def run_tasks(
    work: Callable[[_Task], _Result], tasks: Sequence[_Task], jobs: int, budget: Budget
) -> Iterator[tuple[_Task, _Result]]:
    """Yield each task with its result as they come, from ``jobs`` worker processes if that helps.

    None is started that is expected to outlast the budget: tasks that do not come back were left out. With
    several workers, ``work``, tasks and results must travel between processes, and the caller's main module
    must be importable: workers are spawned, since a fork would inherit a CUDA that it cannot use.
    """
    if jobs == 1 or len(tasks) < 2:
        yield from _one_by_one(work, tasks, budget)
        return
    context = multiprocessing.get_context("spawn")
    workers = min(jobs, len(tasks))
    with concurrent.futures.ProcessPoolExecutor(workers, context, _leave_interrupts_to_the_parent) as pool:
        waiting = iter(tasks)
        running: dict[concurrent.futures.Future[_Result], tuple[_Task, float]] = {}
        longest = 0.0
        try:
            while True:
                while len(running) < jobs and budget.left > longest:
                    task = next(waiting, None)
                    if task is None:
                        break
                    running[pool.submit(work, task)] = (task, time.monotonic())
                if not running:
                    return
                done: Iterable[concurrent.futures.Future[_Result]] = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                ).done
                for future in done:
                    task, started = running.pop(future)
                    longest = max(longest, time.monotonic() - started)
                    yield task, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _one_by_one(
    work: Callable[[_Task], _Result], tasks: Sequence[_Task], budget: Budget
) -> Iterator[tuple[_Task, _Result]]:
    longest = 0.0
    for task in tasks:
        if budget.left <= longest:
            return
        started = time.monotonic()
        yield task, work(task)
        longest = max(longest, time.monotonic() - started)
