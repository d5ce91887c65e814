"""`turnout train examples/agent.yaml`: an agent with OpenAI's client, to the end."""

from __future__ import annotations

from pathlib import Path

from tests.process.run_process import ROOT, ended, start, whole


def test_the_agent_of_the_examples_trains(tmp_path: Path) -> None:
    """Weights change between its samples; the audit finds lists of one length, and versions that were committed."""
    run = tmp_path / "run"
    words = ("--num-rollout", "2", "--n-samples-per-prompt", "2", "--rollout-batch-size", "2")
    status, out, err = ended(start("train", str(ROOT / "examples/agent.yaml"), "--run-dir", str(run), *words))
    summary = whole(run, status, err)
    assert summary["later_turns_cache_hit"] > 0.5, "later turns find their prefix"
    assert "http://127.0.0.1" not in out + err, "the addresses of endpoints are secret"
