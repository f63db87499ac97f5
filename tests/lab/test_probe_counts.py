"""What probes predict and what is counted; how a prediction is judged, and what hinders a comparison."""

from __future__ import annotations

import pytest
from probe_helpers import examined, findings

from tilewave.compiler.records import Kernel, Resources
from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.lab import emulate
from tilewave.lab import probe as running
from tilewave.lab.probe import counted_size, dynamic_shared_for, get_probe, judge, run_probes, spill_notes
from tilewave.lab.probe_catalog import PROBES, resident_sizes
from tilewave.lab.probe_records import Expectation, Judged
from tilewave.lab.registry import load_rungs

H200 = get_spec("H200")


@pytest.mark.parametrize("name", PROBES)
def test_predictions_come_true_in_the_emulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "check", lambda *_: ())  # test_probe_products.py checks them
    (found,) = run_probes([PROBES[name]], get_spec("GB10"), sizes=[200])
    assert found.counted_size == 256
    assert len(found.judged) == len(PROBES[name].expectations) > 0
    for judged in found.judged:
        assert judged.holds(judged.emulated) is True, judged
        assert judged.hardware is None
    assert found.examined.keys() == {variant.key for variant in PROBES[name].variants}


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["H200", "A100", "T4"])
@pytest.mark.parametrize("name", PROBES)
def test_predictions_come_true_at_their_own_size(name: str, gpu: str) -> None:
    spec = get_spec(gpu)
    (found,) = run_probes([PROBES[name]], spec)
    assert found.counted_size == 1024
    for judged in found.judged:
        if gpu == "T4" and judged.figure in ("copies", "blocks_per_sm"):
            continue  # Turing copies without cp.async, and its SM has room for one block of these
        assert judged.holds(judged.emulated) is True, judged


def test_products_that_only_an_edit_makes_are_checked() -> None:
    (found,) = run_probes([PROBES["padding"]], get_spec("GB10"), sizes=[100])
    checks = found.examined["padding"].checks
    assert {check.where for check in checks} == {"emulator, N(0,1)", "emulator, U(0,1)"}
    assert all(check.holds for check in checks)
    assert not found.examined["rung-08"].checks  # the rungs' own tests see to it
    (found,) = run_probes([PROBES["no-loads"]], get_spec("GB10"), sizes=[100])
    assert not any(one.checks for one in found.examined.values())


@pytest.mark.parametrize(
    ("sizes", "counted"), [([4096], 1024), ([1], 256), ([256, 9000], 256), ([257], 512), ([1025, 769], 1024)]
)
def test_counts_are_of_whole_tiles(sizes: list[int], counted: int) -> None:
    assert counted_size(sizes) == counted
    for rung in load_rungs():
        assert all(counted % extent == 0 for extent in (rung.tile.bm, rung.tile.bn, rung.tile.bk))


RATIO = Expectation("no-loads", "global_loads", "why", 0.25)


@pytest.mark.parametrize(
    ("own", "base", "emulated", "holds"),
    [
        (25, 100, 0.25, True),
        (26, 100, 0.26, False),
        (24, 100, 0.24, False),
        (0, 100, 0.0, False),
        (5, 0, None, None),
    ],
)
def test_a_ratio_is_judged(own: int, base: int, emulated: float | None, holds: bool | None) -> None:
    probe = PROBES["no-loads"]
    found = findings(
        probe,
        builds={"no-loads": examined({"global_loads": own}), "rung-12": examined({"global_loads": base})},
    )
    judged = judge(probe, found, RATIO)
    assert judged.emulated == emulated
    assert judged.holds(judged.emulated) is holds
    assert judged.hardware is None
    assert judged.holds(judged.hardware) is None


def test_the_hardwares_counters_are_judged_beside_the_emulators() -> None:
    probe = PROBES["no-loads"]
    found = findings(
        probe,
        builds={"no-loads": examined({"global_loads": 25}), "rung-12": examined({"global_loads": 100})},
    )
    found.hardware = {"no-loads": {"global_loads": 50.0}, "rung-12": {"global_loads": 100.0}}
    judged = judge(probe, found, RATIO)
    assert (judged.holds(judged.emulated), judged.holds(judged.hardware)) == (True, False)
    found.hardware["no-loads"]["global_loads"] = 25.0
    assert judge(probe, found, RATIO).holds(judge(probe, found, RATIO).hardware)
    del found.hardware["rung-12"]
    assert judge(probe, found, RATIO).hardware is None


