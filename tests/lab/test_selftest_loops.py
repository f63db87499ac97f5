"""`tilewave selftest` of the register-file pass: a wrong loop is found, in the interpreter and on a GPU."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.compiler.register_pass import OFF_SWITCH, PassOutcome
from tilewave.compiler.sass.flow import steady_loop
from tilewave.compiler.sass.patch import with_words
from tilewave.device import get_spec
from tilewave.emulator.sass import Cubin, decode_function
from tilewave.errors import DeviceError
from tilewave.kernels.families import large_tile
from tilewave.kernels.new_loops import instance_refusal, outcome_for
from tilewave.lab import selftest_command, selftest_loops
from tilewave.lab.ladder import Silent
from tilewave.lab.selftest_loops import candidates, run_loops
from tilewave.lab.workers import Budget
from tilewave.planner.schedules import DATA_PARALLEL
from tilewave.runtime import loop_products
from tilewave.runtime.driver import Probe
from tilewave.runtime.loop_check import Verdict
from tilewave.runtime.loop_products import Numbers

SPEC = get_spec("H200")
SMALLEST = next(one for one in large_tile.instances() if one.name == "large_tile_64x64_tn_16")
OPTIONS: dict[str, Any] = {"budget": Budget(None), "progress": Silent()}


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest kernel is the only one that there is."""
    monkeypatch.delenv(OFF_SWITCH, raising=False)
    monkeypatch.setattr(selftest_loops, "candidates", lambda spec: [SMALLEST])


def change(kind: str, rng: np.random.Generator, *given: Any) -> PassOutcome:
    """The pass's outcome with one change: a multiply-add that never happens, or a wait that is forgotten."""
    new, symbol = outcome_for(*given), given[2].symbol
    assert new.cubin is not None
    cubin = Cubin(new.cubin)
    code = decode_function(cubin.function(symbol), 90)
    found = steady_loop(code, 1024)
    assert not isinstance(found, str)
    # The first instruction of the loop waits for everything, and so does the branch: they are left alone.
    inside = range(found[0] + 1, found[1])
    if kind == "skipped":
        at = int(rng.choice([i for i in inside if code[i].opcode == "FFMA"]))
        word = code[at].word & ~(0xF << 12) | 0xF << 12
    else:
        # Multiply-adds that wait are the first ones of slices: for their fragments.
        at = int(rng.choice([i for i in inside if code[i].opcode == "FFMA" and code[i].control.wait_mask]))
        word = replace(code[at].control, wait_mask=0).into_word(code[at].word)
    return replace(new, cubin=with_words(cubin, symbol, at, [word], 0).image)


def test_a_right_loop_passes_and_a_wrong_one_does_not(
    smallest: None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(rng.integers(2**32))
    # One tile and some rounds of the loop: the products of the check proper take longer.
    product = loop_products._product(SMALLEST, rng, Numbers.RANDOM, DATA_PARALLEL, 64, 64, 44, 2)
    monkeypatch.setattr(selftest_loops, "loop_products", lambda *_, **__: [product])
    (outcome,), left_out, notes = run_loops(SPEC, seed=seed, gpu=None, **OPTIONS)
    assert (outcome.findings, left_out, notes) == ((), [], [])
    assert (outcome.kernel, outcome.family) == (SMALLEST.name, "new loops")
    for kind in ("skipped", "forgotten"):
        monkeypatch.setattr(selftest_loops, "outcome_for", functools.partial(change, kind, rng))
        (outcome,), _, _ = run_loops(SPEC, seed=seed, gpu=None, **OPTIONS)
        (finding,) = outcome.findings
        wanted = "differ from the compiler's|hazard" if kind == "skipped" else "read before wait"
        assert re.search(wanted, finding)


def test_what_is_not_tested_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF_SWITCH, "0")
    assert run_loops(SPEC, seed=1, gpu=None, **OPTIONS) == (
        [],
        [],
        [f"the register-file pass is switched off by {OFF_SWITCH}=0"],
    )
    monkeypatch.delenv(OFF_SWITCH)
    gpu: Any = SimpleNamespace()
    _, _, (note,) = run_loops(get_spec("A100"), seed=1, gpu=gpu, **OPTIONS)
    assert "the register file of sm_80 was not measured" in note
    monkeypatch.setattr(selftest_loops, "compile_instance", lambda *_, **__: (None, None))
    monkeypatch.setattr(selftest_loops, "outcome_for", lambda *_: PassOutcome(None, "it is too long"))
    outcomes, _, notes = run_loops(SPEC, seed=1, gpu=None, **OPTIONS)
    assert outcomes == []
    assert [note.partition(" keeps ")[2] for note in notes] == ["the compiler's loop: it is too long"]


