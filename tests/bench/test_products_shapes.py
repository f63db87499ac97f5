"""Shapes from words, CSV files and suites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewave.bench.products.shapes import LAYOUTS, parse_shape, products_of, read_csv, write_csv
from tilewave.bench.suite import SuiteProduct, workloads
from tilewave.errors import UsageError


def test_words_become_products(rng: np.random.Generator) -> None:
    m, n, k, batch = (int(size) for size in rng.integers(1, 5000, 4))
    for layouts in LAYOUTS:
        made = parse_shape(f"{m}, {n},{k},{batch},{layouts.lower()}")
        assert (made.m, made.n, made.k, made.batch) == (m, n, k, batch)
        assert (made.transposed_a, made.transposed_b) == (layouts[0] == "T", layouts[1] == "T")
        assert parse_shape(f"{m},{n},{k},{layouts}").batch == 1
    assert parse_shape(f"{m},{n},{k}") == parse_shape(f"{m},{n},{k},NN")
    assert parse_shape("3,4,5,6").flops == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize(
    "word",
    ["", "12", "1,2", "1,2,3,4,5", "1,2,3,NX", "0,2,3", "-1,2,3", "1,2,x", "1.5,2,3", "1,2,3,NN,4", "suite",
     "3000000000,1,1", "1,2,3,", "٣,1,1"],
)  # fmt: skip
def test_what_is_no_shape_is_refused(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        products_of([word])
    assert "accepted" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_suites_files_and_words_mix_without_repeats(tmp_path: Path) -> None:
    path = tmp_path / "mine.CSV"
    path.write_text("K,M,N\n7,5,6\n", encoding="utf-8")
    found = products_of(["workloads", str(path), "squares", "5,6,8", "workloads"])
    assert len(found) == 40 + 1 + 21 + 1
    assert str(found[40]) == "5 x 6 x 7 NN"
    assert found[:40] == workloads()


def test_a_written_file_is_read_as_the_same_products(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text(write_csv(workloads(), range(40)), encoding="utf-8")
    assert read_csv(path) == workloads()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("M,N\n1,2\n", "has no column K"),
        ("", "has no column M"),
        ("M,N,K\n1,2,x\n", "line 2: size 'x'"),
        ("M,N,K\n1,2,3\n4,5\n", "line 3: size ''"),
        ("M,N,K,transA\n1,2,3,C\n", "layout 'C'; accepted are N and T"),
        ("M,N,K,batch\n1,2,3,0\n", "size '0'"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        read_csv(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_csv(tmp_path / "missing.csv")


def test_two_products_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("id,M,N,K\nx,1,2,3\nx,1,2,4\n", encoding="utf-8")
    with pytest.raises(UsageError, match="called 'x'"):
        products_of([str(path)])


def test_bytes_count_a_shared_matrix_once() -> None:
    one = SuiteProduct("s", "t", 3, 5, 7, batch=11, shared_b=True)
    assert one.nbytes == 4 * (11 * 21 + 35 + 11 * 15)
