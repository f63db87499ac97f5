"""One rung as a standalone .cu: the kernel and a main that checks it and times it against cuBLAS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from tilewave.bench.environment import tilewave_version
from tilewave.compiler import Source
from tilewave.device import DeviceSpec, get_spec, query_device
from tilewave.errors import UsageError
from tilewave.lab import options
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Rung, get_rung
from tilewave.runtime.driver import probe

DEFAULT_SIZES = (1024, 1025, 2048, 2049, 4096)
#: One product that is odd in everything, so that the program checks ragged edges too.
ODD_SHAPE = (515, 1027, 333)
ROUNDS = 7
_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*\n', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


def standalone(
    rung: Rung, spec: DeviceSpec | None = None, sizes: Sequence[tuple[int, int, int]] | None = None
) -> str:
    """The text of the standalone program of a rung.

    ``sizes`` are the (M, N, K) that it runs by default. A rung with a schedule needs ``spec``: its launches
    for these sizes are worked out for that GPU's number of SMs. Raises ``UsageError`` for sizes that the rung
    does not take, and for a rung with a schedule without ``spec``.
    """
    shapes = [(n, n, n) for n in DEFAULT_SIZES] + [ODD_SHAPE] if sizes is None else list(sizes)
    if rung.schedule is not None and spec is None:
        raise UsageError(
            f"rung {rung.title} deals its tiles by the number of SMs, and there is no GPU here to ask: name "
            "one with --device (`tilewave info` lists them)"
        )
    launches = []
    for shape in shapes:
        if rung.schedule is None:
            rung.entry_for(*shape)
            rung.grid(*shape[:2])
        else:
            assert spec is not None
            launches.append(_launch(rung, shape, spec))
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    template = resources.files("tilewave").joinpath("lab", "export.cu.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        name=program_name(rung),
        title=rung.title,
        kernel=inlined(rung.source()),
        entries=rung.entries,
        tile=rung.tile,
        block=rung.block,
        needs=rung.needs,
        launches=launches,
        integers=launches[0]["integer_count"] if launches else 0,
        sizes=shapes,
        sms=None if spec is None else spec.sms,
        device=None if spec is None else spec.name,
        rounds=ROUNDS,
        version=tilewave_version(),
    )


def program_name(rung: Rung) -> str:
    """What the program of a rung is called."""
    return f"sgemm_{rung.number:02d}_{rung.name}"


def _launch(rung: Rung, shape: tuple[int, int, int], spec: DeviceSpec) -> dict[str, Any]:
    planned = launch_of(rung, *shape, spec)
    integers = list(planned.integers)
    x, y, z = planned.block
    return {
        "size": shape,
        "kernel": rung.entries.index(planned.entry),
        "blocks": planned.blocks,
        "threads": x * y * z,
        "integers": [*integers, 0, 0][:2],
        "integer_count": len(integers),
        "partial_floats": planned.partial_floats,
        "tickets": planned.tickets,
    }


def inlined(source: Source) -> str:
    """The source with every header of its own put in the place of its first include."""
    seen: set[str] = set()

    def insert(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return expand(_PRAGMA_ONCE.sub("", source.headers[name]))

    def expand(text: str) -> str:
        return _QUOTED_INCLUDE.sub(insert, text)

    return expand(source.text)


def export_command(
    rung: str, *, out: Path | None, device: str | None, sizes: str | None, force: bool
) -> Path | None:
    """Write the program of a rung to ``out`` (default: its own name here; ``-``: to the standard output).

    Returns where it was written. An existing file is only replaced with ``force``.
    """
    chosen = get_rung(rung)
    shapes = None if sizes is None else [(n, n, n) for n in options.parse_sizes(sizes)]
    spec = None if device is None else get_spec(device)
    if spec is None and chosen.schedule is not None and probe().usable:
        spec = query_device()
    text = standalone(chosen, spec, shapes)
    if out is not None and str(out) == "-":
        print(text, end="")
        return None
    path = out if out is not None else Path(f"{program_name(chosen)}.cu")
    if path.exists() and not path.is_dir() and not force:
        raise UsageError(f"{path} exists: give another --out, or --force to replace it")
    options.check_writable(path)
    path.write_text(text, encoding="utf-8")
    return path
