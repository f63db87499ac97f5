"""What probes say follows the numbers: where they flip, so do the words."""

from __future__ import annotations

import pytest
from probe_helpers import examined, words

from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_words import L2_HIT_RATE, NOISE, change


@pytest.mark.parametrize("name", PROBES)
def test_without_times_nothing_is_claimed(name: str) -> None:
    said = words(name)
    assert "only a GPU can tell" in said
    for claim in ("faster", "slower", "as fast", "wait for", "limit", "gain", "pays"):
        assert claim not in said, claim


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.0, "as fast (within noise)"),
        (1 + 0.9 * NOISE, "as fast (within noise)"),
        (1 - 0.9 * NOISE, "as fast (within noise)"),
        (1.02, "2 % faster"),
        (0.98, "2 % slower"),
        (1.404, "40 % faster"),
        (0.5, "50 % slower"),
        (2.5, "150 % faster"),
    ],
)
def test_a_ratio_in_words(ratio: float, said: str) -> None:
    assert change(ratio) == said


def test_no_loads() -> None:
    said = words("no-loads", {"rung-12": 1.4, "no-loads": 1.0})
    assert "40 % faster" in said
    assert "at most 29 % of rung 12's time" in said
    said = words("no-loads", {"rung-12": 1.0, "no-loads": 1.0})
    assert "Copying costs rung 12 nothing that could be saved" in said
    assert "at most" not in said
    assert "slower" in words("no-loads", {"rung-12": 1.0, "no-loads": 1.2})


def test_stores_only() -> None:
    assert "21 % faster than rung 12" in words("stores-only", {"rung-12": 1.21, "stores-only": 1.0})
    assert "17 % slower than rung 12" in words("stores-only", {"rung-12": 1.0, "stores-only": 1.2})
    said = words("stores-only", {"rung-12": 1.0, "stores-only": 1.0})
    assert "the loads are free here" in said
    assert "than rung 12" not in said


def test_same_slice() -> None:
    times = {"rung-12": 1.0, "masked": 1.0, "same-slice": 1.0}
    said = words("same-slice", times)
    assert "does not wait for global memory" in said
    assert "earlier cannot help" in said
    said = words("same-slice", times | {"same-slice": 0.9})
    assert "11 % faster: here rung 12 does wait for global memory" in said
    assert "earlier could help" in said
    said = words("same-slice", times | {"same-slice": 1.1})
    assert "9 % slower" in said
    assert "not what is seen" in said


def test_same_slice_is_held_against_the_masked_kernel_not_the_rung() -> None:
    said = words("same-slice", {"rung-12": 2.0, "masked": 1.0, "same-slice": 1.0})
    assert "does not wait for global memory" in said


def test_same_slice_says_when_the_compiler_had_a_part() -> None:
    times = {"rung-12": 1.0, "masked": 1.0, "same-slice": 0.9}
    alike = {key: examined(registers=127, spills=56) for key in ("masked", "same-slice")}
    said = words("same-slice", times, builds=alike)
    assert "Both masked kernels have 127 registers and 56 bytes of spills" in said
    assert "its doing" not in said
    said = words("same-slice", times, builds=alike | {"same-slice": examined(registers=127, spills=24)})
    assert "127 registers and 24 bytes of spills, every slice 127 registers and 56 bytes of spills" in said
    assert "part of the difference may be its doing" in said


def test_transpose() -> None:
    times = {"rung-06": 1.2, "transpose": 1.4, "transpose-4": 1.2, "wide": 1.0, "both": 1.0}
    said = words("transpose-and-wide-loads", times)
    assert "the transpose alone 14 % slower" in said
    assert "the wide loads alone 20 % faster" in said
    assert "carry the gain, as the article found" in said
    assert "one bank" in said
    assert "pays by itself" not in said
    said = words("transpose-and-wide-loads", times | {"transpose": 1.0, "transpose-4": 1.1, "wide": 1.2})
    assert "does not come from the wide loads alone, unlike in the article" in said
    assert "one bank: its passes outweigh" not in said
    assert "the transpose pays by itself, unlike in the article" in said


def test_untransposed() -> None:
    times = {"rung-15": 1.0, "untransposed": 1.15, "untransposed-wide": 1.0}
    passes = {
        "rung-15": examined({"shared_load_passes": 16}),
        "untransposed": examined({"shared_load_passes": 24}),
    }
    said = words("untransposed", times, builds=passes)
    assert "Without the transpose rung 15 is 13 % slower (the article: 2 to 4 % slower)" in said
    assert "x 1.50 as many passes" in said
    assert "as fast (within noise): one makes up for the other" in said
    said = words("untransposed", times | {"untransposed": 1.0, "untransposed-wide": 0.8}, builds=passes)
    assert "as many passes" not in said
    assert "25 % faster." in said
    assert "makes up" not in said


def test_padding() -> None:
    times = {"rung-08": 1.1, "padding": 1.05, "splitting": 1.0}
    conflicts = {"padding": examined({"shared_load_conflicts": 7})}
    said = words("padding", times)
    assert "Padding removes every conflict" in said
    assert "Padding makes rung 08 5 % faster, splitting 10 % faster. Splitting does more" in said
    said = words("padding", times | {"padding": 1.0, "splitting": 1.05}, builds=conflicts)
    assert "removes every conflict" not in said
    assert "Padding does more" in said
    assert "padding would do" in words("padding", times | {"padding": 1.0})


