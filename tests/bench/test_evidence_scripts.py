"""Scripts that measure on a GPU, without one: what they say of faults, and what they go on from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import compile_kernels  # noqa: E402
import fp16x3_bits  # noqa: E402
import groups  # noqa: E402
import large_products  # noqa: E402
import large_products_page  # noqa: E402
import new_loops  # noqa: E402
from tilewave.kernels import fp16x3  # noqa: E402
from tilewave.kernels.ship import every_kernel  # noqa: E402


def test_every_kernel_is_compiled_ahead() -> None:
    found = compile_kernels.wanted("sm_90")
    names = {(instance.name, arch) for instance, arch in found}
    assert len(names) == len(found)
    assert {(instance.name, "sm_90") for instance in every_kernel()} <= names
    mode = {(instance.name, fp16x3.ARCHITECTURE) for instance in fp16x3.every_fp16x3_instance()}
    assert mode <= names
    assert not any(arch == fp16x3.ARCHITECTURE for _, arch in compile_kernels.wanted("sm_80"))


def test_a_kernel_that_cannot_be_compiled_is_told() -> None:
    (tile,) = [one for one in every_kernel() if one.name == "large_tile_64x64_nn_16"]
    assert "no_such_arch" in compile_kernels.compile_one(tile, "no_such_arch")


def group(errors: dict[str, float], refused: dict[str, str]) -> dict[str, Any]:
    rows = {
        name: {"us": 10.0, "all": [10.0], "predicted_us": None, "worst_error": error}
        for name, error in errors.items()
    }
    return {
        "flops": 1e9, "host_us": 50.0, "refused": refused, "error_limit": 1e-6, "contenders": rows,
    }  # fmt: skip


def test_groups_tell_what_is_wrong_or_refused() -> None:
    good = group({"one launch": 2e-7}, {})
    assert groups.faults(good) == []
    assert "one launch" in "\n".join(groups.lines("g", good))
    bad = group({"one launch": float("inf"), "a gemm each": float("nan")}, {"cuBLAS": "no memory"})
    assert [fault.partition(":")[0] for fault in groups.faults(bad)] == [
        "cuBLAS",
        "one launch",
        "a gemm each",
    ]
    lost = {"error": "DeviceError: an illegal address"}
    assert groups.faults(lost) == ["DeviceError: an illegal address"]
    assert "FAULT DeviceError" in "\n".join(groups.lines("g", lost))


def test_large_products_go_on_from_the_same_machine_code_only() -> None:
    assert not large_products.is_done(None, "a")
    assert not large_products.is_done({"wrong": []}, "a")  # of a time before digests
    assert not large_products.is_done({"digest": "b"}, "a")
    assert not large_products.is_done({"digest": "a", "error": "no memory"}, "a")
    assert large_products.is_done({"digest": "a"}, "a")
    failed = {"error": "MemoryError: no memory", "wrong": ["failed"], "digest": "a"}
    assert "FAILED" in large_products.lines("nn 1x1x1", failed)[0]
    assert "nn 1x1x1" not in large_products_page.table({"products": {"nn 1x1x1": failed}})


def test_an_empty_cache_has_the_programs_alone(tmp_path: Path) -> None:
    cache, empty = tmp_path / "cache", tmp_path / "empty"
    cache.mkdir()
    empty.mkdir()
    for name in ("one.program", "two.program", "one.loop", "verdict"):
        (cache / name).write_text(name)
    new_loops.link_programs(cache, empty)
    assert sorted(os.listdir(empty)) == ["one.program", "two.program"]
    assert not any(path.is_symlink() for path in empty.iterdir())  # which the cache does not follow
    (empty / "one.program").unlink()
    assert (cache / "one.program").read_text() == "one.program"


def test_a_product_that_fails_costs_no_other_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """benchmarks/fp16x3_bits.py: every K is written when it is done; the exit code tells of failures."""
    path = tmp_path / "bits.json"
    seen: list[int] = []

    def compare(name: str, kind: str, k: int, rng: Any) -> dict[str, Any]:
        if path.exists():
            seen.append(len(json.loads(path.read_text())["products"]))
        if (name, k) == ("normal", 16):
            raise RuntimeError("an illegal address")
        same = {"kept": 4, "equal": 4, "apart_in_bounds": 0.0, "gpu_in_bounds": 0.5, "model_in_bounds": 0.5}
        return {"data": name, "sums": kind, "k": k, **same}

    monkeypatch.setattr(fp16x3_bits, "compare", compare)
    monkeypatch.setattr(fp16x3_bits, "LENGTHS", (1, 16))
    monkeypatch.setattr(fp16x3_bits, "Device", lambda: None)
    monkeypatch.setattr(sys, "argv", ["fp16x3_bits.py", "--out", str(path)])
    assert fp16x3_bits.main() == 1
    record = json.loads(path.read_text())
    each = len(fp16x3_bits.DATA_SETS) * len(fp16x3_bits.KINDS)
    assert len(record["products"]) == 2 * each - len(fp16x3_bits.KINDS)
    assert all(name.startswith("normal") for name in record["failed"])
    assert record["left_out"] == 0
    assert set(seen) == {each}
    assert "an illegal address" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["fp16x3_bits.py", "--out", str(path), "--budget", "0"])
    fp16x3_bits.main()
    assert json.loads(path.read_text())["left_out"] == 2 * each
