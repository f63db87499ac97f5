"""What the report's pictures are drawn from: traces, banks, schedules, intensities, places."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from ladders import made_up_ladder
from report_data import LADDER

from tilewave.device import get_spec, spec_names
from tilewave.lab.launches import launch_of
from tilewave.lab.records import load_ladder
from tilewave.lab.registry import get_rung, load_rungs
from tilewave.lab.report.banks import banks, requests
from tilewave.lab.report.follow import follow
from tilewave.lab.report.roofline import asked_bytes, roof, roofline
from tilewave.lab.report.schedules import RUNGS as SCHEDULED
from tilewave.lab.report.schedules import assign
from tilewave.lab.report.svg import CHARACTER, WIDTH, round_ticks, spread
from tilewave.lab.report.tiling import owners, rectangles
from tilewave.lab.report.timelines import RUNGS as TIMED
from tilewave.lab.report.timelines import SLICES, timeline

# -- tiles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", [r for r in load_rungs() if r.schedule is None], ids=lambda r: r.title)
def test_owners_store_what_the_registry_says(rung) -> None:  # type: ignore[no-untyped-def]
    found = owners(rung, get_spec("A100"))
    tile = rung.tile
    assert found.thread.sum() == tile.tm * tile.tn
    assert found.warp.sum() == 32 * tile.tm * tile.tn
    assert found.thread[0, 0]
    assert not (found.thread & ~found.warp).any()


def test_the_split_patch_lies_in_four_pieces() -> None:
    def pieces(name: str) -> list[tuple[int, int, int, int]]:
        return rectangles(owners(get_rung(name), get_spec("A100")).thread)

    assert pieces("transposed_a") == [(0, 0, 8, 8)]
    assert pieces("split_groups") == [(0, 0, 4, 4), (0, 64, 4, 4), (64, 0, 4, 4), (64, 64, 4, 4)]


def test_rectangles_cover_a_mask_once(rng: np.random.Generator) -> None:
    for _ in range(50):
        mask = rng.random(rng.integers(1, 12, 2)) < rng.random()
        covered = np.zeros(mask.shape, dtype=int)
        for row, column, rows, columns in rectangles(mask):
            covered[row : row + rows, column : column + columns] += 1
        np.testing.assert_array_equal(covered, mask)


# -- banks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "passes"), [("transposed_a", {"A": 2, "B": 8}), ("split_groups", {"A": 2, "B": 4})]
)
def test_reads_before_and_after_the_split(name: str, passes: dict[str, int]) -> None:
    rung = get_rung(name)
    found = requests(follow(rung, get_spec("H200"), slices=1), "load")
    assert {request.matrix: request.map.passes for request in found} == passes
    # Both are read equally often, so their mean is what the ladder counted for the whole kernel.
    row = load_ladder(LADDER).find(rung.number, 2048)
    assert row is not None
    assert row.counted is not None
    assert row.counted.passes_per_read == pytest.approx(sum(passes.values()) / 2, rel=1e-3)


def test_only_what_changed_is_shown() -> None:
    part = banks(get_spec("H200"))
    names = [panel.drawing.name for panel in part.panels]
    assert names[:4] == ["banks-08-load-b", "banks-09-load-b", "banks-08-load-a", "banks-09-load-a"]
    assert names[4:] == ["banks-10-store-a", "banks-11-store-a"]
    hot = [
        sum(mark.get("class") in ("f-hot cell", "f-ember cell") for mark in panel.drawing.marks)
        for panel in part.panels
    ]
    assert hot[0] == 128  # every word of rung 08's read of B meets another one
    assert hot[1] == hot[2] == hot[3] == 0


# -- timelines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["T4", "H200"])
@pytest.mark.parametrize("name", TIMED)
def test_slices_travel_then_lie_then_are_multiplied(name: str, device: str) -> None:
    rung = get_rung(name)
    line = timeline(follow(rung, get_spec(device), SLICES))
    assert [span.slice for span in line.multiplied] == list(range(SLICES))
    assert sorted(span.slice for span in line.travelling) == list(range(SLICES))
    held = {span.slice: (buffer, span) for buffer, spans in line.ready.items() for span in spans}
    stages = {"shallow_slice": 1, "double_buffer": 2, "async_copies": 2, "four_stages": 4}[name]
    assert sorted(line.ready) == list(range(stages))
    for way, done in zip(sorted(line.travelling, key=lambda s: s.slice), line.multiplied, strict=True):
        buffer, span = held[way.slice]
        assert buffer == way.slice % stages
        assert way.begin < way.end == span.begin <= done.begin < span.end <= done.end
        assert any(span.begin <= barrier < done.begin for barrier in line.barriers)
    for spans in line.ready.values():  # a buffer is not filled while it is read
        assert all(before.end <= after.begin for before, after in pairwise(spans))


@pytest.mark.parametrize(("name", "most"), list(zip(TIMED, (1, 1, 1, 3), strict=True)))
def test_so_many_slices_travel_at_once(name: str, most: int) -> None:
    line = timeline(follow(get_rung(name), get_spec("H200"), SLICES))
    moments = np.zeros(line.length, dtype=int)
    for span in line.travelling:
        moments[span.begin : span.end] += 1
    assert moments.max() == most
    for span in line.travelling:  # and none arrives before it must
        assert span.slice == 0 or span.end > line.multiplied[span.slice - 1].begin


def test_what_overlaps() -> None:
    overlap = {
        (name, device): timeline(follow(get_rung(name), get_spec(device), SLICES)).overlap
        for name in TIMED
        for device in ("T4", "H200")
    }
    assert overlap["shallow_slice", "H200"] == 0
    assert all(overlap[name, "H200"] == 1 for name in TIMED[1:])
    assert overlap["double_buffer", "T4"] == 1  # through registers: any GPU can
    assert overlap["async_copies", "T4"] == overlap["four_stages", "T4"] == 0  # no cp.async before sm_80


# -- schedules ----------------------------------------------------------------------------------------------


def test_assignments_do_all_the_work_once(rng: np.random.Generator) -> None:
    for _ in range(40):
        spec = replace(get_spec("H200"), sms=int(rng.integers(1, 150)))
        m, n, k = (int(size) for size in rng.integers(1, 3000, 3))
        for name in SCHEDULED:
            found = assign(get_rung(name), m, n, k, spec)
            bm, bn, bk = found.tile
            tiles = math.ceil(m / bm) * math.ceil(n / bn)
            covered: dict[int, list[tuple[int, int]]] = {}
            last = [0] * spec.sms
            for stint in found.stints:
                assert last[stint.sm] == stint.begin < stint.end
                last[stint.sm] = stint.end
                covered.setdefault(stint.item.tile, []).append((stint.item.k_begin, stint.item.k_end))
            assert sorted(covered) == list(range(tiles))
            for ranges in covered.values():
                edges = [edge for pair in sorted(ranges) for edge in pair]
                assert edges[0] == 0
                assert edges[-1] == k
                assert edges[1:-1:2] == edges[2::2]
            assert sum(s.end - s.begin for s in found.stints) == tiles * math.ceil(k / bk) * bm * bn * bk
            # The planner's figure for the busiest SM is the longest row of the picture.
            assert found.longest == found.cut.busiest_slices(spec.sms) * bm * bn * bk
            assert 0 < found.busy <= 1


def test_the_articles_sketch() -> None:
    six = replace(get_spec("GB10"), sms=6)
    busy = {name: assign(get_rung(name), 384, 768, 1024, six).busy for name in SCHEDULED}
    assert busy.pop("large_patch") == 0.75  # nine tiles on six SMs: two rounds
    assert set(busy.values()) == {1.0}
    assert launch_of(get_rung("stream_k"), 384, 768, 1024, six).cut.whole_tiles == 6  # type: ignore[union-attr]


# -- roofline -----------------------------------------------------------------------------------------------


def test_bytes_asked_by_the_naive_rung() -> None:
    row = load_ladder(LADDER).find(1, 1024)
    assert row is not None
    assert row.counted is not None
    # A warp's step: 32 sectors of A and one of B; every element of C stored by a column of lanes: 32 sectors.
    warps = 1024 * 1024 // 32
    assert asked_bytes(row.counted) == 32 * warps * (33 * 1024 + 32)


@pytest.mark.parametrize("number", [5, 6, 13, 15, 18])
def test_all_sectors_are_asked_for(number: int) -> None:
    row = load_ladder(LADDER).find(number, 2048)
    assert row is not None
    assert row.counted is not None
    sectors = sum(value for name, value in asdict(row.counted).items() if name.endswith("_sectors"))
    assert asked_bytes(row.counted) == 32 * sectors


@pytest.mark.parametrize("name", spec_names())
def test_the_roof_has_a_ridge(name: str) -> None:
    spec = get_spec(name)
    ridge = spec.peak_fp32_tflops * 1000 / spec.bandwidth_gb_s
    assert roof(spec, ridge / 2) == pytest.approx(spec.peak_fp32_tflops / 2)
    assert roof(spec, ridge) == roof(spec, 9 * ridge) == pytest.approx(spec.peak_fp32_tflops)


@pytest.mark.parametrize("name", spec_names())
def test_names_of_points_lie_in_the_picture(name: str, rng: np.random.Generator) -> None:
    for _ in range(20):
        ladder = made_up_ladder(rng, timed=not rng.integers(4), sizes=(4096,), rungs=23)
        for panel in roofline(ladder, get_spec(name), 4096).panels:
            for mark in panel.drawing.marks:
                if mark.tag == "text" and mark.text:
                    length, x = CHARACTER * len(mark.text), float(mark.attrib["x"])
                    before = {"start": 0, "middle": length / 2, "end": length}
                    left = x - before[mark.attrib.get("text-anchor", "start")]
                    assert left > -CHARACTER, mark.text
                    assert left + length < WIDTH + CHARACTER, mark.text


# -- places -------------------------------------------------------------------------------------------------


def test_labels_keep_their_distance_and_order(rng: np.random.Generator) -> None:
    for _ in range(200):
        count = int(rng.integers(1, 30))
        wanted = (rng.random(count) * rng.choice([1.0, 50.0, 300.0])).tolist()
        placed = spread(wanted, 10.0, 0.0, 300.0)
        gap = min(10.0, 300.0 / max(1, count - 1))
        assert min(placed) >= -1e-9
        assert max(placed) <= 300 + 1e-9
        order = sorted(range(count), key=lambda i: wanted[i])
        steps = np.diff([placed[i] for i in order])
        assert (steps >= gap - 1e-6).all()
    assert spread([50.0, 90.0], 10.0, 0.0, 300.0) == [50.0, 90.0]


def test_ticks_are_round_and_few(rng: np.random.Generator) -> None:
    for largest in 10.0 ** rng.uniform(-3, 6, 200):
        ticks = round_ticks(float(largest), 6)
        assert ticks[0] == 0
        assert 3 <= len(ticks) <= 7
        assert largest * 0.6 < ticks[-1] <= largest * (1 + 1e-9)
        step = ticks[1] / 10 ** math.floor(math.log10(ticks[1]) + 1e-9)
        assert min(abs(step - nice) for nice in (1, 2, 2.5, 5, 10)) < 1e-9
    assert round_ticks(0.0) == [0.0]
