"""From a configuration to engines: ids, devices, options of their programs."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError
from turnout.placement.devices import VISIBLE, visible_gpus
from turnout.schedule.roster import check_gpus, roster
from turnout.schedule.wiring import engine_launch, sglang_launch

REQUIRED = {"hf_checkpoint": "tiny:llama", "prompt_data": "p.jsonl", "custom_rm_path": "m:reward"}
GROUPS = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2, overrides: {threads: 3, max-total-tokens: 4096}}
      - {worker_type: placeholder, num_gpus: 1}
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2, engine: sglang, overrides: {max_prefill: 7}}
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "groups.yaml").write_text(GROUPS)
    named = {"sglang_config": str(tmp_path / "groups.yaml"), "sglang_args": {"max-prefill": 1, "x": 2}}
    return lambda **options: RunConfig.model_validate(REQUIRED | named | options)


def test_engines_of_all_groups_after_the_trainer_or_on_its_devices(config):
    plans = roster(config())
    assert [(plan.engine_id, plan.devices) for plan in plans] == [
        ("actor.regular1-0", (1,)), ("actor.regular1-1", (2,)), ("actor.regular3-0", (4, 5)),
    ]  # fmt: skip
    assert [plan.devices for plan in roster(config(colocate=True))] == [(0,), (1,), (3, 4)]
    assert [plan.devices for plan in roster(config(debug_rollout_only=True))] == [(0,), (1,), (3, 4)]
    assert [plan.running for plan in roster(config(engine_max_running_requests=9))] == [9, 9, inf]
    alike = RunConfig.model_validate(REQUIRED | {"rollout_num_engines": 2})
    assert [(plan.engine_id, plan.devices) for plan in roster(alike)] == [
        ("engine-0", (1,)),
        ("engine-1", (2,)),
    ]


def test_a_group_has_its_own_options(config):
    first, _, last = roster(config())
    launch = engine_launch(config(), first, Path("m"), (Path("logs"), Path("weights")))
    words = dict(zip(launch.arguments[::2], launch.arguments[1::2], strict=False))
    assert (words["--threads"], words["--max-total-tokens"], launch.threads) == ("3", "4096", 3)
    given = sglang_launch(config(), last, Path("m"), Path("logs")).arguments
    assert (given["base-gpu-id"], given["max-prefill"], given["x"]) == (4, 7, 2)


def test_more_gpus_than_there_are_are_refused_before_anything_starts(config):
    with pytest.raises(
        ConfigError, match=r"actor.regular3-0 would lie on GPU 5 of 5.*the first 1.*--colocate"
    ):
        check_gpus(config(), 5)
    for options, available in (({}, 6), ({"colocate": True}, 5), ({"sglang_device": "cpu"}, 0), ({}, None)):
        check_gpus(config(**options), available)


@pytest.mark.parametrize(
    ("named", "count"), [(None, 2), ("", 0), ("3", 1), ("1, 0,2", 3), ("0,-1,1", 1), ("GPU-1f,MIG-2", 2)]
)
def test_gpus_that_a_process_sees(tmp_path, monkeypatch, named, count):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv(VISIBLE, raising=False)
    if named is not None:
        monkeypatch.setenv(VISIBLE, named)
    assert visible_gpus(tmp_path) == count
    assert named is not None or visible_gpus(tmp_path / "none") is None
