"""A program cache of its own for tests that look into it or break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewave.compiler import cache, program


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The (not yet existing) directory of an empty cache, in a process that remembers nothing."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("TILEWAVE_CACHE_DIR", str(directory))
    monkeypatch.setattr(program, "_programs", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_swept", set())
    return directory
