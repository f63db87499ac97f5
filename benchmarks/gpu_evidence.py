"""Everything that is measured on a GPU, step by step, and the pages that are made from it.

    PYTHONPATH=src:benchmarks python3 benchmarks/gpu_evidence.py --list
    PYTHONPATH=src:benchmarks python3 benchmarks/gpu_evidence.py --plan
    PYTHONPATH=src:benchmarks python3 benchmarks/gpu_evidence.py [STEP ...] --out DIR [--budget 600]
    PYTHONPATH=src:benchmarks python3 benchmarks/gpu_evidence.py --round 1 --out DIR --archive FILE.tgz
    python benchmarks/gpu_evidence.py [STEP ...] --pages

Without names, every step runs, in the order of the list; `--round N` runs one call of the plan
(`evidence_steps.ROUNDS`), each step with the plan's seconds. A step that fails or has to be stopped does not
keep the others from running, and one that no longer fits into the budget is left out. Its output goes to
DIR/STEP.txt, its record to DIR; tests put failures into DIR/failures-STEP.txt as they occur, and each test's
outcome into DIR/outcomes-STEP.txt. `--archive` keeps all of DIR in one compressed file, renewed every few
seconds, so that a call that is cut off has left what there was. A record that DIR has already is gone on
from; with `--go-on`, so is one of `benchmarks/results`, which may hold readings of other kernels than these.
`--pages` needs no GPU: it makes anew what is drawn from the records in `benchmarks/results`. The exit code is
0 only if every chosen step has succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from evidence_steps import ROOT, ROUNDS, Step, steps

RESULTS = ROOT / "benchmarks" / "results"
GRACE_S = 20.0
"""How much longer than it may measure a step may take: to end what it is at, and to say what it found."""
LAST_WORDS_S = 8.0
"""Between asking a step to end and ending it."""
ARCHIVE_S = 5.0
"""The archive is renewed so often while a step runs."""
SHOWN = 25
"""Lines of a step's output that are shown: its end."""
PLANNED_S = 1500.0


def environment() -> dict[str, str]:
    here = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {
        "TILEWAVE_CACHE_DIR": str(ROOT / ".cache" / "programs"),
        "COLUMNS": "150",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, here)),
    }


