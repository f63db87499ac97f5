"""What the emulator counts of every rung on the article's GPU and on an H200, for docs/article.md.

    python benchmarks/article_counts.py

Counts each rung at the sizes that its predictions name, and the rung that it builds on beside it. No GPU is
needed; the result is `benchmarks/results/article_counts.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewave.compiler import choose_arch, compiler_version
from tilewave.device import get_spec
from tilewave.lab import emulate
from tilewave.lab.options import check_jobs, check_writable
from tilewave.lab.records import write_json
from tilewave.lab.registry import RESOURCES, get_rung, load_rungs
from tilewave.lab.truth import digest_of
from tilewave.lab.workers import Budget, run_tasks

OUT = Path("benchmarks/results/article_counts.json")
DEVICES = ("GB10", "H200")
FORMAT = 1
ALWAYS = (2048,)


def places() -> Iterator[tuple[int, int]]:
    """Every rung and size to count."""
    wanted = {(rung.number, size) for rung in load_rungs() for size in ALWAYS}
    for rung in load_rungs():
        for prediction in rung.predictions:
            if prediction.counter not in RESOURCES:
                wanted.add((rung.number, prediction.size))
                if prediction.ratio is not None:
                    wanted.add((rung.builds_on or 0, prediction.size))
    yield from sorted(wanted)


def count(task: tuple[str, int, int]) -> dict[str, Any]:
    """One rung at one size on one GPU."""
    device, number, size = task
    spec, rung = get_spec(device), get_rung(number)
    arch = choose_arch(spec.compute_capability).arch
    program, kernel, build = emulate.build(rung, spec, arch, size)
    counted = emulate.count(rung, program, kernel, size, spec)
    entry = {"device": device, "sms": spec.sms, "rung": number, "size": size}
    return {**entry, "build": asdict(build), "counted": asdict(counted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, help="processes")
    options = parser.parse_args()
    check_writable(options.out)
    tasks = [(device, *place) for device in DEVICES for place in places()]
    found = dict(run_tasks(count, tasks, check_jobs(options.jobs), Budget(None)))
    record = {
        "format": FORMAT,
        "compiler": compiler_version(),
        "sources": {str(rung.number): digest_of(rung.source().text) for rung in load_rungs()},
        "rows": [found[task] for task in tasks],
    }
    write_json(record, options.out)
    print(f"{len(tasks)} launches counted: {options.out}")


if __name__ == "__main__":
    main()
