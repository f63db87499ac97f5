"""The evidence of `tilewave power` and `tilewave profile` from one GPU, and the page made from it.

On a GPU:       python benchmarks/power_and_profile.py measure --out DIR --name h200 --budget 150
Without a GPU:  python benchmarks/power_and_profile.py page --name h200
                python benchmarks/power_and_profile.py recount --name h200

`measure` makes a short power run, a long one that is compared with it, and the profile of six rungs and of
cuBLAS; each step has a limit, and one that fails does not keep the others from running. The long run has what
the budget leaves beside the other steps, 50 s at most. `page` writes the tables into
docs/power-and-profile.md between its markers. `recount` makes the profile's columns of predictions and of the
emulator anew, when these have changed, by the compiler that the profile was made with (TILEWAVE_NVRTC).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tilewave.lab.power.records import load_power_run
from tilewave.lab.power.table import markdown as power_markdown
from tilewave.lab.profile.records import load_profile
from tilewave.lab.profile.table import markdown as profile_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "power-and-profile.md"
RESULTS = ROOT / "benchmarks" / "results"
RUNGS = ("1", "6", "12", "15", "17", "21")
PROFILE_S = 55.0
"""What the profile needs: ncu starts twice, and replays each launch for every group of counters."""
FIRST_RUN_S = 15.0
LONGEST_RUN_S = 50.0
SET_UP_S = 15.0
"""Compiling, choosing a rung, data and their check, for each power run."""


def measure(out: Path, name: str, budget: float) -> int:
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    environment = {
        "TILEWAVE_CACHE_DIR": str(ROOT / ".cache" / "programs"),
        "COLUMNS": "130",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    }
    tilewave = [sys.executable, "-m", "tilewave"]
    first, second = out / f"power_{name}_first.json", out / f"power_{name}.json"
    long_s = min(LONGEST_RUN_S, budget - PROFILE_S - FIRST_RUN_S - 2 * SET_UP_S)
    if long_s < FIRST_RUN_S:
        least = PROFILE_S + 2 * FIRST_RUN_S + 2 * SET_UP_S
        sys.exit(f"budget {budget:g}: at least {least:g} seconds are needed")
    profile = out / f"profile_{name}.json"
    steps = [
        (
            [*tilewave, "profile", *RUNGS, "--json", str(profile), "--budget", f"{1.5 * PROFILE_S:g}"],
            2 * PROFILE_S,
        ),
        (
            [*tilewave, "power", "--seconds", f"{FIRST_RUN_S:g}", "--json", str(first)],
            FIRST_RUN_S + 3 * SET_UP_S,
        ),
        (
            [*tilewave, "power", "--seconds", f"{long_s:g}", "--compare", str(first), "--json", str(second)],
            long_s + 3 * SET_UP_S,
        ),
    ]
    failures = 0
    for command, limit in steps:
        print(f"== {' '.join(command[2:4])}", flush=True)
        begun = time.monotonic()
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = -1
        failures += code != 0
        print(f"== exit code {code} after {time.monotonic() - begun:.1f} s", flush=True)
    print(f"{len(steps) - failures} of {len(steps)} steps succeeded in {time.monotonic() - started:.0f} s")
    return failures


def recount(path: Path) -> None:
    from tilewave.device import get_spec
    from tilewave.lab.profile.records import save_profile
    from tilewave.lab.profile.run import recounted

    profile = load_profile(path)
    save_profile(recounted(profile, get_spec(profile.device), jobs=1), path)


def page(text: str, name: str, results: Path = RESULTS) -> str:
    """The page's text with the tables of the committed results between its markers."""
    tables = {
        "power": power_markdown(load_power_run(results / f"power_{name}.json")),
        "profile": profile_markdown(load_profile(results / f"profile_{name}.json")),
    }
    for part, table in tables.items():
        between = re.compile(f"(<!-- {part} -->\n).*?(<!-- end of {part} -->)", re.DOTALL)
        text, found = between.subn(lambda match, table=table: f"{match[1]}{table}{match[2]}", text)
        if found != 1:
            sys.exit(f"the page has {found} places for {part}; one is needed")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "page", "recount"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="h200", help="what the files of the results are named after")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all")
    options = parser.parse_args()
    if options.what == "measure":
        sys.exit(1 if measure(options.out.resolve(), options.name, options.budget) else 0)
    if options.what == "recount":
        recount(options.out / f"profile_{options.name}.json")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), options.name), encoding="utf-8")


if __name__ == "__main__":
    main()
