"""`turnout train` as a process: a whole run, and what is left of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.run_process import events, of_kind, processes_of, train
from turnout.cli.main import main
from turnout.observe.eventlog import read_events
from turnout.observe.metrics import read_metrics, repeatable
from turnout.observe.timeline import spans
from turnout.weights.digest import root_of
from turnout.weights.verify import verify

DETERMINISTIC = (
    "--deterministic", "--dtype", "float32", "--trainer-threads", "1", "--num-rollout", "4", "--no-plots",
)  # fmt: skip
BATCHES = "batch_{rollout_id}.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of examples/tiny.yaml with proxies set that lead nowhere, a checkpoint and an HF export."""
    folder = tmp_path_factory.mktemp("train")
    run = folder / "run"
    dead = "http://127.0.0.1:9"
    status, out, err = train(
        run, "--save", str(folder / "save"), "--save-interval", "5", "--save-hf", str(folder / "hf"),
        "--metrics-port", "0",
        HTTP_PROXY=dead, http_proxy=dead, ALL_PROXY=dead, all_proxy=dead, HTTPS_PROXY=dead, NO_PROXY="",
    )  # fmt: skip
    assert status == 0, err
    return run, out


def test_the_summary_tells_the_whole_run(finished: tuple[Path, str]) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == summary["weight_versions_committed"] == 12
    assert summary["reward_last"] > summary["reward_first"] + 0.1
    assert summary["eval_after"] > summary["eval_before"]
    assert summary["groups"] == {
        "taken": 48,
        "trained": 48,
        "dropped": 0,
        "open": 0,
        "lost": 0,
        "requeued": 0,
    }
    assert summary["audit"]["failed"] == 0 and summary["audit"]["passed"] >= 10
    assert 0 <= summary["mismatch_mean_abs_logprob"] < 0.08
    assert 0 < summary["seconds_training"] < summary["seconds_total"]
    assert 0 < summary["control_bytes_max"] < 1 << 20
    assert summary["data_bytes"] == sum(row["bytes"] for row in of_kind(finished[0], "VersionPublished")) > 0


def test_a_run_leaves_its_files_and_nothing_else(finished: tuple[Path, str]) -> None:
    run = finished[0]
    assert processes_of(run) == []
    names = sorted(path.name for path in (run / "weights").iterdir())
    versions = [name for name in names if name.startswith("weight_v")]
    assert [name for name in names if name not in versions] == ["INCARNATIONS", "PUBLISHED", "run.json"]
    # the two newest, and those that the checkpoints at steps 5 and 10 went on from when the last was written
    assert versions == ["weight_v000005", "weight_v000010", "weight_v000011", "weight_v000012"]
    assert len(list((run / "weights" / "PUBLISHED").iterdir())) == 12
    assert (run / "plots" / "plots.png").stat().st_size > 10_000
    assert len(read_metrics(run / "metrics.jsonl")) >= 12
    assert [row["leftovers"] for row in of_kind(run, "RunEnded")] == [[]]


