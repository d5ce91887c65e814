"""`turnout train examples/stale.yaml`: a lead of 4 steps under a bound of 1, with each policy for what is too old.

What trained is looked up in the events: the versions of a group at its completion, the steps at which they were
exported, and the step at which the group trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.run_process import ROOT, ended, of_kind, start
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_read import LedgerReader

SHORT = ("--rollout-max-response-len", "64", "--num-rollout", "8")


def run(folder: Path, *words: str) -> dict[str, Any]:
    """The summary of a run to its end: audited, and with no trained token of a lag above 1."""
    threads = ("--engine-threads", "1", "--trainer-threads", "1")
    stale = str(ROOT / "examples" / "stale.yaml")
    status, _, err = ended(start("train", stale, "--run-dir", str(folder), "--no-plots", *threads, *words))
    assert status == 0, err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["audit"]["failed"] == 0, summary["audit"]["details"]
    assert summary["lag"]["max"] == 1, summary["lag"]
    assert list(problems(LedgerReader.of(folder / "ledger.sqlite"))) == []
    return summary


def greatest_lags(folder: Path) -> dict[str, int]:
    """By group that trained: the age of its oldest token, whether it carried loss or not."""
    exported = {row["version"]: row["step"] for row in of_kind(folder, "VersionPublished")}
    base = of_kind(folder, "VersionCommitted")[0]["version"]
    exported.setdefault(base, 0)
    versions = {row["group"]: row["versions"] for row in of_kind(folder, "GroupCompleted")}
    return {
        row["group"]: max(row["step"] - exported[label] for label in versions[row["group"]])
        for row in of_kind(folder, "GroupTrained")
    }


@pytest.mark.parametrize("policy", ["drop", "replay"])
def test_what_is_too_old_is_evicted_and_no_token_of_lag_2_trains(policy: str, tmp_path: Path) -> None:
    summary = run(tmp_path / "run", *SHORT, "--staleness-policy", policy)
    assert max(greatest_lags(tmp_path / "run").values()) == 1
    assert summary["evicted"] > 0 and summary["masked_tokens"] == 0
    assert summary["groups"]["requeued"] == summary["replayed"]
    assert summary["replayed"] == (summary["evicted"] if policy == "replay" else 0)
    groups = of_kind(tmp_path / "run", "GroupTrained")
    assert len(groups) == 8  # every batch was filled up again
    dropped = [
        row for row in of_kind(tmp_path / "run", "GroupDropped") if row["reason"].startswith("stale: lag")
    ]
    again = [row["attempt"] for row in of_kind(tmp_path / "run", "GroupRequeued")]
    if policy == "drop":
        assert len(dropped) == summary["evicted"] and not again
    else:
        assert not dropped and {row["group"] for row in groups} & set(again)


def test_what_is_too_old_is_masked_and_the_rest_of_the_group_trains(tmp_path: Path) -> None:
    mask = ("--staleness-policy", "mask", "--min-unmasked-share", "0.05")
    summary = run(tmp_path / "run", *mask, "--num-rollout", "14")
    assert summary["masked_tokens"] > 0 and summary["replayed"] == 0
    oldest = greatest_lags(tmp_path / "run")
    assert max(oldest.values()) > 1  # they trained beside tokens that were too old
    told = {row["group"]: row["lag"] for row in of_kind(tmp_path / "run", "GroupTrained")}
    assert max(told.values()) == 1
    assert sum(row["masked"] for row in of_kind(tmp_path / "run", "StepTrained")) == summary["masked_tokens"]
