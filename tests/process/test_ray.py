"""`--cluster ray` with a real Ray: engines on two nodes, one of which is lost; ranks of the trainer on two nodes,
one of which ends; and what can't be placed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.held_reward import VARIABLE
from tests.process.run_process import (
    ROOT,
    TINY,
    ended,
    gone_within,
    of_kind,
    ranks_of,
    start,
    train,
    wait_for,
    whole,
)
from tests.ray_nodes import RayNodes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'turnout[ray]'"
)
WORDS = ("--cluster", "ray", "--engine-threads", "1", "--no-plots", "--skip-eval-before-train")
# a lost node is known after a second and a half; by default after 15
QUICK = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    found = RayNodes(1, 1, **QUICK)
    yield found
    found.end()


@pytest.fixture(scope="module")
def three_nodes(nodes: RayNodes) -> RayNodes:
    nodes.do("add 1")
    return nodes


def test_a_run_goes_on_over_the_loss_of_a_node(tmp_path: Path, nodes: RayNodes) -> None:
    """One engine on each node; the engine of the lost one comes again on a new node."""
    run, go = tmp_path / "run", tmp_path / "go"
    words = (*WORDS, "--ray-address", nodes.address, "--rollout-num-engines", "2", "--schedule", "async")
    more = ("--num-rollout", "5", "--use-fault-tolerance", "--custom-rm-path", "tests.held_reward:held")
    process = start("train", str(TINY), "--run-dir", str(run), *words, *more, **{VARIABLE: str(go)})
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    nodes.do("remove 1")
    [lost] = wait_for("the engine's death", lambda: of_kind(run, "EngineLost"), process)
    nodes.do("add 1")
    wait_for("its next life", lambda: len(of_kind(run, "EngineReady")) == 3, process)
    go.touch()
    status, _, err = ended(process)
    assert status == 0, err
    assert gone_within(run, 5) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["audit"]["failed"] == 0 and summary["groups"]["lost"] == 0, summary
    again = of_kind(run, "EngineReady")[-1]
    assert again["engine"] == lost["engine"]
    last = of_kind(run, "VersionPublished")[-1]["version"]
    attested = {row["engine"] for row in of_kind(run, "VersionAttested") if row["version"] == last}
    assert attested == {"engine-0", "engine-1"}


def test_what_cannot_be_placed_is_refused_by_name(tmp_path: Path, nodes: RayNodes) -> None:
    words = (*WORDS, "--ray-address", nodes.address, "--actor-num-nodes", "4")
    status, _, err = ended(
        start("train", str(TINY), "--run-dir", str(tmp_path / "run"), *words, "--engine-start-timeout-s", "2")
    )
    assert status == 2, err
    assert "-trainer: it asks for 4 x {CPU 1}, each on a node of its own; the cluster has" in err, err
    assert err.count("{CPU 1}") >= 3 and gone_within(tmp_path / "run", 5) == []


def test_the_object_store_has_what_was_put_until_it_is_dropped(nodes: RayNodes) -> None:
    """Here in two drivers, as a controller and a rank are; the reader has a view, not a copy. What hands
    them out lies beside the controller, and is made anew where it ends."""
    halves = r"""
from turnout.placement.ray_data import ObjectStoreData
import ray, subprocess, sys
ray.init(address=sys.argv[1], namespace="turnout-x", log_to_driver=False)
way = ObjectStoreData()
handles = [way.put(bytes([number]) * 300_000) for number in range(2)]
way.drop(handles[1])
reader = (
    "import sys; from turnout.train.data_transport import read_data\n"
    "for handle in sys.argv[1:]: data = read_data(handle); print(len(data), data[-1], data.readonly)\n"
)
done = subprocess.run([sys.executable, "-c", reader, *handles], capture_output=True, text=True)
print(done.stdout.strip(), "KeyError" in done.stderr)
node = way._keeper.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
print(ray.get(node) == ray.get_runtime_context().get_node_id())
ray.kill(way._keeper)
way.drop(handles[0])
done = subprocess.run([sys.executable, "-c", reader, way.put(b"new")], capture_output=True, text=True)
print(done.stdout.strip())
"""
    words = [sys.executable, "-c", halves, nodes.address]
    told = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert told == "300000 0 True True\nTrue\n3 119 True\n"


RANKS = ("--actor-num-nodes", "2", "--rollout-num-engines", "1")
EXACT = ("--deterministic", "--dtype", "float32", "--trainer-threads", "1", "--num-rollout", "4")


def roots(run: Path) -> list[str]:
    """Of the versions in their order, each step's once."""
    return list(dict.fromkeys(row["root"] for row in of_kind(run, "VersionPublished")))


def test_a_trainer_over_two_nodes_outlives_a_rank_and_gives_the_weights_of_a_local_one(
    tmp_path: Path, three_nodes: RayNodes
) -> None:
    """The actor beside a rank is killed, which ends the rank; its node stands."""
    local, run, go = tmp_path / "local", tmp_path / "run", tmp_path / "go"
    status, _, err = train(
        local, *EXACT, "--actor-num-gpus-per-node", "2", "--no-plots", "--skip-eval-before-train"
    )
    assert status == 0, err
    words = ("train", str(TINY), "--run-dir", str(run), *WORDS, *EXACT, *RANKS, "--save-interval", "1")
    more = ("--use-fault-tolerance", "--custom-rm-path", "tests.held_reward:held")
    process = start(*words, *more, RAY_ADDRESS=three_nodes.address, **{VARIABLE: str(go)})
    wait_for("a checkpoint", (run / "checkpoints" / "step_000001").exists, process)
    rank = ranks_of(run)[1]
    actor = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(actor), signal.SIGKILL)
    wait_for("the next incarnation", lambda: len(of_kind(run, "RunStarted")) == 2, process)
    go.touch()
    status, _, err = ended(process)
    whole(run, status, err)
    (failed,) = [row for row in of_kind(run, "RunEnded") if row["status"] == "failed"]
    assert "trainer rank 1" in failed["reason"] or "trainer-rank-1" in failed["reason"], failed
    assert roots(run) == roots(local) and len(roots(run)) == 4
    for number in range(2):
        text = (run / "trainer" / f"rank-{number}.log").read_text()
        assert "rollout data come from the object store" in text
    assert list((run / "trainer").glob(".*")) == [], "no probe is left"


def test_what_a_killed_controller_had_is_free_again(tmp_path: Path, three_nodes: RayNodes) -> None:
    """Its engine and its ranks end, and the same command gets the places of the cluster. SIGTERM,
    which Ray's library takes for itself, stops the run in good order."""
    run = tmp_path / "run"
    words = ("train", str(TINY), "--run-dir", str(run), *WORDS, *RANKS, "--num-rollout", "9999")
    process = start(*words, RAY_ADDRESS=three_nodes.address)
    wait_for("the engine", lambda: of_kind(run, "EngineReady"), process)
    wait_for("both ranks", lambda: len(ranks_of(run)) == 2, process)
    process.kill()
    process.communicate()
    assert gone_within(run, 20) == []
    process = start(*words, RAY_ADDRESS=three_nodes.address)
    wait_for("a step", lambda: of_kind(run, "StepTrained"), process)
    process.terminate()
    status, _, err = ended(process)
    assert status == 143 and of_kind(run, "RunEnded")[-1]["status"] == "interrupted", err