def test_every_kernel_is_tested_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fresh data, whatever the cache remembers; a lost GPU is a finding."""
    monkeypatch.delenv(OFF_SWITCH, raising=False)
    seen = []

    def check(
        instance: Any, old: bytes, new: bytes, kernel: Any, spec: Any, handle: int, seed: int
    ) -> Verdict:
        seen.append((instance.name, seed))
        if instance == SMALLEST:
            raise DeviceError("lost")
        return Verdict("128x128" not in instance.name, "words")

    program = SimpleNamespace(cubin=b"old")
    monkeypatch.setattr(
        selftest_loops, "compile_instance", lambda *_, **__: (program, SimpleNamespace(symbol="k"))
    )
    monkeypatch.setattr(selftest_loops, "outcome_for", lambda *_: PassOutcome(b"new", None))
    monkeypatch.setattr("tilewave.runtime.loop_choice.check_on_gpu", check)
    monkeypatch.setattr("tilewave.runtime.kernels.gpu_state", lambda ordinal: SimpleNamespace(handle=5))
    gpu: Any = SimpleNamespace(ordinal=0, activate=lambda: None)
    outcomes, left_out, _ = run_loops(SPEC, seed=7, gpu=gpu, **OPTIONS)
    expected = [one.name for one in large_tile.instances() if instance_refusal(one) is None]
    assert sorted(name for name, _ in seen) == sorted(expected)
    assert len(expected) == sum(name.endswith("_16") for name in expected) + 6
    assert {seed for _, seed in seen} == {7}
    assert left_out == []
    for outcome in outcomes:
        wanted = {SMALLEST.name: ("failed: lost",)}.get(
            outcome.kernel, ("words",) if "128x128" in outcome.kernel else ()
        )
        assert outcome.findings == wanted
    outcomes, left_out, _ = run_loops(SPEC, seed=7, gpu=gpu, most=4, **OPTIONS)
    assert (len(outcomes), left_out) == (4, [])
    outcomes, left_out, _ = run_loops(SPEC, seed=7, gpu=gpu, budget=Budget(0), progress=Silent())
    assert outcomes == []
    assert len(left_out) == len(candidates(SPEC)) == len(expected)


def test_the_command(smallest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_command, "probe", lambda: Probe(0, None, "no NVIDIA driver here"))
    monkeypatch.setattr(selftest_command, "run_library", lambda *_, **__: ([], []))
    monkeypatch.setattr(selftest_loops, "interpreted", lambda *_: Verdict(True, "same"))
    result = CliRunner().invoke(app, ["selftest", "--library", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert re.search(r"^new loops +1 kernel, right, bits as by the compiler's", result.output, re.MULTILINE)
    monkeypatch.setattr(selftest_loops, "interpreted", lambda *_: Verdict(False, "1 of 4 elements differ"))
    result = CliRunner().invoke(app, ["selftest", "--library", "--jobs", "1"])
    assert result.exit_code == 1
    assert re.search(r"^new loops +1 kernel, WRONG in 1 of them$", result.output, re.MULTILINE)
    assert f"library's kernel {SMALLEST.name}, beside the compiler's loop" in result.output
    assert "1 of 4 elements differ" in result.output
