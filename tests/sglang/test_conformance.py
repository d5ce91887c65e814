"""The conformance kit against a real SGLang: nothing fails, and what is absent is listed with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.sglang.conftest import Server

EXPECTED = Path(__file__).with_name("expected_absent.txt")
PASSED_LEAST = 30
DEADLINE_S = 3600.0
KEY = "TURNOUT_TEST_KEY"


def expected_absent() -> dict[str, str]:
    """Reason by check, from lines `name: reason`."""
    rows = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason.strip() for name, _, reason in (row.partition(":") for row in rows)}


def test_every_absent_check_is_listed_once_with_a_reason():
    rows = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    assert len(rows) == len(expected_absent()) and all(expected_absent().values())


def test_the_kit(server: Server, tmp_path: Path):
    report = tmp_path / "report.json"
    words = {
        "--engine": server.url,
        "--json": report,
        "--work": tmp_path / "work",
        "--timeout-s": 300,
        "--admin-token-env": KEY,
    }
    flags = [str(word) for pair in words.items() for word in pair]
    ran = subprocess.run(
        [sys.executable, "-m", "turnout.cli.main", "bench", "conformance", *flags],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, KEY: server.key},
    )
    assert report.exists(), ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(report.read_text())
    results = {
        result: {row["name"]: row["detail"] for row in found["checks"] if row["result"] == result}
        for result in ("passed", "failed", "absent")
    }
    assert results["failed"] == {}, "\n".join(f"{name}: {why}" for name, why in results["failed"].items())
    assert found["passed"] >= PASSED_LEAST
    unlisted = {name: why for name, why in results["absent"].items() if name not in expected_absent()}
    assert unlisted == {}, "absent without a reason in expected_absent.txt"
    assert not set(results["passed"]) & set(expected_absent()), "listed as absent, but passes"
