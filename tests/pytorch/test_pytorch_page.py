"""docs/pytorch.md: every block runs and prints what it says, and what it names exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import tilewave.torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from snippets import ROOT, blocks, run_in_order

PAGE = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")


def test_the_blocks_run_and_print_what_they_say() -> None:
    assert run_in_order(blocks("docs/pytorch.md", gpu=False)) == 3


def test_operators_and_public_names_are_those_of_the_code() -> None:
    for name in ("gemm", "gemm_with_preactivation", "gemm_out"):
        assert name in PAGE
        assert hasattr(torch.ops.tilewave, name)
    for name in tilewave.torch.__all__:
        assert f"tilewave.torch.{name}" in PAGE


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
