"""A run on groups of engines that differ: real processes, each with its own size and options."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.process.run_process import TINY, ended, of_kind, processes_of, start, wait_for

GROUPS = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 1, overrides: {max_total_tokens: 2048, max_running_requests: 8}}
      - {worker_type: placeholder, num_gpus: 1}
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}
"""
WORDS = ("--num-rollout", "2", "--no-eval-prompt-data", "--no-eval-num-prompts", "--no-plots")


def info(url: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as reply:
        return json.load(reply)


def test_groups_of_different_sizes_and_options_train_together(tmp_path: Path) -> None:
    """Colocated: the trainer has one device, the engines that and two more."""
    (tmp_path / "groups.yaml").write_text(GROUPS)
    run = tmp_path / "run"
    named = ("--sglang-config", str(tmp_path / "groups.yaml"), "--colocate", "--engine-threads", "1")
    process = start("train", str(TINY), "--run-dir", str(run), *named, *WORDS)
    wait_for("both engines", lambda: len(of_kind(run, "EngineReady")) == 2, process)
    ready = of_kind(run, "EngineReady")
    engines = {row["engine"]: (row["devices"], info(row["url"])) for row in ready}
    status, _, err = ended(process)
    assert status == 0, err
    (small, its), (large, others) = engines["actor.regular1-0"], engines["actor.regular3-0"]
    assert (small, large) == ([0], [2, 3])
    assert (its["tp_size"], its["max_total_num_tokens"], its["max_running_requests"]) == (1, 2048, 8)
    assert (others["tp_size"], others["max_total_num_tokens"]) == (2, 32768)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["audit"]["failed"]) == ("finished", 2, 0)
    assert {name: row["engines"] for name, row in summary["engines"].items()} == {
        "actor.regular1": 1,
        "actor.regular3": 1,
    }
    assert of_kind(run, "VersionPublished")[-1]["required"] == sorted(engines)
    assert processes_of(run) == []
