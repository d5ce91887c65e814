"""`turnout plan` whole: bad input, calibration, the simulated control plane, flags that the run's checks take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turnout.cli.plan import command
from turnout.config.load import dump, load
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, ModelError
from turnout.plan.calibrate import Recorded, Step, fitted, read_run
from turnout.plan.cluster import read_cluster
from turnout.plan.configured import own_prediction
from turnout.plan.make import Asked, plan_of, work_of
from turnout.plan.report import render, to_json

from .test_model import LLAMA_70B, SMOLLM2

RUN = {
    "prompt_data": "prompts.jsonl",
    "input_key": "prompt",
    "label_key": "label",
    "rm_type": "last_number",
    "num_rollout": 10,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 256,
}
CLUSTER = """
name: pair
machines: 1
devices_per_machine: 8
device: {name: H100, memory_gb: 80, tflops: 989, memory_gb_per_s: 3350}
links: {device: {gb_per_s: 450, latency_us: 3}, disk: {gb_per_s: 5}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's file beside a model of which there is the config.json only."""
    return run_of(tmp_path, SMOLLM2)


def run_of(folder: Path, model: dict[str, object]) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "label": "1"}\n')
    file = folder / "run.yaml"
    row = RUN | {"hf_checkpoint": str(folder / "model"), "prompt_data": str(folder / "prompts.jsonl")}
    file.write_text("".join(f"{key}: {value}\n" for key, value in row.items()))
    return file


def cluster_of(folder: Path, text: str = CLUSTER) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_a_plan_names_the_best_with_flags_that_the_checks_take(run: Path, tmp_path: Path) -> None:
    plan = plan_of(Asked(run, cluster=cluster_of(tmp_path)))
    assert plan.best is not None and plan.best.prediction is not None and plan.flags is not None
    row, words = (
        (plan.best, plan.flags.words) if plan.usable is None else (plan.usable[0], plan.usable[1].words)
    )
    config = load(run, words)
    assert (config.schedule, config.actor_gpus) == (row.schedule, row.layout.train)
    assert config.updated_engines == row.layout.engines
    assert plan.own is not None and plan.own.simulated and plan.own.lag == 0
    text = render(plan)
    for part in ("Recommended:", "Timeline", "Alternatives", "Flags", "given: ", "As configured:"):
        assert part in text
    assert json.loads(json.dumps(to_json(plan)))["recommended"]["name"] == plan.best.name
    assert max(map(len, text.splitlines())) < 240


def test_one_candidate_is_one_answer(run: Path, tmp_path: Path) -> None:
    config, found = load(run, ["--schedule", "async"]), read_cluster(cluster_of(tmp_path))
    work, _ = work_of(config, (), Asked(run))
    first, again = (own_prediction(config, work, found, None) for _ in range(2))
    assert first is not None and first == again
    assert first.lag <= config.max_staleness and first.step_s > 0


def test_a_transport_that_the_cluster_has_not_is_not_replaced_by_another(run: Path, tmp_path: Path) -> None:
    without = cluster_of(tmp_path, CLUSTER.replace("disk: {gb_per_s: 5}", "disk: null"))
    plan = plan_of(Asked(run, ("--update-weight-transport", "disk"), cluster=without))
    assert plan.own is None and "As configured: not predicted" in render(plan)


def test_a_model_that_fits_nowhere_is_told_what_would_hold_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_of(tmp_path, LLAMA_70B)
    assert command([str(file), "--cluster-file", str(cluster_of(tmp_path))]) == 1
    said = capsys.readouterr().out
    assert "Nothing fits. the smallest that was found to fit: " in said and "devices of 80 GB" in said
    assert "do not fit in the 73.6 GB of a device" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices: 8\n" + CLUSTER, "devices: there is no such key"),
        (CLUSTER.replace("tflops: 989", "tflops: -1"), "device.tflops = -1"),
        (CLUSTER.replace("machines: 1", "machines: 0"), "machines = 0"),
        (CLUSTER.replace("gb_per_s: 450", "speed: 450"), "links.device.speed: there is no such key"),
        (CLUSTER.replace("gb_per_s: 450", "gb_per_s: .inf"), "links.device.gb_per_s"),
        ("- a\n", "is no mapping"),
        ("a: [", "can't be read"),
        ("name: x\n", "device: is needed"),
    ],
)
def test_a_cluster_file_that_is_no_good(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="cluster") as raised:
        read_cluster(cluster_of(tmp_path, text))
    assert said in str(raised.value)


def test_a_model_that_is_not_here(run: Path) -> None:
    with pytest.raises(ModelError, match="weights are not needed"):
        plan_of(Asked(run, ("--hf-checkpoint", "nobody/nothing-such")))


def test_numbers_that_are_none(run: Path) -> None:
    with pytest.raises(ConfigError, match="--length-scale"):
        command([str(run), "--length-scale", "0"])


# Calibration


def test_the_fit_tells_factors_apart_where_the_rows_do() -> None:
    rows_SF = np.array([[10, 40], [20, 40], [10, 200], [30, 600]], dtype=float)
    found_F = fitted(rows_SF, rows_SF @ np.array([0.01, 0.002]), np.array([1.0, 1.0]))
    assert found_F == pytest.approx([0.01, 0.002], rel=0.1)


def test_the_fit_keeps_the_priors_proportions_where_they_do_not() -> None:
    rows_SF = np.array([[10, 40]] * 4, dtype=float)
    found_F = fitted(rows_SF, np.full(4, 3.0), np.array([2.0, 1.0]))
    assert found_F == pytest.approx([0.1, 0.05])


def test_one_step_beside_something_else_does_not_spoil_the_fit() -> None:
    rows_SF = np.array([[n, 4.0 * n * n] for n in range(1, 9)])
    seconds_S = rows_SF @ np.array([0.1, 0.02])
    seconds_S[3] *= 5
    assert fitted(rows_SF, seconds_S, np.array([0.1, 0.02])) == pytest.approx([0.1, 0.02], rel=0.05)


def recorded(folder: Path, steps: int, **options: object) -> Path:
    folder.mkdir()
    config = config_of(**options)
    (folder / "config.json").write_text(dump(config))
    rows = [{"step": at + 1, "seconds/train": 1.0, "seconds/rollout": 2.0} for at in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ledger.sqlite").touch()
    return folder


def test_lengths_of_two_runs_are_cut_and_stretched_by_the_limit_of_each(run: Path) -> None:
    """What the longer run finished above the shorter's limit was not cut."""
    runs = [
        Recorded(Path(name), config_of(rollout_max_response_len=limit), (Step(lengths, 8.0, {}),), 1, 1, None)
        for name, limit, lengths in (("short", 100, (50, 100)), ("long", 400, (50, 150, 400)))
    ]
    work, source = work_of(load(run, ["--rollout-max-response-len", "1000"]), runs, Asked(run))
    assert work.lengths == (50, 1000, 50, 150, 1000) and "short, long" in source


def config_of(**options: object) -> RunConfig:
    return RunConfig.model_validate(RUN | {"hf_checkpoint": "tiny:llama"} | options)


def test_a_run_with_too_few_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "label": "1"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"3 train steps.*at least 4"):
        read_run(recorded(tmp_path / "short", 3), 2)
    with pytest.raises(ConfigError, match="give a run of --schedule sync"):
        read_run(recorded(tmp_path / "async", 8, schedule="async"), 2)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_run(tmp_path / "nothing", 2)
