"""What the command `tilewave probe` does, and how probes are printed and written."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tilewave.bench.environment import Environment
from tilewave.compiler.toolchain import compiler_version
from tilewave.device import DeviceSpec, get_spec
from tilewave.errors import UsageError
from tilewave.lab import options
from tilewave.lab.command import DEFAULT_EMULATED, emulation_notice, open_gpu
from tilewave.lab.ladder import Gpu
from tilewave.lab.probe import get_probe, run_probes
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_profile import stall_shares
from tilewave.lab.probe_records import Findings, Probe, SizeFindings, Variant
from tilewave.lab.probe_results import FORMAT
from tilewave.lab.records import write_json
from tilewave.lab.register_file import MEASURED_ON, QUESTION
from tilewave.lab.register_file import NAME as REGISTER_FILE
from tilewave.lab.register_file_command import faulty, run_register_file
from tilewave.runtime.driver import probe as probe_gpu

NOT_A_PRODUCT = "not a product"


def probe_command(
    names: Sequence[str],
    *,
    sizes: str | None,
    device: str | None,
    emulate: bool,
    budget: float | None,
    path: Path | None,
    jobs: int | None,
    profile: bool | None,
) -> None:
    """List the probes, or run those named (or ``all``) and show them; fail if a product was wrong."""
    console = Console(highlight=False)
    if not names:
        if path is not None or sizes is not None:
            raise UsageError(f"name a probe to run, or all; there are {', '.join((*PROBES, REGISTER_FILE))}")
        list_probes(console)
        return
    wanted = [*PROBES, REGISTER_FILE] if "all" in names else names
    with_register_file = any(is_register_file(name) for name in wanted)
    probes = [get_probe(name) for name in dict.fromkeys(wanted) if not is_register_file(name)]
    if not probes and sizes is not None:
        raise UsageError(f"sizes are those of products, and probe {REGISTER_FILE} computes none")
    budget, workers = options.check_budget(budget), options.check_jobs(jobs)
    chosen = None if sizes is None else options.parse_sizes(sizes)
    spec = get_spec(DEFAULT_EMULATED if device is None else device)
    found = probe_gpu()
    emulated = emulate or device is not None or not found.usable
    if emulated and chosen is not None and chosen[-1] > options.LARGEST_EMULATED_SIZE:
        raise UsageError(f"size {chosen[-1]}: the emulator takes sizes up to {options.LARGEST_EMULATED_SIZE}")
    if path is not None:
        options.check_writable(path)
    gpu: Gpu | None = None
    if emulated:
        asked = emulate or device is not None
        # The probe of the register file says itself for which GPU its kernels are, and what runs them.
        console.print(emulation_notice(found.reason, spec if probes else None, asked), style="bold")
    else:
        gpu, spec, notice = open_gpu()
        console.print(notice, style="bold")
    watched = Console(stderr=True, highlight=False)
    all_findings = run_probes(
        probes,
        spec,
        gpu=gpu,
        sizes=chosen,
        budget_s=budget,
        jobs=workers,
        profile=profile,
        tell=lambda line: watched.print(line, style="dim") if watched.is_terminal else None,
    )
    for probe, findings in zip(probes, all_findings, strict=True):
        print_findings(probe, findings, spec, console)
    of_register_file = None
    if with_register_file:
        unasked = gpu is None and device is None
        of_register_file = run_register_file(
            get_spec(MEASURED_ON) if unasked else spec, None if gpu is None else gpu.device, console
        )
    if path is not None:
        record = to_json(probes, all_findings, spec, gpu)
        if of_register_file is not None:
            record["register_file"] = of_register_file
        write_json(record, path)
        console.print(f"Results are in {path}.", markup=False)
    if any(wrong_products(findings) for findings in all_findings) or faulty(of_register_file):
        sys.exit(1)


def is_register_file(name: str) -> bool:
    """Whether a name is that of the probe of the register file, which has no rungs."""
    return name.strip().lower().replace("_", "-") == REGISTER_FILE


def list_probes(console: Console) -> None:
    """Print the name and the question of every probe."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("probe", no_wrap=True)
    table.add_column("what it asks")
    for probe in PROBES.values():
        table.add_row(probe.name, probe.question)
    table.add_row(REGISTER_FILE, QUESTION)
    console.print(table)
    console.print("Run one with `tilewave probe NAME`, or all with `tilewave probe all`.", markup=False)


def wrong_products(findings: Findings) -> list[str]:
    """The variants that should compute a product and computed a wrong one."""
    wrong = {
        key
        for key, examined in findings.examined.items()
        if any(not check.holds for check in examined.checks)
    }
    for at in findings.sizes:
        wrong |= {key for key, timed in at.timed.items() if timed.check is not None and not timed.check.holds}
    return sorted(wrong)


