"""The search over lane maps: its fewest passes, its figures for the article's kernels, its own arithmetic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilewave.errors import UsageError
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_edits import lane_map_edits
from tilewave.lab.probe_search import (
    ARRANGEMENTS,
    PATCHES,
    READINGS,
    LaneMapCost,
    arrangements,
    attained,
    cost_of,
    groups_of,
    lane_maps,
    load_addresses,
    number_of,
    passes_of,
    reading,
    search,
)
from tilewave.lab.probe_words import arrangement_tables, search_tables


def passes_by_the_rule(addresses: np.ndarray) -> int:
    """Passes of one warp's 16-byte load, from the rule in words, lane by lane.

    Each quarter-warp is a group; the two of a half-warp are one where every lane has the address of lane^1,
    or every lane that of lane^2. A group takes as many passes as one bank has different words.
    """

    def of(lanes: list[int]) -> int:
        words: dict[int, set[int]] = {}
        for lane in lanes:
            for word in range(4):
                place = int(addresses[lane]) // 4 + word
                words.setdefault(place % 32, set()).add(place)
        return max(len(different) for different in words.values())

    total = 0
    for half in (range(16), range(16, 32)):
        lanes = list(half)
        if any(all(addresses[lane] == addresses[lane ^ bit] for lane in lanes) for bit in (1, 2)):
            total += of(lanes)
        else:
            total += of(lanes[:8]) + of(lanes[8:])
    return total


@pytest.mark.parametrize(("patch", "fewest"), [((8, 8), 8), ((16, 8), 12), ((8, 16), 12)])
def test_the_fewest_passes_of_each_patch(patch: tuple[int, int], fewest: int) -> None:
    """Two passes a load and not one less: a full warp's 16-byte load reads two half-warps at least."""
    assert patch in PATCHES
    costs = search(*patch)
    assert costs[0].passes == fewest == 2 * (patch[0] + patch[1]) // 4
    assert [cost.passes for cost in costs] == sorted(cost.passes for cost in costs)
    groups = len(groups_of(patch[0])) * len(groups_of(patch[1]))
    assert len(costs) == 6 * 120 * groups
    assert len({(c.row_bits, c.column_bits, c.row_group, c.column_group) for c in costs}) == len(costs)


def test_the_two_patches_of_128_outputs_are_mirror_images() -> None:
    def spectrum(tm: int, tn: int) -> list[int]:
        return sorted(cost.passes for cost in search(tm, tn))

    assert spectrum(16, 8) == spectrum(8, 16)


def test_search_agrees_with_the_rule_lane_by_lane(rng: np.random.Generator) -> None:
    costs = [cost for patch in PATCHES for cost in rng.choice(np.array(search(*patch), object), 40)]
    for cost in costs:
        tm, tn = 4 * len(cost.a_passes), 4 * len(cost.b_passes)
        for bits, patch, group, passes in (
            (cost.row_bits, tm, cost.row_group, cost.a_passes),
            (cost.column_bits, tn, cost.column_group, cost.b_passes),
        ):
            loads = load_addresses(bits, patch, group)
            assert tuple(passes_by_the_rule(load) for load in loads) == passes, str(cost)


@pytest.mark.parametrize(
    ("what", "bits", "patch", "groups", "a_passes", "b_passes"),
    [
        # Two rows of 16 lanes: the article's kernel needs five passes on average, and three after splitting.
        ("rung 08", ((4,), (0, 1, 2, 3)), (8, 8), (8, 8), None, None),
        ("rung 09", ((4,), (0, 1, 2, 3)), (8, 8), (4, 4), None, None),
        # Read on an H200: 16 passes for 16 x 8, 12 for 8 x 8, with 4 x 8 lanes.
        ("rung 15", ((3, 4), (0, 1, 2)), (16, 8), (4, 4), (2, 2, 2, 2), (4, 4)),
        ("rung 12", ((3, 4), (0, 1, 2)), (8, 8), (4, 4), (2, 2), (4, 4)),
    ],
)
def test_known_kernels(
    what: str,
    bits: tuple[tuple[int, ...], tuple[int, ...]],
    patch: tuple[int, int],
    groups: tuple[int, int],
    a_passes: tuple[int, ...] | None,
    b_passes: tuple[int, ...] | None,
) -> None:
    cost = cost_of(*bits, *patch, *groups)
    mean = {"rung 08": 5.0, "rung 09": 3.0, "rung 15": 16 / 6, "rung 12": 3.0}[what]
    assert cost.mean == pytest.approx(mean)
    if a_passes is not None:
        assert (cost.a_passes, cost.b_passes) == (a_passes, b_passes)


