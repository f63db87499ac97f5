"""Nsight Compute's output as Python records: its CSV in both forms, its list of metrics, its refusals."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from tilewave.errors import ToolchainError
from tilewave.lab.ncu import (
    CountersForbidden,
    KernelCounters,
    available_metrics,
    import_report,
    parse_csv,
    parse_metric_names,
    profile,
    split_known,
)

RAW = """==PROF== Connected to process 4242 (/usr/bin/python3)
==PROF== Profiling "probe_shared_load_16" - 0: 0%....50%....100% - 2 passes
"ID","Process ID","Kernel Name","Context","Block Size","Grid Size","Device","CC","l1tex__a.sum","smsp__b.sum"
"","","","","","","","","inst"
"0","4242","probe_shared_load_16","1","(32, 1, 1)","(3, 1, 1)","0","9.0","16,644","4,161"
"1","4242","void gemm<128, 256>(float *, int)","1","(32, 1, 1)","(3, 1, 1)","0","9.0","n/a","1.5"
==PROF== Disconnected from process 4242
"""
DETAILS = """"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","first","Command line profiler metrics","l1tex__a.sum","","2,097,152"
"0","7","first","Command line profiler metrics","smsp__b.sum","inst","3"
"1","7","second","Command line profiler metrics","l1tex__a.sum","","n/a"
"""
LIST = """Device NVIDIA H200 (GH100)
-------------------------------------- --------- ------ ------------------
Metric Name                            Metric Type Metric Unit Metric Description
-------------------------------------- --------- ------ ------------------
l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld Counter    # of shared data bank conflicts from loads
smsp__inst_executed                    Counter inst # of warp instructions executed
"""


def test_the_raw_page_has_one_launch_a_row() -> None:
    assert parse_csv(RAW) == [
        KernelCounters("probe_shared_load_16", {"l1tex__a.sum": 16644, "smsp__b.sum": 4161}),
        KernelCounters("void gemm<128, 256>(float *, int)", {"smsp__b.sum": 1.5}),
    ]


def test_the_details_page_has_one_metric_a_row() -> None:
    assert parse_csv(DETAILS) == [
        KernelCounters("first", {"l1tex__a.sum": 2097152, "smsp__b.sum": 3}),
        KernelCounters("second", {}),
    ]


def test_no_launches() -> None:
    assert parse_csv("==PROF== Connected\n==WARNING== No kernels were profiled.\n") == []


def test_metric_names() -> None:
    names = parse_metric_names(LIST)
    assert names == {"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld", "smsp__inst_executed"}
    wanted = ["smsp__inst_executed.sum", "smsp__nonsense.sum"]
    assert split_known(wanted, names) == (["smsp__inst_executed.sum"], ["smsp__nonsense.sum"])


def fake_ncu(folder: Path, body: str) -> str:
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nimport sys\nargs = sys.argv[1:]\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_available_metrics_asks_ncu(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, f"assert args == ['--query-metrics']\nprint({LIST!r})\n")
    assert "smsp__inst_executed" in available_metrics(ncu)


def test_a_refused_metric_is_dropped_and_named(tmp_path: Path) -> None:
    ncu = fake_ncu(
        tmp_path,
        "assert args[-2:] == ['python3', 'program.py']\n"
        "log = open(args[args.index('--log-file') + 1], 'w')\n"
        "if 'smsp__nonsense.sum' in args[args.index('--metrics') + 1]:\n"
        "    log.write('==ERROR== Failed to find metric smsp__nonsense.sum\\n')\n"
        "    sys.exit(1)\n"
        f"log.write({RAW!r})\n",
    )
    wanted = ["l1tex__a.sum", "smsp__nonsense.sum", "smsp__b.sum"]
    counters, refused = profile(ncu, ["python3", "program.py"], wanted, timeout=60)
    assert refused == ["smsp__nonsense.sum"]
    assert len(counters) == 2
    with pytest.raises(ToolchainError, match="none of the metrics smsp__nonsense"):
        profile(ncu, ["python3", "program.py"], ["smsp__nonsense.sum"], timeout=60)


def test_a_failure_shows_what_ncu_said(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, "print('==ERROR== ERR_NVGPUCTRPERM: no permission')\nsys.exit(9)\n")
    with pytest.raises(ToolchainError, match=r"status 9[\s\S]*ERR_NVGPUCTRPERM"):
        profile(ncu, ["program"], ["l1tex__a.sum"], timeout=60)


@pytest.mark.parametrize("status", [0, 1, 9])
@pytest.mark.parametrize("where", ["log", "stdout", "stderr"])
def test_forbidden_counters_are_an_error_of_their_own(tmp_path: Path, status: int, where: str) -> None:
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
    ways = {
        "log": f"open(args[args.index('--log-file') + 1], 'w').write({said!r})\n",
        "stdout": f"print({said!r})\n",
        "stderr": f"print({said!r}, file=sys.stderr)\n",
    }
    ncu = fake_ncu(tmp_path, f"{ways[where]}sys.exit({status})\n")
    with pytest.raises(CountersForbidden, match=r"https://developer\.nvidia\.com/ERR_NVGPUCTRPERM"):
        profile(ncu, ["program"], ["l1tex__a.sum"], timeout=60)


def test_units_are_told_in_both_forms() -> None:
    (launch, _) = parse_csv(DETAILS)
    assert launch.units == {"l1tex__a.sum": "", "smsp__b.sum": "inst"}
    raw = '"ID","Kernel Name","gpu__time_duration.sum","smsp__b.sum"\n"","","us","inst"\n"0","k","1.5","2"\n'
    (launch,) = parse_csv(raw)
    assert launch.units == {"gpu__time_duration.sum": "us", "smsp__b.sum": "inst"}
    assert launch.metrics == {"gpu__time_duration.sum": 1.5, "smsp__b.sum": 2.0}


def test_a_saved_report_is_imported(tmp_path: Path) -> None:
    report = tmp_path / "report.ncu-rep"
    wanted = ["--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    ncu = fake_ncu(tmp_path, f"assert args == {wanted!r}\nprint({RAW!r})\n")
    assert import_report(ncu, report) == parse_csv(RAW)
    ncu = fake_ncu(tmp_path, "print('==ERROR== Failed to open the report')\nsys.exit(1)\n")
    with pytest.raises(
        ToolchainError, match=r"could not read .*report\.ncu-rep \(status 1\).*Failed to open"
    ):
        import_report(ncu, report)
