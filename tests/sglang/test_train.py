"""Three steps of `turnout train` on a real SGLang: every version is proved by its checksums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.run_process import ended, of_kind, processes_of, start

DEADLINE_S = 1200.0


@pytest.mark.parametrize("transport", ["disk", "tensor", "group"])
def test_three_steps(sglang_python: Path, tmp_path: Path, transport: str):
    words = {
        "--run-dir": tmp_path / "run",
        "--engine": "sglang",
        "--sglang-device": "cpu",
        "--sglang-python": sglang_python,
        "--engine-threads": 1,
        "--engine-start-timeout-s": 600,
        "--num-rollout": 3,
        "--eval-num-prompts": 4,
        "--update-weight-transport": transport,
    }
    tiny = Path(__file__).parents[2] / "examples" / "tiny.yaml"
    flags = [str(word) for pair in words.items() for word in pair]
    status, out, err = ended(start("train", str(tiny), *flags), DEADLINE_S)
    assert status == 0, out[-3000:] + err[-3000:]
    run = tmp_path / "run"
    assert "0 failed" in next(line for line in out.splitlines() if line.startswith("audit"))
    attested = of_kind(run, "VersionAttested")
    assert [row["level"] for row in attested] == ["checksum"] * 4
    assert len({row["root"] for row in attested}) == 4
    assert [row["version"] for row in of_kind(run, "VersionCommitted")] == [
        row["version"] for row in attested
    ]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert processes_of(run) == []


GROUPS = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 1}
      - {worker_type: regular, num_gpus: 1, engine: sglang, overrides: {max_running_requests: 7}}
"""


def test_beside_an_embedded_engine(sglang_python: Path, tmp_path: Path):
    """One model, two programs: each proves every version in its own way."""
    (tmp_path / "groups.yaml").write_text(GROUPS)
    run = tmp_path / "run"
    words = {
        "--run-dir": run,
        "--sglang-config": tmp_path / "groups.yaml",
        "--sglang-device": "cpu",
        "--sglang-python": sglang_python,
        "--engine-threads": 1,
        "--engine-start-timeout-s": 600,
        "--num-rollout": 2,
        "--eval-num-prompts": 4,
    }
    tiny = Path(__file__).parents[2] / "examples" / "tiny.yaml"
    flags = [str(word) for pair in words.items() for word in pair]
    status, out, err = ended(start("train", str(tiny), *flags), DEADLINE_S)
    assert status == 0, out[-3000:] + err[-3000:]
    levels = {row["engine"]: row["level"] for row in of_kind(run, "VersionAttested")}
    assert levels == {"actor.regular1-0": "memory", "actor.regular2-0": "checksum"}
    assert len(of_kind(run, "VersionCommitted")) == 3
    assert "max_running_requests=7" in (run / "engines" / "actor.regular2-0.log").read_text()
    assert processes_of(run) == []