def keep_archive(out: Path, archive: Path | None) -> None:
    """All files of a folder in one compressed file, which is whole at every moment."""
    if archive is None:
        return
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=4) as packed:
        for path in sorted(out.rglob("*")):
            if path.is_file() and path not in (archive, part):
                with contextlib.suppress(OSError):  # a record that its step is just replacing
                    packed.add(path, path.relative_to(out))
    part.replace(archive)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a step with whatever it has started: first asked, as by ^C, so that it can say what it found."""
    for asked, wait_s in ((signal.SIGINT, LAST_WORDS_S), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, asked)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def run_limited(
    command: Sequence[str], log: Path, limit_s: float, out: Path, archive: Path | None
) -> int | None:
    """The exit code of Python with this command, its output in ``log``; None if it had to be stopped."""
    end = time.monotonic() + limit_s
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            while code is None and (left := end - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(ARCHIVE_S, left))
                keep_archive(out, archive)
        finally:
            end_group(process)  # if it has ended, what it has left behind: the next step wants the GPU alone
    keep_archive(out, archive)
    return code


def told_by_tests(step: Step, out: Path) -> str:
    """What the files of a step of tests say: counts, failures by name, the longest."""
    path = out / f"outcomes-{step.name}.txt"
    if not step.outcomes or not path.exists():
        return ""
    rows = [line.split(maxsplit=3) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row) == 4]
    counts = ", ".join(f"{count} {one}" for one, count in sorted(Counter(row[0] for row in rows).items()))
    failed = [row[3].removeprefix("s ") for row in rows if row[0] == "failed"]
    longest = sorted(rows, key=lambda row: -float(row[1]))[:5]
    said = [f"tests: {counts or 'none has ended'}", *(f"failed: {name}" for name in failed[:30])]
    return "\n".join([*said, *(f"{row[1]:>8} s {row[3].removeprefix('s ')}" for row in longest)])


def any_passed(step: Step, out: Path) -> bool:
    """Whether a test of a step has passed: without a GPU all are skipped, which pytest calls a success."""
    path = out / f"outcomes-{step.name}.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return any(line.startswith("passed") for line in lines)


def measure(step: Step, out: Path, seconds: float, limit_s: float, go_on: bool, archive: Path | None) -> bool:
    """Run a step; whether it has succeeded."""
    if step.record and go_on and (RESULTS / step.record).exists() and not (out / step.record).exists():
        shutil.copyfile(RESULTS / step.record, out / step.record)
    command = [part.format(out=out, seconds=f"{seconds:g}") for part in step.command]
    print(f"== {step.name} (at most {seconds:.0f} s): {' '.join(command)[:300]}", flush=True)
    started = time.monotonic()
    log = out / f"{step.name}.txt"
    code = run_limited(command, log, limit_s, out, archive)
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]))
    if said := told_by_tests(step, out):
        print(said)
    outcome = "stopped at its limit" if code is None else "succeeded" if code == 0 else f"exit code {code}"
    good = code == 0
    if good and step.outcomes and not any_passed(step, out):
        good, outcome = False, "all of its tests were skipped"
    print(f"== {step.name}: {outcome} after {time.monotonic() - started:.1f} s", flush=True)
    return good


def make_pages(chosen: Sequence[Step]) -> bool:
    """Make anew what is drawn from the records of the chosen steps, each page once; whether all could be."""
    commands = dict.fromkeys(tuple(page) for step in chosen for page in step.pages)
    failed = []
    for command in commands:
        print("==", *command, flush=True)
        if subprocess.run([sys.executable, *command], cwd=ROOT, env=environment()).returncode:
            failed.append(command)
    for command in failed:
        print("failed:", *command)
    return not failed


def plan() -> str:
    """The rounds, each step with its seconds and when it begins."""
    lines, total = [], 0.0
    for number, planned in enumerate(ROUNDS, 1):
        begun = total
        for name, seconds in planned:
            lines.append(f"round {number}  {total:6.0f} s  {name:20} {seconds:4.0f} s")
            total += seconds
        lines.append(f"round {number} takes {total - begun:.0f} s")
    return "\n".join([*lines, f"all take {total:.0f} of {PLANNED_S:.0f} s"])


def main(arguments: Sequence[str] | None = None) -> int:
    known = {step.name: step for step in steps()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="one of --list")
    parser.add_argument("--out", type=Path, help="where records and outputs go")
    parser.add_argument("--archive", type=Path, help="one compressed file that keeps all of --out")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all steps together")
    parser.add_argument("--round", type=int, choices=range(1, len(ROUNDS) + 1), help="one call of --plan")
    parser.add_argument(
        "--go-on", action="store_true", help="go on from records that benchmarks/results has already"
    )
    parser.add_argument(
        "--pages", action="store_true", help="only make the pages of these steps, without a GPU"
    )
    parser.add_argument("--list", action="store_true", help="only say what the steps are")
    parser.add_argument("--plan", action="store_true", help="only say in which order what is new is measured")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.steps if name not in known]:
        parser.error(f"no step is named {', '.join(unknown)}; there are {', '.join(known)}")
    if options.steps and options.round:
        parser.error("either steps or --round is accepted, not both")
    planned = dict(ROUNDS[options.round - 1]) if options.round else {}
    chosen = [known[name] for name in (planned or options.steps or known)]
    if options.plan:
        print(plan())
        return 0
    if options.list:
        for step in chosen:
            print(f"{step.name:20} {step.seconds:4.0f} s  {' '.join(step.command)}")
        return 0
    if options.pages:
        return 0 if make_pages(chosen) else 1
    if options.out is None:
        parser.error("--out says where the records go")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    outcomes = {}
    for step in chosen:
        left, wanted = end - time.monotonic(), planned.get(step.name, step.seconds)
        if left < wanted / 2:
            print(f"== {step.name}: left out, {left:.0f} s are left", flush=True)
            outcomes[step.name] = False
            continue
        seconds = max(min(wanted, left - GRACE_S), left / 2) if left < wanted + GRACE_S else wanted
        limit_s = min(wanted + GRACE_S, left)
        outcomes[step.name] = measure(step, out, seconds, limit_s, options.go_on, options.archive)
    said = [f"{name}: {'succeeded' if good else 'not done'}" for name, good in outcomes.items()]
    (out / "summary.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    keep_archive(out, options.archive)
    print(*said, sep="\n")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
