"""`--eval-config`: data sets with settings of their own, and every fault with its place (MET-02)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnout.config.eval_sets import EvalDataset, read_eval_sets
from turnout.core.errors import ConfigError
from turnout.schedule.eval_sets import sampling

GOOD = """
eval:
  defaults: {temperature: 0.6, n_samples_per_eval_prompt: 4}
  datasets:
    - {name: aime, path: a.jsonl, stop: [A], min_new_tokens: 3, max_response_len: 9}
    - {name: gsm8k, path: g.jsonl, temperature: 0, n_samples_per_eval_prompt: 1, rm_type: last_number}
"""


def read(tmp_path: Path, text: str) -> list[EvalDataset]:
    path = tmp_path / "sets.yaml"
    path.write_text(text)
    return read_eval_sets(path)


def faults(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    return [fault.line() for fault in refused.value.faults]


def test_a_value_of_the_set_goes_before_the_default(tmp_path: Path) -> None:
    aime, gsm8k = read(tmp_path, GOOD)
    assert (aime.name, aime.temperature, aime.n_samples_per_eval_prompt) == ("aime", 0.6, 4)
    assert (gsm8k.name, gsm8k.temperature, gsm8k.n_samples_per_eval_prompt) == ("gsm8k", 0, 1)
    assert (gsm8k.rm_type, gsm8k.stop) == ("last_number", None)


def test_met_02_what_neither_says_is_the_runs_option(tmp_path: Path) -> None:
    """And what one set says is not the other's."""
    config: Any = SimpleNamespace(
        eval_temperature=0.0,
        n_samples_per_eval_prompt=1,
        eval_response_limit=256,
        rollout_stop=["END"],
        rollout_stop_token_ids=[7],
        rollout_request_timeout_s=30.0,
    )
    aime, gsm8k = (sampling(config, one) for one in read(tmp_path, GOOD))
    assert (aime.samples, aime.params.temperature) == (4, 0.6)
    assert (aime.params.stop, aime.params.min_new_tokens, aime.params.max_new_tokens) == (("A",), 3, 9)
    assert (gsm8k.samples, gsm8k.params.temperature) == (1, 0.0)
    assert (gsm8k.params.stop, gsm8k.params.min_new_tokens, gsm8k.params.max_new_tokens) == (("END",), 0, 256)
    assert gsm8k.params.stop_token_ids == (7,)
    for bad in ({"temperature": 0, "n_samples_per_eval_prompt": 2}, {"min_new_tokens": 300}):
        with pytest.raises(ConfigError, match="--eval-config: x"):
            sampling(config, EvalDataset(name="x", path="p", **bad))


def test_cfg_11_every_key_may_stand_in_the_defaults_and_a_wrong_one_there_is_told(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "n_samples_per_eval_prompt": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_new_tokens": 1,
        "max_response_len": 9, "stop": ["A"], "stop_token_ids": [3], "input_key": "q", "label_key": "a",
        "num_prompts": 4, "rm_type": "math",
    }  # fmt: skip
    assert {*values, "name", "path", "custom_rm_path"} == set(EvalDataset.model_fields)
    rows = "datasets: [{name: a, path: p}, {name: b, path: p, rm_type: f1, stop: [B]}]"
    first, second = read(tmp_path, f"eval: {{defaults: {json.dumps(values)}, {rows}}}")
    assert first.model_dump(exclude={"name", "path", "custom_rm_path"}) == values
    assert (second.rm_type, second.stop, second.top_p) == ("f1", ["B"], 0.9)
    (line, _) = faults(tmp_path, f"eval: {{defaults: {{rm_type: math, top_pp: 0.9}}, {rows}}}")
    assert "top_pp = 0.9" in line and "known are" in line and "top_p" in line


def test_every_fault_is_told_with_its_place(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        """
eval:
  datasets:
    - {name: a, path: p, temprature: 1}
    - {path: p, top_p: 2.0}
    - {name: b, path: p, rm_type: math, custom_rm_path: m.f}
    - {name: c, path: p}
    - {name: c, path: q}
    - text
  default: {}
extra: 1
""",
    )
    for part in (
        "sets.yaml = extra: no such key",
        "sets.yaml = eval.default: no such key -> known are defaults, datasets",
        "eval.datasets[0].temprature = 1",
        "eval.datasets[1].name: Field required",
        "eval.datasets[1].top_p = 2.0",
        "eval.datasets[2].rm_type = math: two rewards",
        "eval.datasets[4].name = c: stands twice",
        "eval.datasets[5] = text: is no mapping",
    ):
        assert any(part in line for line in found), (part, found)
    assert len(found) == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "eval: is no mapping"),
        ("eval: {datasets: []}", "eval.datasets: is no list"),
        ("eval: {datasets: {name: a}}", "eval.datasets: is no list"),
        ("eval: {defaults: 1, datasets: [1]}", "eval.defaults: is no mapping"),
    ],
)
def test_a_file_of_another_form_is_refused(text: str, said: str, tmp_path: Path) -> None:
    assert any(said in line for line in faults(tmp_path, text))