def test_half_warps_of_the_article() -> None:
    """Four passes can be had, and so can five and a third; three, as hoped for, cannot."""
    found = arrangements()
    assert found.keys() == ARRANGEMENTS.keys()
    for costs in found.values():
        assert len(costs) == 864
    rows, square = (attained(found[name], READINGS[0]) for name in ARRANGEMENTS)
    assert 4.0 in rows
    assert 5.333 in square
    assert not any(2.75 <= passes <= 3.25 for passes in square)
    assert all(min(values) == 2.0 for values in (rows, square))
    for name, in_half in ARRANGEMENTS.items():
        for cost in found[name]:
            assert sum(bit < 4 for bit in cost.row_bits) == in_half


def test_what_the_tables_say() -> None:
    lines = arrangement_tables()
    text = "\n".join(lines)
    assert (
        "two rows of eight, four passes (measured), for an average load: 322 of 864 lane maps need 4" in text
    )
    assert text.count("4 x 4 square, three (hoped for), for ") == len(READINGS)
    for line in lines:
        if "three (hoped for)" in line:
            assert line.endswith(": no lane map")
    assert "8 of 864 lane maps need 5.33" in text
    assert "do not determine the mapping" in text
    text = "\n".join(search_tables())
    assert "8 x 8: 8 passes for 4 loads" in text
    assert "16 x 8: 12 passes for 6 loads" in text
    assert "8 x 16: 12 passes for 6 loads" in text


def test_the_probes_maps_are_the_searchs() -> None:
    """What is put into rungs 12 and 15 is the cheapest map that keeps their warps of 4 x 8 lanes."""
    for patch, expectation in (((8, 8), "best-8x8"), ((16, 8), "best-16x8")):
        best = next(
            cost
            for cost in search(*patch)
            if cost.lanes == "4 x 8" and cost.row_group == cost.column_group == 4
        )
        variant = PROBES["lane-maps"].variant(expectation)
        assert variant.rung.edits == lane_map_edits(best.row_bits, best.column_bits)
        own = cost_of((3, 4), (0, 1, 2), *patch, 4, 4)
        (passes,) = (
            e
            for e in PROBES["lane-maps"].expectations
            if (e.variant, e.figure) == (expectation, "shared_load_passes")
        )
        assert passes.ratio == pytest.approx(best.passes / own.passes)


def test_every_lane_map_is_there_once() -> None:
    maps = list(lane_maps())
    assert len(maps) == len(set(maps)) == 6 * 120
    assert all(sorted(rows + columns) == [0, 1, 2, 3, 4] for rows, columns in maps)
    assert {rows for rows, _ in lane_maps([2])} == set(itertools.permutations(range(5), 2))


def test_means_and_readings() -> None:
    cost = LaneMapCost((3, 4), (0, 1, 2), 4, 4, (2, 2, 2, 2), (4, 6))
    assert cost.passes == 18
    assert [reading(cost, which) for which in READINGS] == [3.0, 2.0, 5.0, 6.0]
    assert str(cost) == "4 x 8 lanes, row bits 3 4, column bits 0 1 2, groups of 4 rows and 4 columns"
    with pytest.raises(
        UsageError, match=r"there is no reading 'best'; there are an average load, .*costliest"
    ):
        reading(cost, "best")


@pytest.mark.parametrize("bits", [(3, 4), (0, 1, 2), (2,), (4, 0, 3, 1)], ids=str)
@pytest.mark.parametrize(("patch", "group"), [(8, 4), (8, 8), (16, 4), (16, 8), (16, 16)])
def test_a_warp_reads_its_tile_and_nothing_else(bits: tuple[int, ...], patch: int, group: int) -> None:
    """All loads together touch every value of the warp's rows or columns, each lane its own patch of them."""
    loads = load_addresses(bits, patch, group)
    assert loads.shape == (patch // 4, 32)
    values = loads[:, :, None] // 4 + np.arange(4)
    assert set(values.ravel()) == set(range(patch << len(bits)))
    owners = {(value, int(number_of(bits)[lane])) for _, lane, value in _places(values)}
    assert len(owners) == patch << len(bits)  # lanes of one number, and no others, share a value


def _places(values: np.ndarray) -> list[tuple[int, int, int]]:
    return [(i, lane, int(value)) for (i, lane, _), value in np.ndenumerate(values)]


@pytest.mark.parametrize(("patch", "group"), [(8, 2), (8, 6), (12, 8), (16, 3)])
def test_groups_that_make_no_wide_loads_are_refused(patch: int, group: int) -> None:
    with pytest.raises(UsageError, match=f"groups of {group} do not divide a patch of {patch}"):
        passes_of((0, 1), patch, group)
