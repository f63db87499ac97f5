"""``tilewave calibrate``: candidates timed on the GPU here, and the planner's constants fitted to them.

Readings are written after every problem, and a later call with the same file goes on from there. The fit is
judged by cross-validation: problems are dealt to folds, and each fold's choices come from constants fitted to
the others. Without a GPU, a file's readings can be fitted again.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewave.bench.sampling import contenders_of, draw_problem
from tilewave.device.catalog import find_spec, get_spec
from tilewave.device.spec import DeviceSpec
from tilewave.errors import TilewaveError, UsageError
from tilewave.kernels.families import FAMILIES
from tilewave.planner.gemm import GemmPlanner
from tilewave.planner.gemm.costs import THEORY, GemmCosts
from tilewave.planner.gemm.fit import Fit, Loss, Reading, calibration_record, losses
from tilewave.problem import GemmProblem

PACKAGED = Path(__file__).parents[1] / "planner" / "gemm" / "calibration"
"""Where the planner looks for calibrations."""

LEAST_READINGS = 50
"""Fewer readings are not fitted."""

FOLDS = 3
_WORST = 20


def calibrate_command(
    *,
    budget: float,
    path: Path,
    saved: Path | None = None,
    into: Path = PACKAGED,
    fit: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Measure into ``path`` for ``budget`` seconds, or take the readings ``saved``; then fit and judge.

    ``into`` is made where there is no such folder. Raises ``UsageError`` for a budget that is not positive, a
    file that is not of readings, too few of them, or places that cannot be written, before anything is
    measured; ``DriverError`` where there is no GPU to measure on.
    """
    if fit:
        _check_folder(into, make=True)
    if saved is not None:
        path = saved
        if not path.is_file():
            raise UsageError(f"no readings to fit in {path}: there is no such file")
        record = read(path)
    else:
        if not budget > 0:
            raise UsageError(f"a budget of {budget} s: measuring takes a positive number of seconds")
        _check_folder(path.parent)
        record = measure_all(path, budget, say)
    if not fit:
        return
    if len(record["readings"]) < LEAST_READINGS:
        raise UsageError(
            f"{path} has {len(record['readings'])} readings, and a fit takes {LEAST_READINGS}: measure longer"
        )
    try:
        calibration = fit_all(record, path.name, say)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if saved is None:
            raise
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    write(record, path)
    out = into / f"{calibration['device'].replace(' ', '_')}.json"
    out.write_text(json.dumps(calibration, indent=1) + "\n", encoding="utf-8")
    say(f"Wrote {out}: {len(calibration['constants'])} constants, {len(calibration['factors'])} factors.")


def _check_folder(folder: Path, *, make: bool = False) -> None:
    """Make sure that files can be written into a folder, which is made where asked."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror or error}") from error


def read(path: Path) -> dict[str, Any]:
    """The record of readings so far; a new one with a fresh seed where there is none."""
    if not path.exists():
        return {
            "seed": secrets.randbits(32),
            "device": None,
            "environment": None,
            "sources": {},
            "problems": 0,
            "readings": [],
        }
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {**found, "readings": list(found["readings"]), "problems": int(found["problems"])}
    except (ValueError, KeyError, TypeError) as error:
        why = f"it is not JSON ({error})" if isinstance(error, ValueError) else "it holds no list of readings"
        raise UsageError(
            f"{path} is not a file of readings that `tilewave calibrate` wrote: {why}"
        ) from error


def write(record: dict[str, Any], path: Path) -> None:
    """A reading a line, after everything else; the old file stays whole until the new one is."""
    head = {name: value for name, value in record.items() if name != "readings"}
    lines = ",\n".join(" " + json.dumps(reading) for reading in record["readings"])
    beside = path.with_suffix(".part")
    text = json.dumps({**head, "readings": []}, indent=1).removesuffix("[]\n}")
    beside.write_text(f"{text}[\n{lines}\n]\n}}\n", encoding="utf-8")
    beside.replace(path)


def digests() -> dict[str, str]:
    """A digest of each family's sources: readings of other sources say nothing about these kernels."""
    from tilewave.kernels.build import source_of

    found = {}
    for family in FAMILIES:
        content = hashlib.sha256()
        for header in sorted({instance.header for instance in family.instances()}):
            source = source_of(header)
            for name, text in sorted(source.headers.items()):
                content.update(f"{name}\n{text}".encode())
        found[family.name] = content.hexdigest()[:16]
    return found


