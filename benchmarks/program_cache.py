"""What a kernel costs to get: compiled from cold, from the program cache on disk, from memory. Needs no GPU.

    python benchmarks/program_cache.py

Prints a table and writes benchmarks/results/program_cache.json. Every cold figure is a fresh process with an
empty cache; every warm one a fresh process with a full cache, imports not counted.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "program_cache.json"
RUNG = "05_course"
ROUNDS = 9

PROBE = f"""
import json, time
from tilewave.compiler import compile_source, compiler_version, program
from tilewave.lab.registry import get_rung
rung = get_rung({RUNG!r})
source = rung.source()
def seconds():
    start = time.perf_counter()
    compile_source(source, rung.entries, "sm_121")
    return time.perf_counter() - start
first = seconds()
memory = seconds()
program._programs.clear()
again = seconds()
print(json.dumps({{"first": first, "memory": memory, "again": again, "compiler": compiler_version()}}))
"""


def probe(cache: str) -> dict[str, float | str]:
    """Figures of one fresh process."""
    environment = os.environ | {"TILEWAVE_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
    )
    answer: dict[str, float | str] = json.loads(done.stdout)
    return answer


def main() -> None:
    cold, warm = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as directory:
            cold.append(probe(directory + "/cache"))
            warm.append(probe(directory + "/cache"))
    figures = {
        "compile, empty cache": [one["first"] for one in cold],
        "first load of a process, full cache": [one["first"] for one in warm],
        "later load from disk": [one["again"] for one in warm],
        "from memory": [one["memory"] for one in warm],
    }
    medians = {name: 1e3 * statistics.median(map(float, values)) for name, values in figures.items()}
    for name, value in medians.items():
        print(f"{name:40} {value:9.3f} ms")
    record = {
        "what": f"rung {RUNG} for sm_121, median of {ROUNDS}, milliseconds",
        "compiler": cold[0]["compiler"],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "milliseconds": {name: round(value, 4) for name, value in medians.items()},
    }
    RESULT.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