def test_the_ledger_of_a_run_tells_what_became_of_each_group(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        assert main(["inspect", str(finished[0]), *words]) == 0
        return capsys.readouterr().out

    assert told("--check") == "48 groups, every history and every token in order\n"
    summary = told()
    assert "  trained    48\nlast batch: step 11\nversions committed: 13," in summary
    assert summary.endswith("checkpoints at steps 5, 10, 12\n")
    label = of_kind(finished[0], "VersionPublished")[6]["version"]
    group = told("--group", "30")
    assert group.startswith("group g00000030.0: attempt 0 at prompt ")
    assert group.count(f": {label} (committed, of 7 train steps, lag 0)\n    made by engine-0 (0-") == 8
    assert ", trained by step 7\n" in group and "  tokens are stored\n" in group
    assert "  tokens are forgotten\n" in told("--group", "0")
    assert f"made {of_kind(finished[0], 'VersionPublished')[7]['version']}: committed" in told("--step", "7")
    assert told("--why-dropped") == "0 groups dropped\n0 groups requeued\n"


def test_the_timeline_of_a_run_shows_its_bubble(finished: tuple[Path, str]) -> None:
    found = spans(list(read_events(finished[0] / "events.jsonl")))
    trained = [span.args["step"] for span in found if (span.lane, span.name) == ("trainer", "train")]
    assert trained == list(range(12))
    rollouts = [span for span in found if (span.lane, span.name) == ("engine-0", "rollout")]
    assert sum(span.args["requests"] for span in rollouts) >= 48 * 8
    trains = [span for span in found if span.name == "train"]
    for one in rollouts:  # in sync both take turns
        assert not [other for other in trains if one.start < other.end and other.start < one.end]
    waits = {span.args.get("waits_for") for span in found if (span.lane, span.name) == ("trainer", "idle")}
    assert {"start", "rollout"} <= waits
    for name in ("publish", "prepare", "activate"):
        assert len([span for span in found if (span.lane, span.name) == ("update", name)]) == 12
    lanes = [
        row["args"]["name"]
        for row in json.loads((finished[0] / "trace.json").read_bytes())["traceEvents"]
        if row["name"] == "thread_name"
    ]
    assert lanes == ["trainer", "update", "evaluate", "engine-0", "engine-0 weights"]
    assert "metrics for Prometheus at http://127.0.0.1:" in finished[1]


def test_tokens_versions_and_engines_of_a_run_can_be_asked_for(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> dict:
        assert main(["inspect", str(finished[0]), *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    token = told("--token", "30:7:0")
    assert (token["lag"], token["engine"], token["trained"], token["mask"]) == (0, "engine-0", 7, 1)
    assert token["logprob"] < 0 and token["text"] is not None
    version = told("--version", str(token["version"]))
    assert version["trained_tokens_by_lag"] == {"0": version["tokens"]} and version["groups"] == 4
    assert {one["phase"] for one in version["phases"]} >= {"publish", "prepare", "activate"}
    engine = told("--engine", "engine-0")
    assert engine["tokens_by_version"][version["version"]] == version["tokens"]
    assert len(engine["lives"]) == 1 and engine["losses"] == 0


def test_every_version_was_attested_before_it_was_committed(finished: tuple[Path, str]) -> None:
    proved: dict[str, str] = {}
    committed = []
    for row in events(finished[0]):
        if row["event"] == "VersionAttested":
            proved[row["version"]] = row["level"]
        elif row["event"] == "VersionCommitted":
            assert proved[row["version"]] == "memory"
            committed.append(row["version"])
    assert len(committed) == len(set(committed)) == 13  # the base and one per step


def test_published_versions_are_whole(finished: tuple[Path, str]) -> None:
    for name in ("weight_v000011", "weight_v000012"):
        assert verify(finished[0] / "weights" / name).kind == "full"


def test_checkpoint_and_hf_export(finished: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    from turnout.weights.checkpoint_io import read_checkpoint

    folder = finished[0].parent
    assert sorted(path.name for path in (folder / "save").iterdir()) == ["step_000010", "step_000012"]
    state = json.loads((folder / "save" / "step_000012" / "state.json").read_text())
    assert (state["step"], state["position"], state["version"]["counter"]) == (12, 48, 12)
    assert root_of(read_checkpoint(folder / "hf")) == state["version"]["root"]
    AutoModelForCausalLM.from_pretrained(folder / "hf")


def test_it_prints_the_curve_and_the_way_to_the_results(finished: tuple[Path, str]) -> None:
    out = finished[1]
    assert "step 12/12" in out and "audit" in out and str(finished[0]) in out


def test_a_second_run_may_not_use_the_same_folder(finished: tuple[Path, str]) -> None:
    status, _, err = train(finished[0])
    assert status == 2 and "--run-dir" in err


def test_folders_in_use_are_refused_before_anything_starts(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    for flag, name in (("--save", "save"), ("--save-hf", "hf")):
        status, _, err = train(tmp_path / "run", flag, str(finished[0].parent / name))
        assert status == 2 and flag in err and not (tmp_path / "run").exists()


def test_the_saved_configuration_reproduces_the_run(finished: tuple[Path, str], tmp_path: Path) -> None:
    """Same options from config.json; the same prompts are taken."""
    from tests.process.run_process import ended, start

    again = tmp_path / "again"
    config = str(finished[0] / "config.json")
    words = ["--run-dir", str(again), "--num-rollout", "1", "--no-plots", "--save", str(tmp_path / "save")]
    status, _, err = ended(start("train", config, *words, "--save-hf", str(tmp_path / "hf")))
    assert status == 0, err
    first = [row["prompt"] for row in of_kind(finished[0], "GroupTaken")][:4]
    assert [row["prompt"] for row in of_kind(again, "GroupTaken")] == first


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeded")
    return deterministic(folder / "run", "--save-debug-rollout-data", str(folder / BATCHES))


def deterministic(run: Path, *words: str) -> Path:
    status, _, err = train(run, *DETERMINISTIC, *words)
    assert status == 0, err
    return run


def test_same_seed_twice_is_equal_bit_for_bit(seeded: Path, tmp_path: Path) -> None:
    roots, samples, metrics = [], [], []
    for run in (seeded, deterministic(tmp_path / "again")):
        roots.append([row["root"] for row in of_kind(run, "VersionPublished")])
        samples.append({row["group"]: row["digest"] for row in of_kind(run, "GroupCompleted")})
        metrics.append([(step, repeatable(row)) for step, row in read_metrics(run / "metrics.jsonl")])
    assert roots[0] == roots[1] and len(set(roots[0])) == 4
    assert samples[0] == samples[1] and len(samples[0]) == 16
    assert metrics[0] == metrics[1]


def test_the_saved_batches_alone_give_the_same_weights_bit_for_bit(seeded: Path, tmp_path: Path) -> None:
    saved = str(seeded.parent / BATCHES)
    alone = deterministic(tmp_path / "alone", "--load-debug-rollout-data", saved)
    last = of_kind(seeded, "VersionPublished")[-1]["root"]
    assert json.loads((alone / "summary.json").read_text())["weights_root"] == last


def test_another_seed_gives_another_run(seeded: Path, tmp_path: Path) -> None:
    """So that the test above can fail."""
    other = deterministic(tmp_path / "other", "--seed", "2", "--num-rollout", "1")
    first = [of_kind(run, "VersionPublished")[0]["root"] for run in (seeded, other)]
    assert first[0] != first[1]
