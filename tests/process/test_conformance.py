"""The whole conformance kit against the embedded engine, as `turnout bench conformance` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

DEADLINE_S = 900.0
CHECKS_MIN = 90


def run_kit(tmp_path, *arguments: str) -> tuple[int, dict, str]:
    """Exit status, the report and the terminal's text."""
    target = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "turnout.cli.main",
        "bench",
        "conformance",
        "--json",
        str(target),
        *arguments,
    ]
    ended = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert target.exists(), ended.stdout + ended.stderr
    return ended.returncode, json.loads(target.read_text()), ended.stdout


def test_the_embedded_engine_passes(tmp_path):
    status, report, shown = run_kit(tmp_path)
    failed = {c["name"]: c["detail"] for c in report["checks"] if c["result"] == "failed"}
    assert failed == {} and status == 0 and report["failed"] == 0, shown
    assert [c["name"] for c in report["checks"] if c["result"] == "absent"] == []
    assert report["passed"] == len(report["checks"]) >= CHECKS_MIN and report["absent"] == 0
    assert all(c["detail"] for c in report["checks"])
    assert shown.splitlines()[-1] == f"{report['passed']} passed, 0 failed, 0 absent"


def test_with_an_admin_token_and_in_float32(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNOUT_ENGINE_ADMIN_TOKEN", "kit-secret")
    only = ("--only", "control_needs|log_probs_equal|decoding_equals|update_from_disk|seed_in_company")
    status, report, shown = run_kit(
        tmp_path, "--admin-token-env", "TURNOUT_ENGINE_ADMIN_TOKEN", "--engine-flag", "dtype=float32", *only
    )
    assert (status, report["failed"]) == (0, 0), shown
    results = {c["name"]: c["result"] for c in report["checks"]}
    assert results["control_needs_the_token"] == results["log_probs_equal_reference"] == "passed", shown
    assert "(float32)" in shown and "kit-secret" not in shown


def test_two_tensor_parallel_ranks(tmp_path):
    """What depends on ranks; updates by deltas: test_engine_delta."""
    only = (
        "--only",
        "^(log-probs|versions|pause|refusals)|from_disk|many_files|delta_of|stale_prefix|updates_under|in_company",
    )
    status, report, shown = run_kit(tmp_path, "--engine-flag", "tp-size=2", *only)
    assert (status, report["failed"]) == (0, 0), shown
    assert [c["name"] for c in report["checks"] if c["result"] == "absent"] == [], shown


@pytest.mark.parametrize("words", [["--engine", "nowhere"], ["--admin-token-env", "KIT_NO_SUCH_VARIABLE"]])
def test_a_command_line_that_cannot_work_is_refused(tmp_path, words):
    command = [sys.executable, "-m", "turnout.cli.main", "bench", "conformance", *words]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2 and words[1] in ended.stderr and "Traceback" not in ended.stderr


def test_the_list_tells_what_each_check_proves():
    command = [sys.executable, "-m", "turnout.cli.main", "bench", "conformance", "--list"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(lines) >= CHECKS_MIN
    assert all(len(line.split()) > 4 for line in lines)
