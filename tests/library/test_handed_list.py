"""Every handed case of the classes that a matrix product meets has its tests; none is skipped silently."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

HERE = Path(__file__).parent
CASES = json.loads((HERE / "handed_cases.json").read_text(encoding="utf-8"))
WITHOUT_GPU = (
    HERE / "test_handed_cases.py",
    HERE / "test_handed_cases_of_launching.py",
    HERE.parent / "pytorch" / "test_handed_cases_of_torch.py",
)
ON_GPU = HERE.parent / "gpu" / "test_handed_cases_on_gpu.py"

NEEDS_A_GPU = {
    "H058": "a capture of a real stream; the refusal itself is in tests/runtime/test_workspace.py",
    "H059": "memory of the device over a hundred captures; flatness of the pool is in tests/runtime",
    "H071": "a GPU half occupied by another kernel",
    "H072": "a hundred thousand launches back to back",
}
"""Cases that have no test without a GPU, each with the reason."""

RUN_ON_GPU_TOO = {
    *("H001", "H007", "H014", "H020", "H024", "H025", "H026", "H027", "H032", "H037", "H042", "H043"),
    *("H050", "H051", "H054", "H055", "H062", "H063", "H066", "H067", "H070", "H075", "H076", "H095"),
    *("H107", "H115", "H116", "H129", "H130"),
}
"""Cases whose whole point shows on a GPU only, though a part is tested without one."""


def cases_in(path: Path) -> dict[str, list[ast.FunctionDef]]:
    """Tests by the case that their name begins with."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_(h\d{3})_", node.name)):
            found.setdefault(match[1].upper(), []).append(node)
    return found


def test_the_list_is_whole() -> None:
    ids = [case["id"] for case in CASES]
    assert len(ids) == len(set(ids)) == 49
    assert all(case["input"] and case["expect"] and case["source"] for case in CASES)


def test_every_case_has_a_test() -> None:
    ids = {case["id"] for case in CASES}
    here = {case for path in WITHOUT_GPU for case in cases_in(path)}
    there = set(cases_in(ON_GPU))
    assert here == ids - set(NEEDS_A_GPU)
    assert there >= set(NEEDS_A_GPU) | RUN_ON_GPU_TOO
    assert there <= ids


def test_no_case_is_skipped() -> None:
    for path in WITHOUT_GPU:
        for case, functions in cases_in(path).items():
            for function in functions:
                source = ast.unparse(function)
                assert not re.search(r"skip|xfail|importorskip", source), (case, function.name)
                assert "assert " in source or "pytest.raises" in source, (case, function.name)