def test_resident_blocks() -> None:
    said = words("resident-blocks", {"one": 1.1, "two": 1.0}, size=1409)
    assert "144 tiles for 132 SMs" in said
    assert "10 % faster than with one" in said
    assert "the second fills the gaps" in said
    said = words("resident-blocks", {"one": 1.0, "two": 1.0}, size=1409)
    assert "as fast (within noise) as with one" in said
    assert "its units are busy anyway" in said
    said = words("resident-blocks", {"one": 1.0, "two": 1.1}, size=1409)
    assert "9 % slower than with one" in said
    assert "gaps" not in said
    assert "busy anyway" not in said


def test_resident_blocks_say_when_a_size_cannot_show_anything() -> None:
    for gpu, shows in (("H200", False), ("GB10", True)):
        said = words("resident-blocks", {"one": 1.1, "two": 1.0}, size=1025, gpu=gpu)
        assert ("cannot show anything on this GPU" in said) is not shows
        assert ("fills the gaps" in said) is shows
        said = words("resident-blocks", {"one": 1.0, "two": 1.0}, size=1025, gpu=gpu)
        assert ("busy anyway" in said) is shows


def l2(rung_15: float, walk: float, size: int = 4096, gpu: str = "GB10") -> str:
    """512 tiles on 48 SMs: 11 waves of rung 15, 10.67 tiles a walker."""
    profiled = {"rung-15": {L2_HIT_RATE: rung_15}, "walk": {L2_HIT_RATE: walk}}
    return words("l2-reuse", {"rung-15": 11.0, "walk": 15.0}, size=size, gpu=gpu, profiled=profiled)


def test_l2_reuse() -> None:
    said = l2(82.6, 52.5)
    assert "512 tiles for 48 SMs. The busiest SM of rung 15 computes 11, each walker of rung 19 10.67" in said
    assert "1000 us in rung 15, 1406 us in rung 19: +41 % (the article: about +40 %)" in said
    assert "L2 hit rate: 82.6 % in rung 15, 52.5 % in rung 19" in said
    assert "do lose reuse, and pay for it" in said
    said = words(
        "l2-reuse",
        {"rung-15": 11.0, "walk": 10.7},
        size=4096,
        gpu="GB10",
        profiled={"rung-15": {L2_HIT_RATE: 82.6}, "walk": {L2_HIT_RATE: 52.5}},
    )
    assert "+0 %" in said
    assert "memory serves the misses in time" in said
    said = l2(82.6, 81.0)
    assert "lose no reuse; storing and combining partial sums costs the time" in said
    assert "reuse cannot be lost" not in said
    assert "reuse cannot be lost" in l2(82.6, 81.0, 1024, "H200")


def test_a_walker_may_have_less_than_a_tile() -> None:
    """128 tiles on 132 SMs: rung 15 gives an SM one or none, the walk gives each 0.97."""
    said = words("l2-reuse", {"rung-15": 1.0, "walk": 1.0}, size=2048)
    assert "The busiest SM of rung 15 computes 1, each walker of rung 19 0.97" in said
    assert "1000 us in rung 15, 1031 us in rung 19: +3 %" in said


def test_l2_reuse_without_a_profiler() -> None:
    said = words("l2-reuse", {"rung-15": 11.0, "walk": 15.0}, size=4096)
    assert "was not read: it needs Nsight Compute's ncu" in said
    assert "lose" not in said


def test_half_warps() -> None:
    times = {"rung-15": 1.0, "rows": 1.0, "square": 1.0, "square-z": 1.0}
    passes = {
        key: examined({"shared_loads": 6, "shared_load_passes": number})
        for key, number in (("rung-15", 16), ("rows", 16), ("square", 16), ("square-z", 12))
    }
    said = words("half-warps", times, builds=passes)
    assert "two rows of eight 2.67, the square 2.67, the square in Z order 2.00" in said
    assert "Against two rows of eight the square is as fast (within noise)" in said
    assert "Fewer passes buy nothing here" in said
    said = words("half-warps", times | {"square-z": 0.9}, builds=passes)
    assert "the square in Z order 11 % faster" in said
    assert "buy nothing" not in said
    more = passes | {"square-z": examined({"shared_loads": 6, "shared_load_passes": 20})}
    assert "buy nothing" not in words("half-warps", times, builds=more)


LANES = {"rung-12": 1.0, "own-8x8": 1.16, "best-8x8": 1.0, "rung-15": 1.0, "own-16x8": 1.0, "best-16x8": 1.0}


def test_lane_maps() -> None:
    said = words("lane-maps", LANES)
    assert "rung 12 is 16 % faster, rung 15 as fast (within noise)" in said
    assert "limit rung 12 here. Passes of shared memory do not limit rung 15 here" in said
    said = words("lane-maps", LANES | {"own-8x8": 1.0})
    assert "do not limit rung 12 and rung 15 here" in said
    said = words("lane-maps", LANES | {"best-16x8": 0.9})
    assert "Passes of shared memory limit rung 12 and rung 15 here" in said
    assert "do not" not in said


def test_only_the_map_counts() -> None:
    """Neither a slow rung 15 nor a slow table makes a lane map look better or worse."""
    slow = {"rung-15": 9.0, "own-16x8": 9.0, "best-16x8": 9.0, "own-8x8": 2.0, "best-8x8": 2.0}
    said = words("lane-maps", LANES | slow)
    assert "rung 12 is as fast (within noise), rung 15 as fast (within noise)" in said
