"""Puts compiled kernels into a wheel: the archives in the directory that TILEWAVE_ARCHIVES names.

`make wheel` makes them. Without the variable, and in an editable install, a package holds none, and kernels
are compiled when they are first used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ArchivesHook(BuildHookInterface):
    """What `[tool.hatch.build.targets.wheel.hooks.custom]` calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the archives to a wheel that is no editable install."""
        named = os.environ.get("TILEWAVE_ARCHIVES")
        if version == "editable" or not named:
            return
        archives = sorted(Path(named).glob("sm_*.zip"))
        if not archives:
            raise FileNotFoundError(f"TILEWAVE_ARCHIVES is {named}, which holds no archive sm_*.zip")
        for path in archives:
            build_data["force_include"][str(path.resolve())] = f"tilewave/shipped/{path.name}"
