"""`tilewave accuracy`: what it measures, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewave.bench.accuracy import contenders, measure
from tilewave.bench.accuracy.command import markdown_of
from tilewave.bench.accuracy.picture import draw_accuracy
from tilewave.bench.accuracy.records import load_accuracy
from tilewave.cli import app
from tilewave.emulator.fma import fma
from tilewave.errors import UsageError
from tilewave.runtime.driver import Probe

F = np.float32


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "probe", lambda: Probe(0, None, "no NVIDIA driver on this machine"))
    monkeypatch.setenv("COLUMNS", "100")


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["accuracy", *map(str, arguments)], prog_name="tilewave")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_standard_data_give_table_picture_and_file(tmp_path: Path) -> None:
    path, picture = tmp_path / "run.json", tmp_path / "run.png"
    code, out, err = run(
        *("--data", "uniform,along-k-60", "--k", "64,1024", "--size", 12),
        *("--json", path, "--picture", picture, "--seed", 3),
    )
    assert (code, err) == (0, "")
    assert "uniform: relative error of 12 x 12 products" in out
    assert "recomputed" in out
    assert "no GPU: no NVIDIA driver" in out
    made = load_accuracy(path)
    assert made.data == ["uniform", "along-k-60"]
    assert len(made.points) == 2 * 2 * 5
    (_, longer) = made.series("uniform", "fp16x3")
    (_, plain) = made.series("uniform", "ieee")
    (_, alone) = made.series("uniform", "fp16x3-alone")
    assert longer.relative is not None
    assert plain.relative is not None
    assert alone.relative is not None
    assert longer.relative < plain.relative < alone.relative
    assert [point.recomputed for point in made.series("along-k-60", "fp16x3")] == [1.0, 1.0]
    for point in made.points:
        assert point.in_bounds is not None
        assert point.in_bounds <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = run("--from", path)[1]
    assert again.splitlines()[:5] == out.splitlines()[:5]
    table = run("--from", path, "--markdown")[1]
    assert table.strip() == markdown_of(made)
    assert "| K | ieee | fp16x3 |" in table


def test_equal_seeds_give_equal_figures(tmp_path: Path) -> None:
    outs = [run("--data", "normal", "--k", "50", "--size", 5, "--seed", 9, "--markdown")[1] for _ in range(2)]
    assert outs[0] == outs[1]


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_own_arrays(tmp_path: Path, rng: np.random.Generator, kind: str) -> None:
    a, b = rng.standard_normal((30, 100), F), rng.standard_normal((100, 3), F)
    if kind == "npz":
        files = [tmp_path / "mine.npz"]
        np.savez(files[0], a=a, b=b)
    else:
        files = [tmp_path / "left.npy", tmp_path / "right.npy"]
        for file, array in zip(files, (a, b), strict=True):
            np.save(file, array)
    path = tmp_path / "run.json"
    code, _, err = run(*files, "--size", 10, "--json", path, "--contenders", "fp16x3")
    assert (code, err) == (0, "")
    made = load_accuracy(path)
    assert (made.m, made.n) == (10, 3)
    assert [point.k for point in made.points] == [16, 64, 100]


def test_sampled_rows_and_columns_are_those_of_the_arrays(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((40, 9), F), rng.standard_normal((9, 50), F)
    few_a, few_b = measure.sampled(a, b, 7, 60, seed=1)
    assert few_a.shape == (7, 9)
    assert np.array_equal(few_b, b)
    assert all(any(np.array_equal(row, other) for other in a) for row in few_a)


def test_the_chain_is_one_of_fused_sums(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((6, 200), F), rng.standard_normal((200, 7), F)
    total = np.zeros((6, 7), F)
    for k in range(200):
        x, y = np.broadcast_arrays(a[:, k, None], b[None, k])
        total = fma(x.copy(), y.copy(), total)
    assert np.count_nonzero(contenders.chain(a, b) != total) <= 1


def test_overflow_and_zeros_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code, out, _ = run("--data", "1e30-both", "--k", "8", "--size", 4, "--json", path)
    assert code == 0
    assert "overflow" in out
    assert all(point.relative is None for point in load_accuracy(path).points)
    with pytest.raises(UsageError, match="holds no errors to draw"):
        draw_accuracy(load_accuracy(path), tmp_path / "p.png")


def test_a_budget_ends_the_run() -> None:
    code, out, _ = run("--data", "normal", "--k", "16,1048576", "--size", 8, "--budget", 5)
    assert code == 0
    assert "5 of 10 points did not fit into the budget" in out


def test_a_contender_that_fails_costs_no_other_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points are in the file as they come; who fails is told of, and the exit code says so."""
    path, kept = tmp_path / "run.json", []
    real = contenders.models()

    def spoilt(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        kept.append(len(load_accuracy(path).points))
        if a.shape[1] > 16:
            raise RuntimeError("an illegal address")
        return real["tf32"].multiply(a, b)

    found = {"ieee": real["ieee"], "bad": contenders.Contender("bad", "tf32", spoilt)}
    monkeypatch.setattr(contenders, "models", lambda: found)
    code, out, err = run("--data", "normal", "--k", "16,64,256", "--size", 8, "--json", path)
    assert code == 1
    assert "an illegal address" in out
    assert "bad failed and was left out from there on: normal, K = 64: RuntimeError" in " ".join(err.split())
    assert [point.contender for point in load_accuracy(path).points] == ["ieee", "bad", "ieee", "ieee"]
    assert kept == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "gauss"), "there is no data set 'gauss'; accepted are normal, uniform"),
        (("--k", "0"), "k '0': whole numbers from 1"),
        (("--k", "a"), "k 'a': whole numbers from 1"),
        (("--size", "0"), "size 0: 1 or more"),
        (("--budget", "0"), "budget 0: a positive number"),
        (("--seed", "-1"), "seed -1: 0 or more"),
        (("--contenders", "cublas"), "there is no contender 'cublas' here; accepted are ieee, fp16x3"),
        (("nowhere.npz",), "cannot read nowhere.npz"),
        (("one.npy",), "cannot take one.npy: accepted are one .npz that holds a and b, or two .npy"),
        (("one.npz", "--data", "normal"), "either arrays or --data"),
        (("--from", "nowhere.json"), "cannot read nowhere.json"),
        (("--from", "x.json", "--k", "5"), "--from shows a run that was made"),
        (("--data", "normal", "--k", "8", "--size", "2", "--picture", "p.gif"), "ends in .png or .svg"),
        (
            ("--data", "normal", "--k", "8", "--size", "2", "--json", "/proc/no/a.json"),
            "cannot write /proc/no",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    code, _, err = run(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_arrays_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def refused(words: str, **arrays: np.ndarray) -> None:
        np.savez(tmp_path / "x.npz", **arrays)
        code, _, err = run(tmp_path / "x.npz")
        assert (code, err.count("\n")) == (2, 1)
        assert words in err

    ones = np.ones((3, 4), F)
    refused("holds a, c; accepted are", a=ones, c=ones)
    refused("a is float64 of shape (3, 4); accepted are float32 matrices (cast:", a=np.ones((3, 4)), b=ones)
    refused("b is float32 of shape (4,); accepted are float32 matrices", a=ones, b=np.ones(4, F))
    refused("a has shape (3, 4) and b (3, 4)", a=ones, b=ones)
    np.savez(tmp_path / "y.npz", a=ones, b=ones.T)
    code, _, err = run(tmp_path / "y.npz", "--k", "5")
    assert (code, "--k asks for 5; these arrays have K = 4" in err) == (2, True)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    for text, why in (
        ('{"format": 1}', "its format is not 'tilewave accuracy 1'"),
        ("{}", "its format is not 'tilewave accuracy 1'"),
        ("[]", "its format is not 'tilewave accuracy 1'"),
        ("{", "Expecting"),
        (json.dumps({"format": "tilewave accuracy 1"}), "it lacks 'points'"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=f"is not a file of `tilewave accuracy --json`: {why}"):
            load_accuracy(path)


def test_damaged_files_of_arrays_are_one_line(tmp_path: Path, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((6, 8), dtype=np.float32), rng.standard_normal((8, 5), dtype=np.float32)
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    np.savez_compressed(good, a=a, b=b)
    whole = good.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:length])
        code, _, said = run(bad)
        assert code == 2, length
        assert said.startswith(f"tilewave: cannot read {bad}: ")
        assert len(said.splitlines()) == 1
