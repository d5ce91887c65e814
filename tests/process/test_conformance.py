"""The whole conformance kit against the embedded engine, as `turnout bench conformance` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

DEADLINE_S = 900.0
CHECKS_MIN = 90

# What the embedded engine may lack today. It shrinks to nothing.
ABSENT: dict[str, str] = {
    "input_log_probs_equal_reference": "input log-probs",
    "decoding_equals_scoring": "input log-probs",
    "prepare_and_activate": "two-call updates",
    "version_constraints": "extra_key",
    "update_by_handles": "tensor updates",
    "update_by_one_bucket": "tensor updates",
    "update_by_a_bucket_each": "tensor updates",
    "update_by_buckets_at_their_edges": "tensor updates",
    "update_in_another_order": "tensor updates",
    "tied_embeddings": "tensor updates",
    "begin_and_end_calls": "tensor updates",
    "tensors_of_an_unknown_name": "tensor updates",
    "tensors_of_a_wrong_shape": "tensor updates",
    "tensors_of_a_wrong_dtype": "tensor updates",
    "tensors_with_nan": "tensor updates",
    "update_of_some_tensors": "tensor updates",
    "tensors_that_are_no_pickle": "tensor updates",
    "update_by_group": "group updates",
    "update_by_group_in_buckets": "group updates",
    "group_calls_in_a_wrong_order": "group updates",
    "group_whose_sender_leaves": "group updates",
    "weights_by_name": "reading weights",
    "checksums_tell_versions_apart": "reading weights",
    "snapshot_and_compare": "reading weights",
    "release_and_resume_cache": "memory",
    "release_and_resume_weights": "memory",
    "release_while_requests_run": "memory",
    "resume_of_what_is_not_released": "memory",
}


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
    absent = {c["name"] for c in report["checks"] if c["result"] == "absent"}
    assert absent <= set(ABSENT), absent - set(ABSENT)
    assert len(report["checks"]) >= CHECKS_MIN
    assert report["passed"] == len(report["checks"]) - len(absent) and report["absent"] == len(absent)
    assert all(c["detail"] for c in report["checks"])
    assert shown.splitlines()[-1] == f"{report['passed']} passed, 0 failed, {len(absent)} absent"


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
    only = (
        "--only",
        "^(log-probs|versions|pause|refusals)|update_from|stale_prefix|updates_under_load|in_company",
    )
    status, report, shown = run_kit(tmp_path, "--engine-flag", "tp-size=2", *only)
    assert (status, report["failed"]) == (0, 0), shown
    assert {c["name"] for c in report["checks"] if c["result"] == "absent"} <= set(ABSENT), shown


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
