"""`--sglang-config`: what a file means, and each mistake in it told once, with file, model and group."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.unit.config.conftest import faults_of
from turnout.config.check_colocated import halves_can_give_back
from turnout.config.check_topology import GIVEN_ELSEWHERE, OVERRIDES
from turnout.config.run_config import RunConfig
from turnout.engine.settings import EngineSettings

TWO = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2}
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {max-total-tokens: 65536}}
      - {worker_type: placeholder, num_gpus: 2}
"""
PD = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 2, engine: sglang}
"""
FROZEN = "  - {name: reward, model_path: other, server_groups: [{worker_type: regular, num_gpus: 1}]}\n"


@pytest.fixture
def grouped(write, folder):
    """Writes a run's file and a file of groups; gives the path of the first and the words of the second."""

    def make(groups: str):
        (folder / "groups.yaml").write_text(groups)
        return write(), ["--sglang-config", "groups.yaml"]

    return make


def of_file(write, groups: str, **options) -> RunConfig:
    path = write(groups, "groups.yaml")
    path.write_text(groups)
    required = {"hf_checkpoint": "model", "prompt_data": "train.jsonl"}
    return RunConfig.model_validate(required | {"sglang_config": str(path)} | options)


def test_groups_with_all_values_decided(write):
    config = of_file(write, TWO + FROZEN, rollout_num_gpus=9)
    found = [(g.label, g.engines, g.ranks, g.updated, g.model_path) for g in config.groups]
    assert found == [
        ("actor.regular1", 2, 1, True, None),
        ("actor.regular2", 2, 2, True, None),
        ("actor.placeholder3", 0, 1, True, None),
        ("reward.regular1", 1, 1, False, "other"),
    ]
    assert config.updated_engines == config.engines_needed == 4 and config.rollout_gpus == 9
    assert config.engine_thread_count(14) == 2  # 7 ranks: a placeholder computes nothing


