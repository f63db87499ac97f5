"""The report's page and command: what it says of what is missing, its errors, its pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from ladders import made_up_ladder
from report_data import LADDER, made_up_power, made_up_profile
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.lab.power.records import save_power_run
from tilewave.lab.profile.records import save_profile
from tilewave.lab.records import Ladder, load_ladder, save_ladder
from tilewave.lab.report.command import spec_of
from tilewave.lab.report.page import Report, make_report, render, telling_sizes
from tilewave.lab.report.roofline import asked_bytes
from tilewave.lab.report.svg import DARK, LIGHT, Drawing, picture_style


def page_of(ladder: Ladder, device: str) -> str:
    return render(make_report(ladder, get_spec(device)), "tilewave report", "0")


def test_figures_come_from_the_file(rng: np.random.Generator, tmp_path: Path) -> None:
    """A ladder with other figures makes a page with other figures."""
    ladder = made_up_ladder(rng)
    ladder.device = "NVIDIA H200"
    text = page_of(ladder, "H200")
    for row in ladder.rows:
        assert row.speed is not None
        assert f"{row.rung:02d} {row.title}: {row.speed.tflops:.2f} TFLOP/s" in text
        assert f">{row.speed.tflops:.1f}</text>" in text
        assert f'<td class="figure">{row.speed.over_baseline:.1%}</td>' in text
    assert "cuBLAS 50.0" in text
    best = max((r for r in ladder.rows if r.size == 2049), key=lambda r: r.speed.tflops if r.speed else 0)
    assert best.speed is not None
    assert f"N = 2049: {best.rung:02d} {best.title} is the fastest, {best.speed.tflops:.1f} TFLOP/s" in text


def test_the_articles_figures_stand_beside() -> None:
    text = page_of(load_ladder(LADDER), "H200")
    assert "conflicts from 33.6 million to 54 thousand; passes per read from 5 to 3" in text
    assert re.search(r"<tr><th scope=\"row\">07 wide loads</th><td class=\"figure\">\+[\d.]+%</td>"
                     r"<td class=\"figure\">\+21%</td></tr>", text)  # fmt: skip


@pytest.mark.parametrize("device", ["T4", "RTX 4090"])
def test_without_a_gpu_the_pictures_are_there_and_times_are_not(
    rng: np.random.Generator, device: str
) -> None:
    ladder = made_up_ladder(rng, timed=False, sizes=(2048,))
    ladder.device = device
    report = make_report(ladder, get_spec(device))
    text = render(report, "tilewave report", "0")
    assert "No times: this ladder was climbed in the emulator" in text
    assert "No sustained run" in text
    assert "No counters of hardware" in text
    assert "TFLOP/s, median" not in text
    assert ("has no cp.async" in text) == (device == "T4")
    names = {drawing.name for drawing in report.drawings}
    assert {"tile-15", "banks-08-load-b", "timeline-12", "schedule-2048-21", "roofline"} <= names
    assert not any(name.startswith(("throughput", "gains", "estimates", "power")) for name in names)
    sms = get_spec(device).sms
    assert f"N = 2048 on the {sms} SMs of {device}" in text


def test_power_and_profile_are_told(rng: np.random.Generator) -> None:
    run, profile = made_up_power(rng), made_up_profile(rng)
    text = render(make_report(load_ladder(LADDER), get_spec("H200"), run, profile), "tilewave report", "0")
    assert "<li>Behind by 14 %.</li>" in text
    assert "No sustained run" not in text
    for repeat in run.repeats:
        assert f"round {repeat.round}: {repeat.tflops:.2f} TFLOP/s" in text
    assert "ampere_sgemm_128x64_tn: 128 outputs per thread" in text
    for kernel in profile.kernels:
        read, counted = (kernel.readings[c].figures["shared_loads"] for c in ("hardware", "emulator"))
        assert f"{kernel.title}: emulator {counted:,.0f}, hardware {read:,.0f}" in text


def drawing_of(report: Report, name: str) -> Drawing:
    return next(drawing for drawing in report.drawings if drawing.name == name)


def on_a_line(values: list[float], places: list[float]) -> bool:
    """Whether places are a linear function of values that is not constant (to the digits of a coordinate)."""
    slope, start = np.polyfit(values, places, 1)
    return bool(np.abs(np.polyval([slope, start], values) - places).max() < 0.02 and abs(slope) > 1e-6)


def test_marks_stand_where_their_figures_say(rng: np.random.Generator) -> None:
    ladder = load_ladder(LADDER)
    run, profile = made_up_power(rng), made_up_profile(rng)
    report = make_report(ladder, get_spec("H200"), run, profile)

    bars = [m for m in drawing_of(report, "throughput-2049").marks if m.get("class") == "f-sky"]
    rates = [row.speed.tflops for row in ladder.rows if row.size == 2049 and row.speed]
    assert on_a_line(rates, [float(bar.get("width", 0)) for bar in bars])
    assert float(bars[0].get("width", 0)) / rates[0] == pytest.approx(
        float(bars[-1].get("width", 0)) / rates[-1], 0.01
    )

    dots = [m for m in drawing_of(report, "roofline").marks if m.tag == "circle"]
    rows = [row for row in ladder.rows if row.size == 4096 and row.speed and row.counted]
    assert on_a_line([np.log(r.speed.tflops) for r in rows if r.speed], [float(d.get("cy", 0)) for d in dots])
    intensities = [np.log(2 * 4096**3 / asked_bytes(r.counted)) for r in rows if r.counted]
    assert on_a_line(intensities, [float(d.get("cx", 0)) for d in dots])

    dots = [m for m in drawing_of(report, "counters").marks if m.tag == "circle"]
    told = [re.search(r"emulator ([\d,]+), hardware ([\d,]+)", d.findtext("title", "")) for d in dots]
    ratios = [float(t[1].replace(",", "")) / float(t[2].replace(",", "")) for t in told if t]
    assert on_a_line(ratios, [float(d.get("cx", 0)) for d in dots])

    dots = [m for m in drawing_of(report, "estimates").marks if m.tag == "circle"]
    told = [re.search(r"estimated ([\d,]+) µs, measured ([\d,]+) µs", d.findtext("title", "")) for d in dots]
    logs = [np.log(float(t[2].replace(",", "")) / float(t[1].replace(",", ""))) for t in told if t]
    slope, start = np.polyfit(logs, [float(d.get("cx", 0)) for d in dots], 1)
    assert slope > 0
    assert (
        np.abs(slope * np.array(logs) + start - [float(d.get("cx", 0)) for d in dots]).max() < 2
    )  # rounded µs

    drawing = drawing_of(report, "power-rate")
    lines = [m.get("d", "") for m in drawing.marks if m.get("class") == "line s-ink thick"]
    ends = [[float(step.split()[1]) for step in line[1:].split("L")] for line in lines]
    assert all(on_a_line([r.tflops for r in run.repeats], [end[i] for end in ends]) for i in (0, 1))
    (line,) = [
        m.get("d", "") for m in drawing_of(report, "power-power").marks if m.get("class") == "line s-ink"
    ]
    points = np.array([step.split() for step in line[1:].split("L")], dtype=float)
    assert on_a_line([sample.seconds for sample in run.samples], points[:, 0].tolist())
    assert on_a_line([sample.power_w or 0.0 for sample in run.samples], points[:, 1].tolist())


def test_what_a_user_wrote_is_text(rng: np.random.Generator) -> None:
    ladder = made_up_ladder(rng, sizes=(512,), rungs=2)
    ladder.notes = ["<script>alert(1)</script> & `code`"]
    ladder.device = "H200 <b>"
    text = page_of(ladder, "H200")
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in text
    assert "<b>" not in text


def test_sizes_that_tell_something() -> None:
    assert telling_sizes([1024, 2048, 2049, 4096], get_spec("H200")) == [1024, 2049]
    assert telling_sizes([4096], get_spec("T4")) == [4096]


# -- whose GPU ----------------------------------------------------------------------------------------------


def test_the_gpu_of_the_pictures(rng: np.random.Generator) -> None:
    ladder = made_up_ladder(rng)
    with pytest.raises(UsageError, match=r"NVIDIA Example, which tilewave does not know.*--device"):
        spec_of(ladder, None)
    ladder.sessions[0]["gpu_details"] = {"sms": 17, "clock_mhz": 1234.0, "arch": "sm_90"}
    spec, notes = spec_of(ladder, get_spec("H100"))
    assert (spec.name, spec.sms, spec.clock_mhz) == ("NVIDIA Example", 17, 1234.0)
    assert spec.bandwidth_gb_s == get_spec("H100").bandwidth_gb_s
    assert notes == ["NVIDIA Example is described by the figures of H100, with 17 SMs."]
    ladder.device = "NVIDIA H200"
    assert spec_of(ladder, None) == (get_spec("H200"), [])
    with pytest.raises(UsageError, match="cannot be T4's"):
        spec_of(ladder, get_spec("T4"))


# -- the command --------------------------------------------------------------------------------------------


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


def test_the_command_writes_page_and_pictures(rng: np.random.Generator, tmp_path: Path) -> None:
    ladder = made_up_ladder(rng, sizes=(1024,), rungs=7)
    ladder.device = "NVIDIA H200"
    save_ladder(ladder, tmp_path / "ladder.json")
    save_power_run(made_up_power(rng), tmp_path / "power.json")
    save_profile(made_up_profile(rng), tmp_path / "profile.json")
    out, folder = tmp_path / "r.html", tmp_path / "new" / "pictures"
    code, said = call(
        tmp_path / "ladder.json", "--out", out, "--png", folder,
        "--power", tmp_path / "power.json", "--profile", tmp_path / "profile.json",
    )  # fmt: skip
    assert code == 0, said
    text = out.read_text(encoding="utf-8")
    assert "tilewave report ladder.json --power power.json --profile profile.json" in text
    assert str(tmp_path) not in text
    figures = set(re.findall(r'<figure id="([^"]+)">', text))
    assert (
        {path.stem for path in folder.glob("*.png")}
        == {path.stem for path in folder.glob("*.svg")}
        == figures
    )
    assert f"Wrote {len(figures)} pictures" in said


def test_a_picture_of_its_own_is_whole(rng: np.random.Generator, tmp_path: Path) -> None:
    from matplotlib import image

    from tilewave.lab.report.banks import banks
    from tilewave.lab.report.svg import write_pictures

    drawing = banks(get_spec("H200")).panels[0].drawing
    (path,) = write_pictures([drawing], tmp_path, scale=2)
    pixels = image.imread(path)
    assert pixels.shape[:2] == (round(2 * (drawing.height + 20)), 2 * 380)
    assert (pixels[:10, :, :3] == 1).all()  # a margin of paper
    hot = (
        np.abs(pixels[..., :3] * 255 - [int(LIGHT["hot"][i : i + 2], 16) for i in (1, 3, 5)]).max(axis=2) < 3
    )
    assert hot.mean() > 0.03  # conflicting words in their colour
    dark = (pixels[..., :3] < 0.4).all(axis=2)
    assert 0.003 < dark.mean() < 0.2  # letters
    svg = path.with_suffix(".svg").read_text(encoding="utf-8")
    assert "var(" not in svg
    root = ElementTree.fromstring(svg)
    assert root.find("{*}title").text == drawing.title  # type: ignore[union-attr]


def test_both_schemes_name_every_colour() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert set(re.findall(r"var\(--(\w+)\)", picture_style())) <= LIGHT.keys()


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast of two colours."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_words_on_marks_can_be_read(colours: dict[str, str]) -> None:
    for fill in ("blue", "orange", "green", "purple", "yellow", "hot", "ember"):
        assert contrast(colours["onfill"], colours[fill]) >= 4.5, fill
    for fill in ("sky", "mist"):
        assert contrast(colours["onpale"], colours[fill]) >= 4.5, fill
    for mark in ("blue", "sky", "orange", "green", "purple", "yellow", "hot", "ember", "muted"):
        assert contrast(colours["paper"], colours[mark]) >= 3, mark


def test_a_ladder_that_was_cut_short(rng: np.random.Generator) -> None:
    """Rungs without times, counters or a baseline leave gaps, not errors."""
    ladder = made_up_ladder(rng, sizes=(1024, 2049))
    ladder.device = "NVIDIA H200"
    ladder.baselines = []
    ladder.rows = [
        replace(row, speed=row.speed if row.rung % 2 else None, counted=row.counted if row.rung % 3 else None)
        for row in ladder.rows
        if row.size == 1024 or row.rung > 3
    ]
    report = make_report(ladder, get_spec("H200"))
    text = render(report, "tilewave report", "0")
    dots = [m for m in drawing_of(report, "roofline").marks if m.tag == "circle"]
    assert len(dots) == 3  # rungs 5, 7 and 11 of 2049: timed and counted
    assert len(re.findall(r"f-sky", drawing_of(report, "throughput-2049").markup())) == 4
    assert "cuBLAS" not in text.partition("The rungs: idea")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "cannot read missing.json"),
        (["--device", "H300"], "unknown device 'H300'"),
        ([LADDER, "--device", "T4"], "the ladder was climbed on NVIDIA H200"),
        ([LADDER, "--out", "x.pdf"], "ends in .html"),
        ([LADDER, "--out", "/nowhere/x.html"], "cannot write /nowhere/x.html"),
        ([LADDER, "--power", LADDER], "not a power run"),
        ([LADDER, "--profile", LADDER], "not a profile"),
        ([LADDER, "--png", LADDER], "cannot make the folder"),
        ([LADDER, "--jobs", "0"], "jobs 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = call(*arguments)
    assert code == 2
    assert message in said
    assert not list(tmp_path.iterdir())


def test_an_empty_ladder_is_refused(tmp_path: Path) -> None:
    save_ladder(Ladder("NVIDIA H200", False), tmp_path / "l.json")
    code, said = call(tmp_path / "l.json", "--out", tmp_path / "r.html")
    assert code == 2
    assert "holds no rungs" in said


@pytest.mark.long
def test_without_a_file_the_emulator_climbs(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    code, said = call("--device", "A100", "--out", out)
    assert code == 0, said
    assert "climbing the ladder in the emulator, as A100 would" in said
    text = out.read_text(encoding="utf-8")
    assert "The SGEMM ladder on A100" in text
    assert "No times" in text
    assert re.search(r"What the rungs predict and what was counted: \d+ of \d+ hold", text)
