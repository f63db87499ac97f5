"""The report's pictures that docs/report.md shows, drawn from the committed records of an H200.

    python benchmarks/report_pictures.py

writes docs/images/report/*.png: those that the page links, and no others.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tilewave.device import get_spec
from tilewave.lab.power.records import load_power_run
from tilewave.lab.profile.records import load_profile
from tilewave.lab.records import load_ladder
from tilewave.lab.report.page import Report, make_report
from tilewave.lab.report.svg import write_pictures

ROOT = Path(__file__).resolve().parents[1]
PAGE, FOLDER = ROOT / "docs" / "report.md", ROOT / "docs" / "images" / "report"
RESULTS = ROOT / "benchmarks" / "results"


def report_of_the_h200() -> Report:
    """What `tilewave report` makes of the ladder, the power run and the profile of an H200."""
    return make_report(
        load_ladder(RESULTS / "ladder-h200.json"),
        get_spec("H200"),
        load_power_run(RESULTS / "power_h200.json"),
        load_profile(RESULTS / "profile_h200.json"),
    )


def linked_names() -> set[str]:
    """The pictures that the page shows."""
    return set(re.findall(r"images/report/([\w-]+)\.png", PAGE.read_text(encoding="utf-8")))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.png"):
        old.unlink()
    names = linked_names()
    drawings = {drawing.name: drawing for drawing in report_of_the_h200().drawings}
    if missing := names - drawings.keys():
        raise SystemExit(f"the report has no picture {', '.join(sorted(missing))}")
    with tempfile.TemporaryDirectory() as folder:
        for path in write_pictures([drawings[name] for name in sorted(names)], Path(folder), scale=2):
            (FOLDER / path.name).write_bytes(path.read_bytes())
    print(f"{len(names)} pictures in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
