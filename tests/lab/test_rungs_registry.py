"""The registry of rungs: what it says agrees with the files, and a damaged one is refused clearly."""

from __future__ import annotations

import re
from importlib import resources

import numpy as np
import pytest

from tilewave.errors import UsageError
from tilewave.lab.registry import COUNTERS, MAX_SIZE, Rung, get_rung, load_rungs, parse_rungs

TEXT = (resources.files("tilewave") / "lab" / "rungs.toml").read_text(encoding="utf-8")
FIRST_TWO = TEXT[: TEXT.index("[[rung]]\nnumber = 3")]

every_rung = pytest.mark.parametrize("rung", load_rungs(), ids=lambda rung: rung.name)


def test_every_file_is_a_rung_and_every_rung_a_file() -> None:
    directory = resources.files("tilewave") / "lab" / "rungs"
    files = sorted(item.name for item in directory.iterdir() if item.name.endswith(".cu"))
    assert files == [rung.file for rung in load_rungs()]
    assert [rung.number for rung in load_rungs()] == list(range(1, len(files) + 1))


@every_rung
def test_the_file_says_what_the_registry_says(rung: Rung) -> None:
    text = rung.source().text
    assert text.startswith(f"// Rung {rung.number:02d}: ")
    constants = {name: int(value) for name, value in re.findall(r"\b([A-Z]+) = (\d+)[,;]", text)}
    for name, value in vars(rung.tile).items():
        if name.upper() in constants:
            assert constants[name.upper()] == value, name
    assert constants.get("THREADS", rung.threads) == rung.threads
    assert constants.get("TILE", rung.tile.bm) == rung.tile.bm
    assert "#include" not in text  # no toolkit headers


@every_rung
def test_grid_covers_the_result_exactly(rung: Rung, rng: np.random.Generator) -> None:
    for m, n in rng.integers(1, 10_000, (20, 2)):
        columns, rows, layers = rung.grid(m, n)
        assert (columns - 1) * rung.tile.bn < n <= columns * rung.tile.bn
        assert (rows - 1) * rung.tile.bm < m <= rows * rung.tile.bm
        assert layers == 1


@every_rung
def test_entry_for_follows_the_rule(rung: Rung) -> None:
    assert rung.entry_for(7, 64, 64) == rung.entry
    for n, k in ((64, 65), (66, 64), (1, 1)):
        assert rung.entry_for(8, n, k) == (rung.ragged_entry or rung.entry)


def test_rungs_are_found_by_number_and_by_name() -> None:
    course = load_rungs()[4]
    for wanted in (5, "5", "05", "course", "05_course", "05_course.cu", " Course "):
        assert get_rung(wanted) is course
    assert get_rung(np.int64(5)) is course


@pytest.mark.parametrize("wanted", [0, 99, -1, "", "cours", "5.0"])
def test_unknown_rungs_are_named_with_the_known_ones(wanted: int | str) -> None:
    with pytest.raises(UsageError, match=rf"no rung {re.escape(repr(wanted))}.*05 course"):
        get_rung(wanted)


@every_rung
def test_sizes_that_no_kernel_takes_are_refused(rung: Rung) -> None:
    for bad in (0, -1, MAX_SIZE + 1, 1.5, "8", None):
        for sizes in ((bad, 8, 8), (8, bad, 8), (8, 8, bad)):
            with pytest.raises(UsageError, match=re.escape(f"= {bad!r} ")):
                rung.entry_for(*sizes)  # type: ignore[arg-type]
    most = 65_535 * rung.tile.bm
    assert rung.grid(most, 1)[1] == 65_535
    with pytest.raises(UsageError, match=f"at most {most:,}"):
        rung.grid(most + 1, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("number = 2", "number = 1", "numbers should rise"),
        ("number = 2", 'number = "2"', "number of rung 2 .* should be int"),
        ("number = 2", "number = 2\ncolour = 3", "unknown keys colour"),
        ('file = "02_coalesced.cu"', 'file = "02_other.cu"', "file should be 02_coalesced.cu"),
        ('file = "02_coalesced.cu"', "", "lacks file"),
        ('name = "coalesced"', 'name = "naive"', "name 'naive' is taken"),
        ("builds_on = 1", "builds_on = 2", "no earlier rung"),
        ("builds_on = 1", "", "a ratio needs builds_on"),
        ("size = 2048, why", "size = 2048, sms = 48, why", "only a schedule follows the SMs"),
        ("independent_fmas = 1", "independent_fmas = 2", "tm x tn"),
        ("tolerance = 1.0", "tolerance = 0", "tolerance should be positive"),
        ("tolerance = 1.0", "tolerance = true", "tolerance .* should be float"),
        ("global_loads", "global_lodes", "unknown counter 'global_lodes'"),
        ("ratio = 1.0,", "ratio = 1.0, value = 3,", "a ratio or a value"),
        ("ratio = 1.0,", "", "a ratio or a value"),
        ("wn = 32", "wn = 16", "32 patches"),
        ("bm = 32, bn = 32, bk = 1, wm = 1,", "bm = 64, bn = 32, bk = 1, wm = 1,", "one patch a thread"),
        ("block = [32, 32, 1]", "block = 32", "should be a list"),
        ("tile = {", "tile = 3 #", "should be a table"),
    ],
)
def test_a_damaged_registry_is_refused_with_the_rung_and_the_reason(old: str, new: str, message: str) -> None:
    start = FIRST_TWO.index("[[rung]]\nnumber = 2")
    head, second = FIRST_TWO[:start], FIRST_TWO[start:]
    assert old in second
    with pytest.raises(UsageError, match=message):
        parse_rungs(head + second.replace(old, new, 1))


def test_the_part_that_the_damage_starts_from_is_sound() -> None:
    assert parse_rungs(FIRST_TWO) == load_rungs()[:2]


def test_what_is_no_registry_is_refused() -> None:
    for text in ("[[rung", "", "rung = 3", TEXT + "\n[extra]\n"):
        with pytest.raises(UsageError, match=r"rungs\.toml"):
            parse_rungs(text)


def test_predicted_counters_exist_in_the_emulator() -> None:
    from tilewave.emulator import Counters

    known = set(dir(Counters)) | set(Counters.__dataclass_fields__)
    assert known >= COUNTERS
