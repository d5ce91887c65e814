"""The conformance kit against a real SGLang: nothing fails, and what is absent is listed with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.sglang.conftest import Server

EXPECTED = Path(__file__).with_name("expected_absent.txt")
PASSED_LEAST = 30
DEADLINE_S = 3600.0


def expected_absent() -> dict[str, str]:
    """Reason by check, from lines `name: reason`."""
    rows = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason.strip() for name, _, reason in (row.partition(":") for row in rows)}


def test_every_absent_check_is_listed_once_with_a_reason():
    rows = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    assert len(rows) == len(expected_absent()) and all(expected_absent().values())


def test_the_kit(server: Server, tmp_path: Path):
    report = tmp_path / "report.json"
    words = [
        "--engine",
        server.url,
        "--json",
        str(report),
        "--work",
        str(tmp_path / "work"),
        "--timeout-s",
        "300",
    ]
    command = [sys.executable, "-m", "turnout.cli.main", "bench", "conformance", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert report.exists(), ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(report.read_text())
    by_result = {kind: {row["name"]: row["detail"] for row in found["checks"] if row["result"] == kind}
                 for kind in ("passed", "failed", "absent")}  # fmt: skip
    assert by_result["failed"] == {}
    assert found["passed"] >= PASSED_LEAST
    assert set(by_result["absent"]) == set(expected_absent()), by_result["absent"]
