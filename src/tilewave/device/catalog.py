"""The GPUs that tilewave knows as data, read from ``specs.toml``."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError
from tilewave.messages import shown


@cache
def _data() -> dict[str, Any]:
    text = resources.files("tilewave.device").joinpath("specs.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _records() -> tuple[dict[str, DeviceSpec], dict[str, str]]:
    """The records by name, and the name for each spelling (normalised name or alias)."""
    specs: dict[str, DeviceSpec] = {}
    spellings: dict[str, str] = {}
    for entry in _data()["device"]:
        product: dict[str, Any] = dict(entry)
        aliases = product.pop("aliases", [])
        sources = product.pop("sources")
        major, minor = product.pop("compute_capability").split(".")
        capability = (int(major), int(minor))
        figures = architecture_figures(capability)
        spec = DeviceSpec(
            compute_capability=capability, sources=figure_sources(figures) | sources, **figures, **product
        )
        specs[spec.name] = spec
        for spelling in (spec.name, *aliases):
            spellings[_normalise(spelling)] = spec.name
    return specs, spellings


def architecture_figures(compute_capability: tuple[int, int]) -> dict[str, Any]:
    """What depends on the compute capability only, by field of ``DeviceSpec``.

    For a capability that is not in the table: the figures of the next older one in it, or of the oldest.
    """
    tables = {
        tuple(int(part) for part in key.split(".")): table for key, table in _data()["architecture"].items()
    }
    older = [capability for capability in tables if capability <= compute_capability]
    figures: dict[str, Any] = _data()["common"] | tables[max(older) if older else min(tables)]
    return figures


def figure_sources(fields: Iterable[str]) -> dict[str, str]:
    """Where the figures of :func:`architecture_figures` come from."""
    sources = _data()["sources"]
    return {field: sources["by_field"].get(field, sources["architecture"]) for field in fields}


def _normalise(name: str) -> str:
    """A name without case, punctuation and the vendor's prefixes."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.casefold())


def spec_names() -> tuple[str, ...]:
    """Names of all GPUs known as data, in the order of their compute capability."""
    specs, _ = _records()
    return tuple(sorted(specs, key=lambda name: specs[name].compute_capability))


def find_spec(name: str) -> DeviceSpec | None:
    """The record of a GPU model by name or alias, or None."""
    specs, spellings = _records()
    known = spellings.get(_normalise(name))
    return None if known is None else specs[known]


def get_spec(name: str) -> DeviceSpec:
    """The record of a GPU model by name; case, spaces and vendor prefixes do not matter.

    Raises ``UsageError`` naming the known models when there is none of that name.
    """
    if not isinstance(name, str):
        raise UsageError(f"a device name must be a string, not {shown(name)}")
    spec = find_spec(name)
    if spec is not None:
        return spec
    _, spellings = _records()
    close = difflib.get_close_matches(_normalise(name), spellings, n=1)
    hint = f" (did you mean {spellings[close[0]]}?)" if close else ""
    raise UsageError(f"unknown device {shown(name)}{hint}; known devices: {', '.join(spec_names())}")
