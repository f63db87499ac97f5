"""The pictures in the documents are those that the committed records make."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from matplotlib import image

from tilewave.lab.report.svg import write_pictures

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("report_pictures", ROOT / "benchmarks/report_pictures.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_committed_pictures_are_what_the_records_make(script: ModuleType, tmp_path: Path) -> None:
    names = script.linked_names()
    assert len(names) > 20
    assert {path.stem for path in script.FOLDER.glob("*.png")} == names
    drawings = [drawing for drawing in script.report_of_the_h200().drawings if drawing.name in names]
    for path in write_pictures(drawings, tmp_path, scale=2):
        made, committed = image.imread(path), image.imread(script.FOLDER / path.name)
        hint = f"{path.name} is out of date: python benchmarks/report_pictures.py"
        assert made.shape == committed.shape, hint
        assert np.abs(made - committed).max() < 0.2, hint
