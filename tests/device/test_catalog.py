"""The GPUs known as data: complete, sourced, consistent with what is known of them, forgiving to look up."""

from __future__ import annotations

import dataclasses

import pytest

from tilewave.compiler import ARCHITECTURES
from tilewave.device import DeviceSpec, get_spec, spec_names
from tilewave.errors import UsageError

ALL = ("T4", "A100", "RTX 3090", "RTX 4090", "L4", "GB10", "H100", "H200", "B200", "RTX 5090")

# SMs, FP32 TFLOP/s, shared KiB per SM, warps per SM: the vendor's figures, and the article's for the GB10.
STATED = {
    "T4": (40, 8.1, 64, 32),
    "A100": (108, 19.5, 164, 64),
    "RTX 3090": (82, 35.6, 100, 48),
    "RTX 4090": (128, 82.6, 100, 48),
    "L4": (58, 30.3, 100, 48),
    "GB10": (48, 29.5, 100, 48),
    "H100": (132, 66.9, 228, 64),
    "H200": (132, 66.9, 228, 64),
    "B200": (148, 74.5, 228, 64),
    "RTX 5090": (170, 104.8, 100, 48),
}


def test_all_are_there() -> None:
    assert set(spec_names()) == set(ALL) == set(STATED)


@pytest.mark.parametrize("name", ALL)
def test_every_figure_has_a_source(name: str) -> None:
    spec = get_spec(name)
    figures = {field.name for field in dataclasses.fields(DeviceSpec)}
    figures -= {"name", "compute_capability", "sources"}
    if spec.barriers_per_sm is None:
        figures.remove("barriers_per_sm")
    assert set(spec.sources) == figures
    assert all(source.strip() for source in spec.sources.values())


@pytest.mark.parametrize("name", ALL)
def test_agrees_with_what_the_vendor_states(name: str) -> None:
    spec = get_spec(name)
    sms, tflops, shared_kib, warps = STATED[name]
    assert spec.sms == sms
    assert spec.peak_fp32_tflops == pytest.approx(tflops, abs=0.051)  # stated to one decimal
    assert spec.shared_per_sm == shared_kib * 1024
    assert spec.warps_per_sm == warps
    assert spec.shared_per_block + spec.shared_reserved_per_block == spec.shared_per_sm
    assert spec.arch in ARCHITECTURES
    assert spec.arch == "sm_{}{}".format(*spec.compute_capability)


def test_the_articles_gb10() -> None:
    gb10 = get_spec("GB10")
    assert (gb10.sms, gb10.shared_per_sm, gb10.bandwidth_gb_s, gb10.clock_mhz) == (48, 102400, 273, 2400)
    assert gb10.power_w == 95


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("gb10", "GB10"),
        ("NVIDIA GB10", "GB10"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("geforce-rtx-5090", "RTX 5090"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        (" h200 ", "H200"),
    ],
)
def test_lookup_forgives(spelling: str, name: str) -> None:
    assert get_spec(spelling).name == name


@pytest.mark.parametrize("spelling", ["RTX 4080", "", "H20", "4090 Ti", "nvidia", "H200 NVL"])
def test_an_unknown_name_lists_the_known(spelling: str) -> None:
    with pytest.raises(UsageError) as error:
        get_spec(spelling)
    assert repr(spelling) in str(error.value)
    assert all(name in str(error.value) for name in ALL)


def test_a_close_name_is_suggested() -> None:
    with pytest.raises(UsageError, match="did you mean RTX 4090"):
        get_spec("RTX 4091")


def test_something_else_than_a_name() -> None:
    with pytest.raises(UsageError, match="must be a string, not 4090"):
        get_spec(4090)  # type: ignore[arg-type]