@pytest.mark.parametrize(
    ("given", "engines"),
    [({}, (1, 8)), ({"rollout_num_engines": 3}, (3, 3)), ({"rollout_num_gpus": 0}, (0, 0)),
     ({"rollout_num_gpus": 4}, (4, 4)), ({"rollout_num_gpus_per_engine": 2}, (1, 4)),
     ({"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}, (2, 2))],
)  # fmt: skip
def test_cfg_05_engines_without_a_file(given, engines):
    """Beside a trainer of 8 devices, and on its devices: 0 is a number, and not the same as nothing."""
    required = {"hf_checkpoint": "m", "prompt_data": "p", "actor_num_nodes": 2, "actor_num_gpus_per_node": 4}
    for colocate, count in zip((False, True), engines, strict=True):
        (group,) = RunConfig.model_validate(required | given | {"colocate": colocate}).groups
        assert (group.label, group.engines, group.updated) == ("engine", count, True)


def test_the_model_of_the_actor_by_its_path(write, folder):
    """`update_weights` follows from the path, however it is written; a frozen copy of it says so."""
    frozen = "  - {name: old, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1}]}\n"
    text = TWO.replace("name: actor\n", f"name: actor\n    model_path: {folder}/model/\n")
    groups = of_file(write, text + frozen).groups
    assert [(group.model, group.updated) for group in groups][-2:] == [("actor", True), ("old", False)]


def test_frozen_models_take_turns_with_the_trainer_but_not_those_that_evaluate_beside_it(write):
    """All that is wrong with these values, without files: what comes of the switch alone."""

    def faults(**options: str) -> list[str]:
        config = of_file(write, TWO + FROZEN, offload_rollout=True, **options)
        return [fault.remedy for fault in halves_can_give_back(config)]

    assert faults() == []
    remedy = "use another --eval-mode, or give --offload-train alone"
    assert faults(eval_mode="dedicated", eval_model="reward") == [remedy]


MISTAKES = [
    ("", [], "groups.yaml = sglang: is no list of models"),
    (TWO.replace("sglang:", "slang:"), [], "groups.yaml = slang: no such key -> did you mean sglang?"),
    (TWO.replace("name: actor", "nmae: actor"), [], "model 1 = nmae: no such key -> did you mean name?"),
    (TWO.replace("{worker_type: regular, num_gpus: 2}", "{worker_type: regular, num_gpu: 2}"), [],
     "groups.yaml: model actor, group 1 (regular) = num_gpu: no such key -> did you mean num_gpus?"),
    (TWO.replace("regular, num_gpus: 4", "regulr, num_gpus: 4"), [], "group 2 (regulr) = worker_type regulr"),
    (TWO.replace("num_gpus: 4", "num_gpus: '4'"), [], "group 2 (regular) = num_gpus 4"),
    (TWO.replace("num_gpus: 4", "num_gpus: 0"), [], "group 2 (regular) = num_gpus 0"),
    (TWO + TWO[8:], [], "model actor: the name stands twice"),
    (TWO.replace("    server_groups", "    engine_groups: []\n    server_groups"), [], "another name of"),
    (TWO.replace("num_gpus: 4, num_gpus_per_engine: 2", "num_gpus: 6, num_gpus_per_engine: 4"), [],
     "groups.yaml: model actor, group 2 (regular) = num_gpus 6: num_gpus_per_engine 4 does not divide it "
     "-> per engine fit: 1, 2, 3, 6"),
    (PD, ["--rollout-num-gpus", "6"], "model actor, group 2 (decode) = num_gpus 4: worker_type decode begins at "
     "device 4 with 2 engines of 2: 8 are required, 6 are available"),
    (TWO, ["--rollout-num-gpus", "9"], "--rollout-num-gpus = 9: the groups of groups.yaml have 8 devices"),
    (TWO.replace("regular, num_gpus: 2", "prefill, num_gpus: 2"), [], "group 2 (regular): model actor has groups"),
    (PD.replace("decode", "prefill"), [], "model actor: has groups of prefill and none of decode"),
    (PD, [], "group 1 (prefill) = num_gpus_per_engine 2: half of a pair is not served over several ranks"),
    (TWO.replace("regular", "placeholder"), [], "model actor: has no engines"),
    (TWO + "  - {name: r, model_path: o, server_groups: [{worker_type: prefill, num_gpus: 1}, "
     "{worker_type: decode, num_gpus: 1, num_gpus_per_engine: 1}]}\n", [],
     "model r, group 1 (prefill): not yet done: prefill and decode apart of a model that is not updated"),
    (TWO + FROZEN.replace("other", "model"), [], "gets the trainer's weights, here actor, reward"),
    (FROZEN.replace("  - ", "sglang: [", 1)[:-1] + "]", [], "gets the trainer's weights, here none"),
    (TWO.replace("name: actor", "name: actor\n    update_weights: true\n    model_path: other"), [],
     "model_path other: its engines begin with the weights of --hf-checkpoint model"),
    (TWO.replace("max-total-tokens", "max-totl-tokens"), [], "= max_totl_tokens: no such key -> did you mean"),
    (TWO.replace("max-total-tokens: 65536", "tp_size: 4"), [], "overrides = tp_size: tp_size follows from another"),
    (TWO.replace("max-total-tokens: 65536", "context_length: 64"), [], "may go to any engine of the model"),
    (TWO.replace("65536", "many"), [], "group 2 (regular): overrides.max-total-tokens"),
    (TWO.replace("65536", "128"), [], "group 2 (regular): --engine-max-total-tokens = 128: one request of up to"),
    (TWO.replace("max-total-tokens: 65536", "quantization: int8"), [], "several ranks -> use one rank per engine"),
    (TWO, ["--rollout-num-engines", "2"], "--rollout-num-engines = 2: --sglang-config says which engines"),
    (PD, ["--use-rollout-routing-replay"], "--use-rollout-routing-replay = true: halves of a pair do not tell"),
    (PD.replace(", num_gpus_per_engine: 2", ""), ["--min-engines", "1"],
     "--min-engines = 1: half of a pair answers nothing"),
    (PD, ["--schedule", "async", "--router", "smg", "--max-engine-lag", "1"],
     "group 2 (decode): --max-engine-lag = 1: a router mixes SGLang engines"),
    (PD, ["--schedule", "async", "--on-weight-update", "continue"],
     "group 2 (decode): --on-weight-update = continue: SGLang does not say"),
    (PD, ["--deterministic", "--engine-threads", "1", "--trainer-threads", "1"],
     "group 2 (decode): --deterministic: SGLang's tokens depend"),
    (PD.replace("engine: sglang", "engine: sglang, overrides: {base_gpu_id: 0}"), [],
     "group 2 (decode): overrides = 0: base_gpu_id follows from another option"),
    (TWO, ["--min-engines", "5"], "--min-engines = 5: the run has 4 engines that are updated"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "more", "line"), MISTAKES)
def test_each_mistake_names_where_it_is(grouped, groups, more, line):
    path, words = grouped(groups)
    lines = [fault.line() for fault in faults_of(path, [*words, *more])]
    assert len([told for told in lines if line in told]) == 1, lines


def test_the_overrides_are_options_of_the_engine():
    assert {*OVERRIDES, *GIVEN_ELSEWHERE} < {field.name for field in fields(EngineSettings)}
