"""Ten fresh processes give one hash: the bits of a product hang on nothing that differs between runs."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tilewave.device import DeviceSpec

pytestmark = pytest.mark.gpu

PROCESSES = 10
SIDE_BY_SIDE = 5

PROGRAM = """
import hashlib, json, sys
import numpy as np
import tilewave
from tilewave.precision import error_in_mode_bounds

seed, order = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(seed)

def draw(*shape):
    return rng.standard_normal(shape, np.float32)

products = {
    "large": (draw(1500, 700), draw(700, 1300), {}),
    "with edges": (draw(2049, 300), draw(300, 1030), {}),
    "deep": (draw(70, 40_000), draw(40_000, 90), {}),
    "cut": (draw(300, 5000), draw(5000, 200), {"schedule": "split_k:5"}),
    "walked": (draw(600, 900), draw(900, 700), {"schedule": "stream_k"}),
    "invariant": (draw(33, 2000), draw(2000, 257), {"batch_invariant": True}),
    "row": (draw(1, 5000), draw(5000, 777), {}),
    "tiny": (draw(500, 7, 9), draw(500, 9, 5), {}),
    "few SMs": (draw(500, 600), draw(600, 400), {"max_sms": 7}),
    "mode": (draw(512, 2000), draw(2000, 384), {"precision": "fp16x3", "batch_invariant": True}),
    "mode, large": (draw(1024, 1024), draw(1024, 1024), {"precision": "fp16x3"}),
}
group = [(draw(m, k), draw(k, n)) for m, n, k in rng.integers(1, 150, (40, 3))]
if not json.loads(sys.argv[3]):
    products = {name: one for name, one in products.items() if not name.startswith("mode")}
names = list(products)
found, errors = {}, {}
for name in names[order:] + names[:order]:  # what ran before must not matter either
    a, b, options = products[name]
    c = tilewave.gemm(a, b, **options)
    found[name] = hashlib.sha256(c.tobytes()).hexdigest()
    if order == 0:
        for x, y, z in zip(a, b, c) if a.ndim == 3 else [(a, b, c)]:
            mode = "fp16x3" if "precision" in options else "ieee"
            errors[name] = max(errors.get(name, 0.0), float(error_in_mode_bounds(mode, z, x, y)))
hashed = hashlib.sha256()
for c in tilewave.grouped_gemm(group):
    hashed.update(c.tobytes())
found["group"] = hashed.hexdigest()
print(json.dumps({"found": found, "errors": errors}))
"""


def test_ten_processes_give_one_hash(spec: DeviceSpec, rng: np.random.Generator, tmp_path: Path) -> None:
    """Of products of every kind; in each process another one comes first. The first checks the answers."""
    program = tmp_path / "products.py"
    program.write_text(PROGRAM)
    has_mode = json.dumps(spec.compute_capability == (9, 0))
    seed = str(rng.integers(2**32))

    def run(number: int) -> dict[str, dict[str, str]]:
        command = [sys.executable, str(program), seed, str(number), has_mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        answer: dict[str, dict[str, str]] = json.loads(done.stdout)
        return answer

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        answers = [run(0), *pool.map(run, range(1, PROCESSES))]
    errors = answers[0]["errors"]
    assert errors
    assert all(error <= 1 for error in errors.values()), errors
    for number, answer in enumerate(answers):
        assert answer["found"] == answers[0]["found"], f"process {number}"
