"""The GPUs that tilewave knows as data, read from ``specs.toml``."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError

# The same for every compute capability from 7.5 to 12.1 (specs.toml, sources "guide" and "occupancy").
_COMMON = {
    "registers_per_sm": 65536,
    "registers_per_block": 65536,
    "registers_per_thread": 255,
    "register_allocation_unit": 256,
    "threads_per_block": 1024,
    "warp_size": 32,
    "sub_partitions": 4,
}
_FROM_OCCUPANCY_CALCULATOR = ("register_allocation_unit", "shared_allocation_unit", "sub_partitions")


@cache
def _load() -> tuple[dict[str, DeviceSpec], dict[str, str]]:
    """The records by name, and the name for each spelling (normalised name or alias)."""
    text = resources.files("tilewave.device").joinpath("specs.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    specs: dict[str, DeviceSpec] = {}
    spellings: dict[str, str] = {}
    for entry in data["device"]:
        record: dict[str, Any] = dict(entry)
        aliases = record.pop("aliases", [])
        own_sources = record.pop("sources")
        capability = record.pop("compute_capability")
        shared = _COMMON | data["architecture"][capability]
        sources = {
            name: data["sources"]["occupancy" if name in _FROM_OCCUPANCY_CALCULATOR else "guide"]
            for name in shared
        }
        major, minor = capability.split(".")
        spec = DeviceSpec(
            compute_capability=(int(major), int(minor)), sources=sources | own_sources, **shared, **record
        )
        specs[spec.name] = spec
        for spelling in (spec.name, *aliases):
            spellings[_normalise(spelling)] = spec.name
    return specs, spellings


def _normalise(name: str) -> str:
    """A name without case, punctuation and the vendor's prefixes."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.casefold())


def spec_names() -> tuple[str, ...]:
    """Names of all GPUs known as data, in the order of their compute capability."""
    specs, _ = _load()
    return tuple(sorted(specs, key=lambda name: specs[name].compute_capability))


def get_spec(name: str) -> DeviceSpec:
    """The record of a GPU model by name; case, spaces and vendor prefixes do not matter.

    Raises ``UsageError`` naming the known models when there is none of that name.
    """
    specs, spellings = _load()
    if not isinstance(name, str):
        raise UsageError(f"a device name must be a string, not {type(name).__name__}: {name!r}")
    key = _normalise(name)
    if key in spellings:
        return specs[spellings[key]]
    close = difflib.get_close_matches(key, spellings, n=1)
    hint = f"; did you mean {spellings[close[0]]}?" if close else ""
    raise UsageError(f"unknown device {name!r}{hint} Known devices: {', '.join(spec_names())}")
