"""`turnout train` with weights through shared memory and through a group: the same run as through a directory. That
through a group is written as slime's scripts write it: other names, and Megatron's that change nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.process.run_process import of_kind, processes_of, train
from turnout.observe.metrics import read_metrics, repeatable

SHORT = (
    "--deterministic", "--dtype", "float32", "--trainer-threads", "1", "--num-rollout", "2", "--no-plots",
    "--eval-num-prompts", "2", "--rollout-num-engines", "2",
)  # fmt: skip
AS_SLIME = (
    "--num-layers", "2", "--hidden-size", "64", "--swiglu", "--tensor-model-parallel-size", "1", "--balance-data",
    "--use-dynamic-batch-size", "--optimizer", "adam", "--entropy-coef", "0.00", "--attention-dropout", "0.0",
    "--rollout-seed", "1234", "--update-weight-mode", "full",
)  # fmt: skip


def run(folder: Path, transport: str) -> Path:
    # small buckets: every version travels in several
    small = ("--update-weight-buffer-size", str(1 << 20))
    words = AS_SLIME if transport == "nccl" else ()
    status, _, err = train(folder / transport, *SHORT, *small, *words, "--update-weight-transport", transport)
    assert status == 0, err
    assert ("ignored: --num-layers, --hidden-size, --swiglu: the model's shape" in err) == bool(words), err
    return folder / transport


def roots(path: Path) -> list[tuple[int, str]]:
    return [(row["counter"], row["root"]) for row in of_kind(path, "VersionPublished")]


def curves(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Without what the versions themselves took, which is another thing by each way."""
    rows = [(step, repeatable(row)) for step, row in read_metrics(path / "metrics.jsonl")]
    return [(step, {k: v for k, v in row.items() if not k.startswith("weights/")}) for step, row in rows]


@pytest.fixture(scope="module")
def by_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("transports"), "disk")


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_wgt_11_a_run_is_the_same_whatever_way_the_weights_take(by_disk: Path, transport: str) -> None:
    path = run(by_disk.parent, transport)
    assert roots(path) == roots(by_disk) != []
    attested = {(row["engine"], row["version"], row["level"]) for row in of_kind(path, "VersionAttested")}
    assert attested == {
        (row["engine"], row["version"], row["level"]) for row in of_kind(by_disk, "VersionAttested")
    }
    assert {level for _, _, level in attested} == {"memory"}
    assert curves(path) == curves(by_disk)
    assert processes_of(path) == []
    assert [row["leftovers"] for row in of_kind(path, "RunEnded")] == [[]]
    assert sorted(p.name for p in (path / "weights").iterdir()) == ["INCARNATIONS", "PUBLISHED", "run.json"]
    pids = [json.loads((path / "waits.json").read_text())["pid"]]
    pids += [row["pid"] for row in of_kind(path, "EngineReady")]
    names = os.listdir("/dev/shm")  # noqa: PTH208
    assert [name for pid in pids for name in names if name.startswith(f"turnout_{pid}_")] == []
