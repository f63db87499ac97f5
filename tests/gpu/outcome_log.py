"""Outcomes in files as they come about, so that a run that is cut off has told what it found.

`--failures-file FILE` gets each failure (test, place, the end of its traceback) at once, and counts and the
longest tests at the end; `--outcomes-file FILE` a line for each test that has ended: outcome, seconds, name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

LINES = 40
"""Of a failure's report at most so many lines, the last ones: the error stands at the end."""
LONGEST = 15


def add_options(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup("outcomes")
    group.addoption("--failures-file", type=Path, help="failures go there as they occur")
    group.addoption("--outcomes-file", type=Path, help="a line for each test that has ended")


class OutcomeLog:
    """Writes reports as they arrive: with xdist in the process that hands tests out, which sees all."""

    def __init__(self, failures: Path | None, outcomes: Path | None) -> None:
        self._failures, self._outcomes = failures, outcomes
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        for path in filter(None, (failures, outcomes)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test."""
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._add(self._failures, _failure(report))
        # One outcome a test: its call, or whatever else has failed or was skipped.
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1
            seconds = self._seconds[report.nodeid]
            self._add(self._outcomes, f"{report.outcome:8} {seconds:8.2f} s {report.nodeid}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be collected."""
        if report.failed:
            self._counts["not collected"] += 1
            self._add(
                self._failures, f"{report.nodeid} could not be collected\n{_end(report.longreprtext)}\n"
            )

    def pytest_sessionfinish(self) -> None:
        """Add counts and the longest tests."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))
        longest = sorted(self._seconds.items(), key=lambda pair: -pair[1])[:LONGEST]
        lines = [f"{seconds:8.2f} s {name}" for name, seconds in longest]
        self._add(self._failures, "\n".join([f"ended: {counts or 'no test ran'}; the longest:", *lines, ""]))

    @staticmethod
    def _add(path: Path | None, text: str) -> None:
        if path is not None:
            with path.open("a", encoding="utf-8") as stream:
                stream.write(text)


def _failure(report: pytest.TestReport) -> str:
    return f"FAILED {report.nodeid} ({report.when})\n{_end(report.longreprtext)}\n\n"


def _end(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(["...", *lines[-LINES:]] if len(lines) > LINES else lines)


def configure(config: pytest.Config) -> None:
    """Log where an option asks for it; a worker of xdist leaves that to the process that hands tests out."""
    paths = [config.getoption(name, None) for name in ("failures_file", "outcomes_file")]
    if any(paths) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeLog(*paths))
