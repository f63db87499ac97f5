"""A run of many products: budget, resuming, files, tables, pictures, and what changed between two runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tilewave.bench.products.command import save_run
from tilewave.bench.products.compare import LEAST_CHANGE, compare_runs
from tilewave.bench.products.picture import draw
from tilewave.bench.products.records import COLD, WARM, BenchRun, Reading, Result, load_run
from tilewave.bench.products.run import check_same, run_products
from tilewave.bench.products.table import LONGEST_KERNEL, pair, print_run, ratios, summary
from tilewave.bench.suite import SuiteProduct, squares
from tilewave.cli import app
from tilewave.errors import UsageError
from tilewave.kernels.ship import every_kernel

EMPTY = BenchRun(
    device="H200",
    mode=COLD,
    contenders=("ours", "torch"),
    names={"ours": "tilewave", "torch": "cuBLAS through torch 9"},
    peak_tflops=66.9,
    bandwidth_gb_s=4800.0,
    l2_bytes=50 * 2**20,
    launch_floor_us=1.2,
    environment={"commit": "abc", "driver": "580"},
)


def measured(product: SuiteProduct, ours: float = 10.0, torch: float = 12.0, noise: float = 0.001) -> Result:
    steps = [1 + noise * place for place in (-2, 1, 0, 2, -1)]
    return Result(
        product,
        COLD,
        3,
        True,
        (
            Reading("ours", tuple(ours * one for one in steps), 5.0, 0.1, "all", "tile data-parallel", 9.0,
                    (1980.0,), (500.0,), ("power cap",)),
            Reading("torch", tuple(torch * one for one in steps), 17.0, 0.2, "all"),
        ),
        ("noisy: ours varies by 7%",),
    )  # fmt: skip


def run_of(products: list[SuiteProduct], **changes: Any) -> BenchRun:
    results = tuple(measured(product, 10.0 + place) for place, product in enumerate(products))
    return replace(EMPTY, results=results, **changes)


def test_a_file_holds_all_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = run_of(squares()[:3], notes=("a note",))
    save_run(run, path)
    assert load_run(path) == run
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "no file of `tilewave bench`"),
        ("[]", "no file of `tilewave bench`"),
        ("{", "cannot read"),
        ('{"format": "tilewave bench 1"}', "damaged"),
        ('{"format": "tilewave bench 2"}', "its format is not"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        load_run(path)


class Measuring:
    """Measures with a clock of its own; every product takes as many seconds as its name says."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.done: list[str] = []
        self.kept: list[int] = []

    def now(self) -> float:
        return self.seconds

    def __call__(self, product: SuiteProduct) -> Result:
        self.seconds += float(product.name.partition("s")[0])
        self.done.append(product.name)
        return measured(product)

    def run(self, products: list[SuiteProduct], run: BenchRun, budget: float | None) -> tuple[BenchRun, int]:
        return run_products(
            products,
            run,
            self,
            budget_s=budget,
            keep=lambda now: self.kept.append(len(now.results)),
            show=lambda result: None,
            now=self.now,
        )


def named(*names: str) -> list[SuiteProduct]:
    return [SuiteProduct(name, "t", place + 1, 2, 3) for place, name in enumerate(names)]


def test_the_budget_is_kept_and_a_later_run_goes_on() -> None:
    products = named("3s", "2s", "3sb", "4s", "1s")
    first = Measuring()
    run, left = first.run(products, EMPTY, 10.0)
    assert first.done == ["3s", "2s", "3sb"]  # the fourth might have taken 3 s more than the 2 that are left
    assert first.seconds <= 10
    assert left == 2
    assert first.kept == [1, 2, 3]  # after every product
    second = Measuring()
    run, left = second.run(products, run, None)
    assert second.done == ["4s", "1s"]
    assert left == 0
    assert [one.product.name for one in run.results] == ["3s", "2s", "3sb", "4s", "1s"]


