"""What the registry predicts, held against what was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from tilewave.lab.records import Outcome, Row
from tilewave.lab.registry import RESOURCES, Prediction, get_rung

#: A prediction holds if the figure found is this close to it, relative to the predicted one.
CLOSE = 0.02


def judge(rows: Sequence[Row], sms: int | None = None) -> list[Row]:
    """The rows with the outcome of every prediction of their rung that concerns their size and GPU.

    A prediction about a counter belongs to the size that it names; one about a resource figure to every size.
    One that names a number of SMs belongs to rows of a GPU with ``sms`` of them.
    """
    by_place = {(row.rung, row.size): row for row in rows}
    return [replace(row, outcomes=tuple(_outcomes(row, by_place, sms))) for row in rows]


def _outcomes(row: Row, by_place: Mapping[tuple[int, int], Row], sms: int | None) -> list[Outcome]:
    rung = get_rung(row.rung)
    outcomes = []
    for prediction in rung.predictions:
        if prediction.counter not in RESOURCES and prediction.size != row.size:
            continue
        if prediction.sms not in (None, sms):
            continue
        before = by_place.get((rung.builds_on, row.size)) if rung.builds_on is not None else None
        outcomes.append(_outcome(prediction, _figures(row), _figures(before) if before else {}))
    return outcomes


def _outcome(prediction: Prediction, figures: Mapping[str, float], before: Mapping[str, float]) -> Outcome:
    found = figures.get(prediction.counter)
    base = before.get(prediction.counter)
    what = prediction.counter.replace("_", " ")
    if prediction.value is not None:
        predicted = _amount(prediction.value)
        if found is None:
            return Outcome(what, predicted, "not counted", None, prediction.why)
        holds = abs(found - prediction.value) <= CLOSE * abs(prediction.value)
        return Outcome(what, predicted, _amount(found), holds, prediction.why)
    assert prediction.ratio is not None  # the registry allows a value or a ratio
    predicted = f"x {prediction.ratio:.3f}"
    if found is None or base is None:
        return Outcome(what, predicted, "not counted", None, prediction.why)
    if base == 0:
        return Outcome(what, predicted, "of nothing", None, prediction.why)
    ratio = found / base
    holds = abs(ratio - prediction.ratio) <= CLOSE * prediction.ratio
    return Outcome(what, predicted, f"x {ratio:.3f}", holds, prediction.why)


def _figures(row: Row) -> dict[str, float]:
    """Everything of a row that a prediction may name."""
    figures: dict[str, float] = {
        "registers": row.build.registers,
        "spill_store_bytes": row.build.spill_store_bytes,
        "static_shared_bytes": row.build.shared_bytes,
        "blocks_per_sm": row.build.blocks_per_sm,
    }
    if row.counted is not None:
        figures.update(asdict(row.counted))
    return figures


def _amount(value: float) -> str:
    return f"{value / 1e6:,.2f} M" if abs(value) >= 1e5 else f"{value:,.0f}"