def test_values_and_resources_are_judged() -> None:
    probe = PROBES["resident-blocks"]
    found = findings(probe, builds={"one": examined(blocks=1), "two": examined(blocks=3)})
    found.hardware = {"one": {"blocks_per_sm": 9.0}}  # no counter of the profiler has this name
    verdicts = {}
    for expectation in probe.expectations:
        judged = judge(probe, found, expectation)
        verdicts[judged.variant, judged.figure] = judged.holds(judged.emulated), judged.hardware
    assert verdicts["one", "blocks_per_sm"] == (True, None)
    assert verdicts["two", "blocks_per_sm"] == (False, None)


def test_a_ratio_may_follow_the_size() -> None:
    probe = PROBES["no-loads"]
    expectation = probe.expectations[0]
    for size in (256, 1024, 4096):
        found = findings(probe, size=size)
        assert judge(probe, found, expectation).expected == pytest.approx(16 / size)


def test_nothing_counts_as_zero_expected_only_exactly() -> None:
    judged = Judged("x", "shared_load_conflicts", 0, False, 0.0, 3.0, "")
    assert judged.holds(judged.emulated) is True
    assert judged.holds(judged.hardware) is False


def test_spills_that_differ_are_told_with_both_figures() -> None:
    probe = PROBES["lane-maps"]
    builds = {variant.key: examined(spills=0) for variant in probe.variants}
    assert spill_notes(probe, findings(probe, builds=builds)) == []
    builds["rung-12"] = examined(spills=56)
    builds["own-8x8"] = builds["best-8x8"] = examined(spills=16)
    assert spill_notes(probe, findings(probe, builds=builds)) == [
        'the compiler spills 16 bytes a thread in "rung 12, own lane map in a table" and 56 in "rung 12 '
        "as it is\", so part of the difference between them may be the compiler's"
    ]
    builds["own-8x8"] = builds["best-8x8"] = examined(spills=56)
    builds["best-16x8"] = examined(spills=4)
    (note,) = spill_notes(probe, findings(probe, builds=builds))
    assert "4 bytes a thread" in note
    assert 'lane map in a table" and 0 in "rung 15, own lane map in a table"' in note


def test_dynamic_shared_memory_holds_blocks_back() -> None:
    one, two = (PROBES["resident-blocks"].variant(key) for key in ("one", "two"))
    kernel = Kernel("k", "k", Resources(128, 0, 0, 0, 32768, 1))
    for gpu in ("H200", "GB10", "A100"):
        spec = get_spec(gpu)
        size = dynamic_shared_for(one, kernel, spec)
        assert dynamic_shared_for(two, kernel, spec) == 0
        fits = running.occupancy(kernel.resources, one.rung.threads, spec, size).blocks_per_sm
        less = running.occupancy(kernel.resources, one.rung.threads, spec, size - 1024).blocks_per_sm
        assert (fits, less > 1) == (1, True)


@pytest.mark.parametrize(
    ("gpu", "sizes"), [("GB10", (769, 1025)), ("H200", (1025, 1409)), ("T4", (769, 1025))]
)
def test_sizes_with_a_few_more_tiles_than_sms(gpu: str, sizes: tuple[int, ...]) -> None:
    spec = get_spec(gpu)
    assert resident_sizes(spec) == sizes
    other = next(size for size in sizes if size != 1025)
    assert (-(-other // 128)) ** 2 > spec.sms >= (other // 128) ** 2


def test_an_unknown_probe_or_variant_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"there is no probe 'padded'; there are no-loads, .*lane-maps"):
        get_probe("padded")
    assert get_probe(" Same_Slice ") is PROBES["same-slice"]
    with pytest.raises(UsageError, match="probe padding has no variant 'x': rung-08, padding, splitting"):
        PROBES["padding"].variant("x")


def test_a_budget_that_is_used_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "run_tasks", lambda work, tasks, jobs, budget: iter(()))
    (found,) = run_probes([PROBES["padding"]], H200, sizes=[100], budget_s=1)
    assert found.notes == ["not all kernels were counted: the budget was used up"]
    assert all(judged.emulated is None for judged in found.judged)
    assert found.sizes[0].words  # still says that nothing was timed