def test_nothing_starts_without_budget_and_renamed_products_are_not_measured_twice() -> None:
    measuring = Measuring()
    assert measuring.run(named("1s"), EMPTY, -1.0) == (EMPTY, 1)
    run, _ = measuring.run(named("1s"), EMPTY, 5.0)
    assert measuring.run([replace(named("1s")[0], name="other")], run, 5.0) == (run, 0)
    transposed = replace(named("1s")[0], transposed_a=True)
    assert len(measuring.run([transposed], run, 5.0)[0].results) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": WARM}, "in mode warm, this run would be in mode cold"),
        ({"device": "T4"}, "on T4"),
        ({"contenders": ("ours",)}, "with contenders ours,"),
        ({"environment": {"commit": "def"}}, "at commit def"),
    ],
)
def test_a_file_of_other_conditions_is_not_added_to(change: dict[str, Any], words: str) -> None:
    check_same(EMPTY, EMPTY)
    with pytest.raises(UsageError, match=words):
        check_same(replace(EMPTY, **change), EMPTY)


def text_of(run: BenchRun, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_run(run, console)
    return console.export_text()


def test_the_table_shows_times_ratios_rejections_and_flags() -> None:
    run = run_of(squares()[:2])
    bad = replace(run.results[1].readings[0], rejected="wrong by 7")
    run = replace(
        run, results=(run.results[0], replace(run.results[1], readings=(bad, run.results[1].readings[1])))
    )
    text = text_of(run)
    for words in ("n256*", "256 x 256 x 256 NN", "10.0 ±0.2%", "1.200", "5.0 / 17.0", "rejected",
                  "n257: ours rejected: wrong by 7", "* n256: noisy: ours varies by 7%"):  # fmt: skip
        assert words in text
    assert "1 products: ours is 1.200 times as fast as torch" in text
    assert list(ratios(run)) == ["n256"]


def test_a_narrow_terminal_shows_every_kernel_s_name_in_one_piece() -> None:
    """Columns of an ordinary terminal: names were cut into pieces of eight characters there."""
    names = sorted((instance.name for instance in every_kernel()), key=len)
    assert len(names[-1]) == LONGEST_KERNEL
    slow = measured(squares()[0], 164_423.1)
    first, other = slow.readings
    slow = replace(slow, readings=(replace(first, plan=f"{names[-1]} split-K 132 ways"), other))
    run = replace(EMPTY, results=(slow,))
    table = text_of(run, 80).partition("A terminal of 120 columns")[0]
    assert max(map(len, table.splitlines())) <= 80
    for words in (f" {names[-1]} ", " split-K 132 ways ", " 164423.1 ", " 256 x 256 x 256 NN ", " ±0.2% "):
        assert words in table
    assert "5.0 / 17.0" not in table


def test_without_a_baseline_schedules_are_compared_among_themselves() -> None:
    assert pair(replace(EMPTY, contenders=("ours", "ours:split_k:2"))) == ("ours:split_k:2", "ours")
    assert pair(replace(EMPTY, contenders=("ours",))) == ("ours", None)
    assert pair(replace(EMPTY, contenders=("ours", "cublaslt", "cupy"))) == ("ours", "cupy")
    assert pair(replace(EMPTY, contenders=("torch",))) == (None, "torch")
    assert text_of(replace(run_of(squares()[:1]), contenders=("torch",)))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn_and_is_the_same_twice(tmp_path: Path, suffix: str) -> None:
    run = run_of([*squares()[:4], SuiteProduct("x", "odd", 3, 5, 7, batch=9)])
    found = []
    for name in "ab":
        path = tmp_path / f"{name}{suffix}"
        draw(run, path)
        found.append(path.read_bytes())
    assert found[0] == found[1]
    assert len(found[0]) > 10_000
    if suffix == ".svg":
        shown = found[0].decode()
        assert shown.count("<use ") > 10
    draw(replace(run, contenders=("torch",)), tmp_path / f"single{suffix}")
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        draw(run, tmp_path / "x.jpg")
    with pytest.raises(UsageError, match="no readings"):
        draw(EMPTY, tmp_path / "x.png")
    with pytest.raises(UsageError, match="cannot write"):
        draw(run, tmp_path / "no" / "x.png")


def test_an_unchanged_run_has_no_changes(rng: np.random.Generator) -> None:
    run = run_of(squares()[:5])
    wobbled = [
        replace(
            result,
            readings=tuple(
                replace(
                    one, rounds_us=tuple(t * float(1 + 0.003 * rng.standard_normal()) for t in one.rounds_us)
                )
                for one in result.readings
            ),
        )
        for result in run.results
    ]
    for other in (run, replace(run, results=tuple(wobbled))):
        assert not any(one.beyond_noise for one in compare_runs(run, other).changes)


def test_a_real_change_is_found_and_a_faster_gpu_is_none() -> None:
    before = run_of(squares()[:3])
    quicker = [
        measured(one.product, 0.9 * (10 + place), 0.9 * 12) for place, one in enumerate(before.results)
    ]
    quicker[1] = measured(quicker[1].product, 0.9 * 11 / 1.2, 0.9 * 12)  # this one is faster by itself too
    found = compare_runs(before, replace(before, results=tuple(quicker)))
    ours = {one.product: one for one in found.changes if one.contender == "ours"}
    assert [name for name, one in ours.items() if one.beyond_noise] == ["n257"]
    assert all(one.ratio == pytest.approx(1) for name, one in ours.items() if name != "n257")
    calm = [measured(one.product, 10 + place, 12) for place, one in enumerate(before.results)]
    calm[1] = measured(calm[1].product, 11 / 1.2, 12)
    found = compare_runs(before, replace(before, results=tuple(calm)))
    changed = [one for one in found.changes if one.beyond_noise]
    assert [(one.product, one.contender) for one in changed] == [("n257", "ours")]
    assert changed[0].ratio == pytest.approx(1.2)
    assert changed[0].measure == "speed in units of torch"


def test_changes_within_the_spread_or_the_least_change_are_noise() -> None:
    product = squares()[0]
    before = replace(EMPTY, results=(measured(product, 10, 12, noise=0.03),))
    after = replace(EMPTY, results=(measured(product, 10.5, 12, noise=0.03),))
    (ours, _) = compare_runs(before, replace(after, names={"ours": "tilewave", "torch": "another"})).changes
    assert not ours.beyond_noise
    assert ours.measure == "products a second"
    steady = replace(EMPTY, results=(measured(product, 10, 12, noise=0),))
    for share, expected in ((LEAST_CHANGE / 2, False), (2 * LEAST_CHANGE, True)):
        other = replace(EMPTY, results=(measured(product, 10 * (1 + share), 12, noise=0),))
        assert compare_runs(steady, other).changes[0].beyond_noise == expected


def test_what_only_one_run_has_and_other_conditions_are_told() -> None:
    before, after = run_of(squares()[:2]), run_of(squares()[1:3], environment={"commit": "def"})
    found = compare_runs(before, after)
    assert (found.only_before, found.only_after) == (("n256",), ("n512",))
    assert "commit differs: abc before, def after" in found.notes
    for change, words in (({"device": "T4"}, "GPUs, H200 and T4"), ({"mode": WARM}, "modes, cold and warm")):
        with pytest.raises(UsageError, match=words):
            compare_runs(before, replace(after, **change))


def tilewave(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_shows_compares_and_refuses(tmp_path: Path) -> None:
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    save_run(run_of(squares()[:2]), one)
    save_run(replace(run_of(squares()[:2]), results=(measured(squares()[0], 5.0),)), other)
    shown = tilewave("--from", one, "--picture", tmp_path / "a.png")
    assert shown.exit_code == 0
    assert "256 x 256 x 256" in shown.output
    assert (tmp_path / "a.png").exists()
    compared = tilewave("compare", one, other)
    assert compared.exit_code == 0
    assert "Changed beyond the noise" in compared.output
    assert "1 of 2 readings changed, 1 did not." in compared.output
    assert "Only before: n257." in compared.output
    for arguments, words in (
        (("compare", one), "compare takes two files"),
        (("1,2",), "is no shape"),
        (("1,2,3", "--mode", "hot"), "accepted are cold and warm"),
        (("1,2,3", "--rounds", "0"), "1 or more"),
        (("1,2,3", "--budget", "-1"), "positive number of seconds"),
        (("1,2,3", "--from", one), "shapes go without it"),
        (("1,2,3", "--json", tmp_path / "no" / "x.json"), "cannot write"),
    ):
        refused = tilewave(*arguments)
        assert refused.exit_code == 2, refused.output
        assert words in refused.output


def test_the_summary_of_nothing_is_nothing() -> None:
    assert list(summary(EMPTY)) == []
    assert json.loads(json.dumps(EMPTY.to_json()))["results"] == []
