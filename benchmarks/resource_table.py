"""Write the table of resources: every rung, every architecture, every supported NVRTC. Needs no GPU.

    python benchmarks/resource_table.py            # with the compiler of this environment and those given
    python benchmarks/resource_table.py --nvrtc .cache/nvrtc-13.0.88/nvidia/cu13/lib

Writes benchmarks/results/resources.json and, from it, docs/resources.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tilewave.lab import resource_table

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "results" / "resources.json"
PAGE = ROOT / "docs" / "resources.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nvrtc", action="append", default=[], help="another NVRTC to compile with: its path"
    )
    parser.add_argument("--print", action="store_true", help="only compile, and print the rows as JSON")
    arguments = parser.parse_args()
    if arguments.print:
        sys.stdout.write(resource_table.dump(list(resource_table.measure())))
        return
    rows = list(resource_table.measure())
    for path in arguments.nvrtc:  # a process has one NVRTC: others need a process of their own
        answer = subprocess.run(
            [sys.executable, __file__, "--print"],
            env=os.environ | {"TILEWAVE_NVRTC": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        rows += resource_table.loads(answer)
    TABLE.write_text(resource_table.dump(rows), encoding="utf-8")
    PAGE.write_text(resource_table.markdown(rows), encoding="utf-8")
    print(f"{len(rows)} rows: {TABLE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
