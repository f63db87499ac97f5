"""Results of probes read back from the JSON that `tilewave probe --json` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewave.device import DeviceSpec, get_spec
from tilewave.errors import UsageError
from tilewave.lab.probe import get_probe
from tilewave.lab.probe_records import (
    Examined,
    Findings,
    Judged,
    Probe,
    Reading,
    SizeFindings,
    Timed,
    Variant,
)
from tilewave.lab.records import Build, Check, Counted, Speed

FORMAT = 1
"""Version of the file's layout."""


@dataclass(frozen=True)
class Results:
    """A file of results. What they mean is said anew from its figures, by the words of this version.

    A probe has the variants that the file knows, compared as they were when it was written.
    """

    spec: DeviceSpec
    emulated: bool
    environment: Mapping[str, Any]
    found: tuple[tuple[Probe, Findings], ...]


def load_results(path: Path) -> Results:
    """Read a file of results; raises ``UsageError`` for one that this version does not understand."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise UsageError(f"{path} has format {data['format']}; this version reads format {FORMAT}")
        spec = get_spec(data["device"].removeprefix("NVIDIA "))
        found = tuple(_entry(entry, spec) for entry in data["probes"])
        return Results(spec, data["emulated"], data["environment"], found)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} holds no results of probes: {error!r}") from error


def _entry(entry: Mapping[str, Any], spec: DeviceSpec) -> tuple[Probe, Findings]:
    probe = get_probe(entry["probe"])
    variants = tuple(_variant(probe, key, recorded) for key, recorded in entry["variants"].items())
    probe = replace(probe, variants=variants)
    findings = Findings(
        probe.name,
        entry["counted_size"],
        {key: _examined(value) for key, value in entry["examined"].items()},
        entry["hardware"],
        [Judged(**judged) for judged in entry["judged"]],
        [_size(size) for size in entry["sizes"]],
        [] if probe.tables is None else probe.tables(),
        entry["notes"],
    )
    for at in findings.sizes:
        at.words = probe.meaning(Reading(spec, findings, at))
    return probe, findings


def _variant(probe: Probe, key: str, recorded: Mapping[str, Any]) -> Variant:
    against = recorded["against"]
    return replace(probe.variant(key), label=recorded["label"], against=against, alone=against is None)


def _examined(value: Mapping[str, Any]) -> Examined:
    build, counted = value["build"], value["counted"]
    return Examined(
        Build(**{**build, "limited_by": tuple(build["limited_by"])}),
        value["dynamic_shared_bytes"],
        tuple(_check(check) for check in value["checks"]),
        None if counted is None else Counted(**counted),
    )


def _size(value: Mapping[str, Any]) -> SizeFindings:
    timed = {
        key: Timed(
            None if one["check"] is None else _check(one["check"]),
            None if one["speed"] is None else _speed(one["speed"]),
            one["ratio"],
        )
        for key, one in value["timed"].items()
    }
    return SizeFindings(value["size"], timed, value["profiled"])


def _check(value: Mapping[str, Any]) -> Check:
    return Check(**{**value, "shape": tuple(value["shape"])})


def _speed(value: Mapping[str, Any]) -> Speed:
    return Speed(**{**value, "milliseconds": tuple(value["milliseconds"])})
