"""A plan in words: what it says for a person, and what could be changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gemm_fakes import FAKES, product

import tilewave
from tilewave.device import get_spec
from tilewave.planner.gemm import GemmPlanner, PlanOptions, explain_plan
from tilewave.problem import GemmProblem, MatrixLayout

H200 = get_spec("H200")


def explained(problem: GemmProblem, options: PlanOptions | None = None) -> str:
    return explain_plan(GemmPlanner(H200, FAKES).plan(problem, options or PlanOptions()))


def test_it_says_what_runs_where_and_for_how_long() -> None:
    plan = GemmPlanner(H200, FAKES).plan(product(4096, 4096, 4096))
    text = explain_plan(plan)
    for part in (
        "4096 x 4096 x 4096 on H200",
        str(plan.instance),
        str(plan.schedule),
        f"{plan.blocks:,} blocks of {plan.instance.threads} threads",
        f"Predicted {plan.estimate.total:.4g} us: arithmetic on the busiest SM binds",
        "A is read 16 bytes at a time along K",
        "B is read 16 bytes at a time along N",
        f"Turned down, {len(plan.rejected)}:",
        "times the choice",
    ):
        assert part in text
    printed = str(plan)
    for part in ("tiles", "waves", "predicted", "workspace", "bound by compute"):
        assert part in printed


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (
            product(512, 512, 512, lda=513),
            "A's rows start at odd offsets (a leading dimension of 513), so loads are 4 bytes; a leading "
            "dimension that is a multiple of 4 would allow 16.",
        ),
        (
            product(512, 512, 512, lda=514, transpose_a=True),
            "A's columns start at uneven offsets (a leading dimension of 514)",
        ),
        (
            product(512, 512, 512, alignment=4),
            "A begins at an address that is a multiple of 4 bytes only, so loads are 4 bytes; beginning at a "
            "multiple of 16 would allow 16.",
        ),
        (
            replace(product(512, 512, 512), b=MatrixLayout(1030, 2)),
            "B's elements are 1030 and 2 elements apart in its two directions, so loads are 4 bytes; a copy "
            "with neighbours side by side would allow 16.",
        ),
        (
            replace(product(64, 64, 64, (3,)), b=MatrixLayout(64, 1, (4097,))),
            "B's batch items are 4097 elements apart",
        ),
        (
            product(512, 512, 510, lda=512),
            "A's rows are 510 elements long, so loads are 4 bytes; K padded to a multiple of 4 would "
            "allow 16.",
        ),
        (
            product(128 * 20 + 1, 256 * 20, 2048),
            "is 1 past",
        ),
    ],
)
def test_it_says_what_could_be_changed(problem: GemmProblem, sentence: str) -> None:
    text = explained(problem)
    assert "What could be changed:" in text
    assert sentence in text


def test_it_suggests_nothing_where_nothing_helps() -> None:
    assert "What could be changed" not in explained(product(4096, 4096, 4096))


def test_options_that_cost_nothing_are_not_blamed() -> None:
    assert "Without" not in explained(product(4096, 4096, 4096), PlanOptions(workspace_limit=2**30))


def test_pieces_are_said() -> None:
    text = explained(product(64, 64, 100_000))
    assert "cut along K into" in text
    assert "added in order" in text
    walked = explained(product(1000, 1000, 1000), PlanOptions(schedule="stream_k_walk"))
    assert "that two blocks share" in walked


def test_notes_are_said() -> None:
    text = explained(product(64, 64, 20), PlanOptions(schedule="split_k:9"))
    assert "split-K 9 ways was asked for; K has" in text
    assert "7 blocks" in explained(product(900, 900, 900), PlanOptions(max_sms=7))


def test_a_swapped_product_says_which_operand_is_which() -> None:
    """The front door computes out^T = b^T a^T for one column; what A and B mean then must be said."""
    swapped = tilewave.explain(500, 1, 200, device="H200")
    assert "A here is b, and B is a" in swapped
    assert "A here is b" not in tilewave.explain(1, 500, 200, device="H200")
