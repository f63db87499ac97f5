"""Edits of rungs: each fits its rung exactly as often as it says, and nothing else is taken."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from probe_helpers import ALL_VARIANTS, CHANGED, named

from tilewave.errors import UsageError
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_edits import Edit, apply_edits, lane_map_edits
from tilewave.lab.probe_records import Probe, Variant
from tilewave.lab.probe_search import number_of
from tilewave.lab.registry import get_rung


@pytest.mark.parametrize("pair", CHANGED, ids=named)
def test_every_edit_fits_once_and_changes_something(pair: tuple[Probe, Variant]) -> None:
    rung = pair[1].rung
    text = get_rung(rung.number).source().text
    for edit in rung.edits:
        assert edit.times == 1
        assert text.count(edit.old) == 1, edit.name
        changed = apply_edits(text, [edit], "here")
        assert changed != text
        text = changed
    assert rung.source().text == text
    assert rung.source().headers == get_rung(rung.number).source().headers


def test_all_kernels_of_a_probe_differ() -> None:
    for probe in PROBES.values():
        sources = {(variant.rung.source().text, variant.hold_to) for variant in probe.variants}
        assert len(sources) == len(probe.variants)


def test_unchanged_variants_are_the_rungs() -> None:
    plain = [variant.rung for _, variant in ALL_VARIANTS if not variant.rung.edits]
    assert len(plain) > 10
    for rung in plain:
        assert rung.source().text == get_rung(rung.number).source().text
        assert rung.product


TEXT = "one two\ntwo three\n"


@pytest.mark.parametrize(
    ("old", "times", "said"),
    [
        ("four", 1, "should stand there once and stands there not at all: 'four'"),
        ("two", 1, "should stand there once and stands there 2 times: 'two'"),
        ("one", 2, "should stand there 2 times and stands there once: 'one'"),
        ("t", 4, "should stand there 4 times and stands there 3 times: 't'"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(old: str, times: int, said: str) -> None:
    with pytest.raises(UsageError) as error:
        apply_edits(TEXT, [Edit("a change", old, "x", times)], "rung 99 made up")
    assert str(error.value).startswith("edit 'a change' does not fit rung 99 made up: its text ")
    assert said in str(error.value)


def test_edits_apply_in_order_and_as_often_as_they_say() -> None:
    assert apply_edits(TEXT, [Edit("", "two", "2", 2), Edit("", "2\n2", "22")], "") == "one 22 three\n"
    with pytest.raises(UsageError):
        apply_edits(TEXT, [Edit("", "2\n2", "22"), Edit("", "two", "2", 2)], "")


@pytest.mark.parametrize("pair", CHANGED, ids=named)
@pytest.mark.parametrize("copies", [0, 2])
def test_a_rung_that_was_rewritten_fails_its_probe(
    pair: tuple[Probe, Variant], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rung has lost the text that an edit looks for, or has it twice, nothing is measured."""
    from tilewave.lab import registry

    rung = pair[1].rung
    original = get_rung(rung.number).source()
    first = rung.edits[0]
    rewritten = replace(original, text=original.text.replace(first.old, first.old * copies))
    monkeypatch.setattr(registry.Rung, "source", lambda self: rewritten)
    with pytest.raises(UsageError, match=f"edit {first.name!r} does not fit rung {rung.title}"):
        rung.source()


def test_the_table_of_a_lane_map_is_that_of_the_search() -> None:
    """A place is row times columns plus column, as the kernel takes it apart."""
    for order in itertools.permutations(range(5)):
        rows, columns = order[:2], order[2:]
        table, line = lane_map_edits(rows, columns)
        listed = re.search(r"lane_places\[32\] = {(.*)};", table.new)
        assert listed is not None
        places = np.array([int(place) for place in listed[1].split(",")])
        assert sorted(places) == list(range(32))
        np.testing.assert_array_equal(places // 8, number_of(rows))
        np.testing.assert_array_equal(places % 8, number_of(columns))
        assert "lx = place % (WN / TN), ly = place / (WN / TN)" in line.new


@pytest.mark.parametrize("bits", [((0, 1), (2, 3)), ((0, 1), (1, 2, 3, 4)), ((0, 1), (2, 3, 5)), ((), ())])
def test_a_lane_map_uses_every_bit_once(bits: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="uses each of the bits 0 to 4 once"):
        lane_map_edits(*bits)


def test_the_rungs_own_lane_map_counts_the_lanes() -> None:
    """Lane % 8 is bits 0, 1, 2 and lane / 8 is bits 3, 4."""
    table, _ = lane_map_edits((3, 4), (0, 1, 2))
    assert f"{{{', '.join(map(str, range(32)))}}}" in table.new
    for key in ("rows", "own-8x8", "own-16x8"):
        probe = PROBES["half-warps" if key == "rows" else "lane-maps"]
        assert probe.variant(key).rung.edits[0] == table


def test_names_of_probes_and_variants_are_unique() -> None:
    assert [probe.name for probe in PROBES.values()] == [*PROBES]
    for probe in PROBES.values():
        keys = [variant.key for variant in probe.variants]
        assert len(set(keys)) == len(keys)
        for variant in probe.variants:
            other = probe.against(variant)
            assert other in {None, *keys}
            assert (other is None) == (variant.alone or variant is probe.variants[0])
        for expectation in probe.expectations:
            assert expectation.variant in keys
            assert (expectation.ratio is None) != (expectation.value is None)
            ratio_has_a_base = probe.against(probe.variant(expectation.variant)) is not None
            assert expectation.ratio is None or ratio_has_a_base


def test_each_lane_map_stands_against_its_own_rung() -> None:
    probe = PROBES["lane-maps"]
    against = {variant.key: probe.against(variant) for variant in probe.variants}
    assert against == {
        "rung-12": None,
        "own-8x8": "rung-12",
        "best-8x8": "own-8x8",
        "rung-15": None,
        "own-16x8": "rung-15",
        "best-16x8": "own-16x8",
    }
    for probe in PROBES.values():
        for variant in probe.variants:
            other = probe.against(variant)
            if other is not None and not variant.rung.product:
                assert probe.variant(other).rung.number == variant.rung.number