def measure_all(
    path: Path,
    budget_s: float,
    say: Callable[[str], None] = print,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Add readings to ``path`` until the budget is spent; compiling counts."""
    from tilewave.bench.candidates import Memory, measure
    from tilewave.bench.environment import Environment
    from tilewave.compiler import choose_arch, compiler_version
    from tilewave.compiler.register_pass import architecture_refusal, switched_off
    from tilewave.kernels.ship import compile_all, every_instance
    from tilewave.runtime.driver import Device, Stream
    from tilewave.runtime.kernels import gpu_state

    deadline = now() + budget_s
    record = read(path)
    device = Device()
    spec = gpu_state(device.ordinal).spec
    known = find_spec(spec.name)
    name = known.name if known else spec.name
    if record["device"] not in (None, name):
        raise UsageError(f"{path} has readings of an {record['device']}, and here is an {name}")
    sources = digests()
    if record["readings"] and record["sources"] != sources:
        raise UsageError(f"{path} has readings of other kernels than these: start a new file")
    record |= {"device": name, "sources": sources}
    record["environment"] = Environment.capture(device=device, compiler=compiler_version()).to_json()
    arch = choose_arch(spec.compute_capability).arch
    compiled = sum(1 for _ in compile_all(every_instance(), [arch]))
    say(f"{compiled} kernels compiled for {arch}; {deadline - now():.0f} s left")
    new_loops = switched_off() is None and architecture_refusal(arch) is None
    if record["readings"] and record.get("new_loops", False) != new_loops:
        loops = "without" if new_loops else "with"
        raise UsageError(f"{path} has readings of kernels {loops} new loops: start a new file")
    record["new_loops"] = new_loops
    planner = GemmPlanner(spec, FAMILIES, new_loops=new_loops)
    stream, memory = Stream(device), Memory(device)
    seen = Counter(reading["instance"] for reading in record["readings"])
    while now() < deadline:
        # Every problem has a seed of its own, so that a later call goes on where this one ended.
        draw = random.Random(record["seed"] * 1_000_003 + record["problems"])
        population, problem = draw_problem(draw)
        record["problems"] += 1
        try:
            candidates = contenders_of(planner, problem, draw, seen)
            readings = measure(planner, problem, candidates, memory, stream)
        except TilewaveError as error:
            say(f"{problem}: {error}")
            continue
        seen.update(reading.instance for reading in readings)
        record["readings"] += [{**reading.to_json(), "drawn": population} for reading in readings]
        if record["problems"] % 25 == 0:
            write(record, path)
            say(f"{record['problems']} problems, {len(record['readings'])} readings")
    write(record, path)
    say(f"Wrote {path}: {len(record['readings'])} readings at {record['problems']} problems.")
    return record


def usable_readings(record: dict[str, Any]) -> tuple[list[Reading], set[GemmProblem]]:
    """Readings of kernels that are still there, and the problems among them that were drawn at random."""
    instances = {instance.name for family in FAMILIES for instance in family.instances()}
    readings, at_random = [], set()
    for entry in record["readings"]:
        if entry["instance"] in instances:
            reading = Reading.from_json(entry)
            readings.append(reading)
            if entry.get("drawn", "random") == "random":
                at_random.add(reading.problem)
    return readings, at_random


def fit_all(record: dict[str, Any], name: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The calibration from all readings of a record; the judgement of each fold goes into the record."""
    spec = get_spec(record["device"])
    readings, at_random = usable_readings(record)
    problems = list(dict.fromkeys(reading.problem for reading in readings))
    base = replace(THEORY, factors={})
    judged: list[Loss] = []
    errors: list[float] = []
    for fold in range(FOLDS):
        held_out = set(problems[fold::FOLDS])
        fitted = Fit([one for one in readings if one.problem not in held_out], spec, FAMILIES, base).run()
        rest = [one for one in readings if one.problem in held_out]
        judged += losses(rest, spec, FAMILIES, fitted)
        errors += Fit(rest, spec, FAMILIES, fitted).errors()
    record["held_out"] = {
        "theory": _summary(
            losses(readings, spec, FAMILIES, base), Fit(readings, spec, FAMILIES, base).errors(), at_random
        ),
        "calibrated": _summary(judged, errors, at_random),
    }
    for label, summary in record["held_out"].items():
        say(
            f"{label:10} {summary['problems']} problems held out, chosen over best measured: "
            f"{summary['all']}; drawn at random {summary['random']}; rms error {summary['error']:.3f}"
        )
    source = f"benchmarks/results/{name}: {len(readings)} readings at {len(problems)} products"
    fit = _fitted_to_all(readings, spec, base)
    return calibration_record(fit, source, new_loops=record.get("new_loops", False))


def _fitted_to_all(readings: Sequence[Reading], spec: DeviceSpec, base: GemmCosts) -> Fit:
    fit = Fit(readings, spec, FAMILIES, base)
    fit.run()
    return fit


def _summary(lost: Iterable[Loss], errors: Sequence[float], at_random: set[GemmProblem]) -> dict[str, Any]:
    """What choices lose, over all problems and over those drawn at random; the errors; the worst."""
    ordered = sorted(lost, key=lambda loss: -loss.ratio)
    return {
        "problems": len(ordered),
        "all": _percentiles([loss.ratio for loss in ordered]),
        "random": _percentiles([loss.ratio for loss in ordered if loss.problem in at_random]),
        "error": round(statistics.fmean(error * error for error in errors) ** 0.5, 4),
        "within": {
            str(share): round(sum(abs(e) < math.log(1 + share) for e in errors) / len(errors), 4)
            for share in (0.05, 0.1, 0.2, 0.5)
        },
        "worst": [
            {
                "problem": str(loss.problem),
                "ratio": round(loss.ratio, 3),
                "chosen": f"{loss.chosen.instance} {loss.chosen.schedule}",
                "us": loss.chosen.microseconds,
                "predicted": round(loss.predicted.total, 2),
                "best": f"{loss.best.instance} {loss.best.schedule}",
                "best_us": loss.best.microseconds,
                "best_predicted": round(loss.best_predicted.total, 2),
                "reason": loss.reason,
            }
            for loss in ordered[:_WORST]
        ],
    }


def _percentiles(ratios: Sequence[float]) -> dict[str, float]:
    if not ratios:
        return {}
    ordered = sorted(ratios)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 4),
        "most": round(ordered[-1], 4),
    }
