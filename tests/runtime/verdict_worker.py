"""What a process of the tests of verdicts does; a module of its own, so that a spawned one imports little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def ask(directory: str, key: str, log: str, seconds: float, answers: Any) -> None:
    """Ask for the verdict under a key; a check adds a line to the log and takes some time."""
    from tilewave.runtime.loop_check import Verdict, remembered_verdict

    os.environ["TILEWAVE_CACHE_DIR"] = directory

    def check(about_to_run: Callable[[], None]) -> Verdict:
        about_to_run()
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return Verdict(True, f"checked by {os.getpid()}")

    verdict, found_now = remembered_verdict(key, check)
    answers.put((None if verdict is None else verdict.words, found_now))
