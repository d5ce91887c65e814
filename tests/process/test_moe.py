"""`turnout train examples/moe.yaml` with routing replay and the loss that balances experts: these divided over two
trainer processes and two of the engine, gone on with by one each."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.run_process import ROOT, ended, gone_within, of_kind, start

SMALL = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8")
MORE = ("--save-interval", "1", "--use-rollout-routing-replay")
MORE += ("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-3")
QUIET = ("--engine-threads", "1", "--panel", "off", "--no-plots", "--no-tensorboard")


def run(folder: Path, *words: str) -> dict[str, object]:
    """The summary of a run in the folder that ends well."""
    example = str(ROOT / "examples" / "moe.yaml")
    process = start("train", example, "--run-dir", str(folder), *SMALL, *QUIET, *words)
    status, _, err = ended(process)
    assert status == 0, err[-3000:]
    assert gone_within(folder, 5) == []
    return json.loads((folder / "summary.json").read_text())


def test_experts_on_two_ranks_then_on_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, "--num-rollout", "2", *MORE)
    assert first["ranks"] == {"count": 2, "tensor_parallel": 1, "expert_parallel": 2}
    more = ("--num-rollout", "3", "--actor-num-gpus-per-node", "1", "--expert-model-parallel-size", "1")
    more += ("--rollout-num-gpus-per-engine", "1", "--engine-expert-parallel-size", "1")
    last = run(folder, *more, *MORE)
    assert last["ranks"] == {"count": 1, "tensor_parallel": 1, "expert_parallel": 1}
    assert last["audit"]["failed"] == 0, last["audit"]
    assert of_kind(folder, "RunStarted")[-1]["resumed_at"] == 2
    committed = {row["version"] for row in of_kind(folder, "VersionCommitted")}
    roots = {row["version"]: row["root"] for row in of_kind(folder, "VersionPublished")}
    assert len(roots) == 4 and roots.keys() < committed, "each was attested by its root"
    one, two, three, four = roots.values()
    assert two == three and len({one, two, four}) == 3, "one process has loaded what two had saved"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loads = [row["train/expert_load_max"] for row in rows if "train/expert_load_max" in row]
    replayed = [row for row in rows if "train/routing_recorded_share" in row]
    assert len(replayed) >= 3 and {row["train/routing_recorded_share"] for row in replayed} == {1.0}
    assert all(row["train/routing_changed_share"] < 0.1 for row in replayed), "weights are the engine's own"
    balances = [row["train/expert_balance_loss"] for row in rows if "train/expert_balance_loss" in row]
    assert len(balances) >= 3 and all(0.8 < balance < 2 for balance in balances)
    assert len(loads) >= 3 and all(1 <= load <= 2 for load in loads)