def print_findings(probe: Probe, findings: Findings, spec: DeviceSpec, console: Console) -> None:
    """Show what a probe found: kernels, predictions, times, and what they mean."""
    console.print()
    console.print(f"{probe.name}: {probe.question}", style="bold", markup=False)
    if probe.about:
        console.print(probe.about, markup=False)
    for line in findings.tables:
        console.print(hanging(line, console.width), markup=False)
    console.print(_kernels(probe, findings))
    if findings.judged:
        console.print()
        console.print(_expectations(probe, findings))
    console.print()
    said: set[str] = set()
    for at in findings.sizes:
        if at.timed:
            if at is not findings.sizes[0]:
                console.print()
            console.print(_times(probe, at))
        for variant in probe.variants:
            told = stalls_told(at.profiled.get(variant.key, {}))
            if told:
                console.print(f"Stalls of {variant.label} at N = {at.size}: {told}.", markup=False)
        for line in at.words:
            if line not in said:
                console.print(line, markup=False)
            if not at.timed:
                said.add(line)  # without times most sizes say the same
    for note in findings.notes:
        console.print(f"Note: {note}.", style="yellow", markup=False)
    for key in wrong_products(findings):
        console.print(f"WRONG: {probe.variant(key).label} is no correct product.", style="red", markup=False)


def hanging(line: str, width: int) -> str:
    """A line broken at ``width``; what follows the first break of an indented one is indented further."""
    indent = len(line) - len(line.lstrip())
    return textwrap.fill(line, width, subsequent_indent=" " * (2 * indent))


def stalls_told(metrics: Mapping[str, float], most: int = 5) -> str:
    """The commonest reasons to wait among a launch's stalled warps, for people; empty if none were read."""
    top = sorted(stall_shares(metrics).items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name.replace('_', ' ')} {share:.0%}".replace("%", " %") for name, share in top)


def _label(variant: Variant) -> str:
    return variant.label if variant.rung.product else f"{variant.label} ({NOT_A_PRODUCT})"


def _kernels(probe: Probe, findings: Findings) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel")
    for heading in ("regs", "spills", "blocks\nper SM", "passes\nper read", "passes\nper write"):
        table.add_column(heading, justify="right")
    table.add_column("the article")
    for variant in probe.variants:
        examined = findings.examined.get(variant.key)
        cells = ["-"] * 5
        if examined is not None:
            build, counted = examined.build, examined.counted
            cells[:3] = [str(build.registers), f"{build.spill_store_bytes} B", str(build.blocks_per_sm)]
            if counted is not None:
                cells[3:] = [_figure(counted.passes_per_read), _figure(counted.passes_per_write)]
        table.add_row(_label(variant), *cells, variant.reported)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _expectations(probe: Probe, findings: Findings) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel")
    table.add_column(f"figure at\nN = {findings.counted_size}")
    for heading in ("predicted", "emulator", "hardware"):
        table.add_column(heading, justify="right")
    table.add_column("why")
    before = ""
    for judged in findings.judged:
        cells = [
            amount(value, judged.is_ratio) + ("" if judged.holds(value) is not False else " (!)")
            for value in (judged.expected, judged.emulated, judged.hardware)
        ]
        figure = judged.figure.replace("_", " ")
        label = "" if judged.variant == before else probe.variant(judged.variant).label
        before = judged.variant
        table.add_row(label, figure, *cells, judged.why)
    return table


def amount(value: float | None, is_ratio: bool) -> str:
    """A figure of an expectation for people: a ratio as "x 0.500"."""
    if value is None:
        return "-"
    return f"x {value:.3f}" if is_ratio else f"{value:,.4g}"


def _times(probe: Probe, at: SizeFindings) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"N = {at.size}")
    for heading in ("ms", "TFLOP/s", "spread", "against", "the article"):
        table.add_column(heading, justify="right")
    for variant in probe.variants:
        timed = at.timed[variant.key]
        if timed.speed is None:
            table.add_row(_label(variant), *["-"] * 4, "WRONG")
            continue
        speed = timed.speed
        against = "-"
        if timed.ratio is not None and (other := probe.against(variant)) is not None:
            against = f"x {timed.ratio:.3f} ({other})"
        article = "-" if variant.reported_ratio is None else f"x {variant.reported_ratio:.3f}"
        table.add_row(
            _label(variant),
            f"{speed.median_ms:.4f}",
            f"{speed.tflops:.2f}" + ("" if variant.rung.product else "*"),
            f"{speed.spread:.1%}",
            against,
            article,
        )
    if not all(variant.rung.product for variant in probe.variants):
        table.caption = f"* {NOT_A_PRODUCT}: the rate only says how long the kernel took"
        table.caption_justify = "left"
    return table


def to_json(
    probes: Sequence[Probe], all_findings: Sequence[Findings], spec: DeviceSpec, gpu: Gpu | None
) -> dict[str, Any]:
    """Everything that was found, with the environment that it was found in."""
    environment = Environment.capture(
        device=None if gpu is None else gpu.device,
        compiler=compiler_version(),
        gpu_details={"sms": spec.sms, "clock_mhz": spec.clock_mhz, "arch": spec.arch} if gpu else None,
    )
    entries = []
    for probe, findings in zip(probes, all_findings, strict=True):
        entry = asdict(findings)
        entry["question"] = probe.question
        entry["variants"] = {
            variant.key: {
                "label": variant.label,
                "rung": variant.rung.number,
                "edits": [edit.name for edit in variant.rung.edits],
                "product": variant.rung.product,
                "against": probe.against(variant),
                "reported": variant.reported,
                "reported_ratio": variant.reported_ratio,
            }
            for variant in probe.variants
        }
        entries.append(entry)
    return {
        "format": FORMAT,
        "device": spec.name,
        "emulated": gpu is None,
        "environment": environment.to_json(),
        "probes": entries,
    }
