"""Ladder files: round trip, damage, whole-or-nothing writing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ladders import made_up_ladder

from tilewave.errors import UsageError
from tilewave.lab.records import FORMAT, Check, Ladder, load_ladder, save_ladder


@pytest.mark.parametrize("timed", [True, False])
def test_round_trip_through_a_file(tmp_path: Path, rng: np.random.Generator, timed: bool) -> None:
    ladder = made_up_ladder(rng, timed=timed)
    path = tmp_path / "ladder.json"
    save_ladder(ladder, path)
    assert load_ladder(path) == ladder
    assert [entry.name for entry in tmp_path.iterdir()] == ["ladder.json"]  # no temporary file stays


def test_an_infinite_error_survives_the_round_trip(tmp_path: Path, rng: np.random.Generator) -> None:
    ladder = made_up_ladder(rng, sizes=(64,), rungs=1)
    wrong = (Check("GPU", (64, 64, 64), float("inf")),)
    ladder.put(replace(ladder.rows[0], checks=wrong, speed=None))
    save_ladder(ladder, tmp_path / "l.json")
    row = load_ladder(tmp_path / "l.json").rows[0]
    assert row.worst_error == float("inf")
    assert not row.checks[0].holds
    assert not Check("GPU", (1, 1, 1), float("nan")).holds


def test_a_row_replaces_the_older_one_of_the_same_rung_and_size(rng: np.random.Generator) -> None:
    ladder = made_up_ladder(rng)
    before = len(ladder.rows)
    newer = replace(ladder.rows[3], title="newer")
    ladder.put(newer)
    assert len(ladder.rows) == before
    assert ladder.find(newer.rung, newer.size) is newer


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", "{}", '{"format": 999}', f'{{"format": {FORMAT}}}', "null", "\xff"],
)
def test_what_is_no_ladder_is_refused_with_the_file_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=r"broken\.json"):
        load_ladder(path)


def test_a_damaged_row_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    data = made_up_ladder(rng).to_json()
    del data["rows"][0]["build"]["registers"]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="damaged"):
        load_ladder(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_ladder(tmp_path / "missing.json")


def test_a_file_is_replaced_whole_or_left_alone(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ladder.json"
    save_ladder(made_up_ladder(rng), path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilewave.lab.records.os.replace", fail)
    with pytest.raises(UsageError, match="No space left"):
        save_ladder(Ladder("GB10", True), path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UsageError, match="cannot write"):
        save_ladder(Ladder("GB10", True), tmp_path / "no" / "such" / "dir.json")
