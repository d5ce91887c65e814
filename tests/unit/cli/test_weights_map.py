"""`turnout weights map`: what it prints for a run, for other sizes, for a change, and for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine_models import make_model
from turnout.cli.weights import command
from turnout.core.errors import WeightError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1"}\n')
    rows = {
        "hf_checkpoint": str(make_model(tmp_path / "model", "qwen3_moe")),
        "prompt_data": str(data), "input_key": "prompt", "label_key": "prompt", "rm_type": "math",
        "num_rollout": 1, "dtype": "float32",
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(rows))
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    status = command(["map", *words])
    return status, capsys.readouterr().out.splitlines()


def test_the_map_of_a_run_is_printed(run, capsys):
    status, lines = printed(capsys, str(run), "--rollout-num-engines", "2")
    assert status == 0
    assert any(line.startswith("engines  engines 2, tp 1") for line in lines)
    assert sum("receives" in line and "(100.0% of the model)" in line for line in lines) == 2


def test_other_sizes_are_tried_and_the_change_is_told(run, capsys):
    status, lines = printed(capsys, str(run), "--engines", "tp=2,ep=2,layout=sglang", "--was-engines", "tp=1")
    assert status == 0
    changed = [line for line in lines if line.startswith("changed  ")]
    assert "changed  engines tp: 1 -> 2" in changed
    assert "changed  router, engine: whole -> whole, 2 copies" in changed
    _, full = printed(capsys, str(run), "--engines", "tp=2,ep=2,layout=sglang", "--full")
    assert any(line.startswith("engine rank 1  model.layers.0.mlp.experts.w13_weight") for line in full)


def test_a_run_on_sglang_has_its_layout(run, capsys):
    status, lines = printed(capsys, str(run), "--engine", "sglang", "--sglang-device", "cpu", "--full")
    assert status == 0, lines
    assert lines[1].startswith("engines  engines 1, tp 1, pp 1, dp 1, ep 1, layout sglang")
    assert any("model.layers.1.self_attn.qkv_proj.weight" in line for line in lines)


def test_problems_are_printed_and_end_with_a_status(run, capsys):
    status, lines = printed(capsys, str(run), "--engines", "tp=3")
    assert status == WeightError.exit_status
    assert "problem  engine: 4 attention heads do not divide by 3" in lines
