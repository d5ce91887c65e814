"""PPO's critic on ranks of every shape against that of one process, which test_critic compares with loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.ranks import Ranks
from tests.train_models import batch_of, make_model, make_samples
from tests.unit.train.test_critic import backend_of, critic_gradients, rewarded, with_critic
from turnout.core.errors import ConfigError
from turnout.core.types import but
from turnout.train.local import LocalBackend
from turnout.train.sharded import ShardedBackend

WORDS = 98  # divisible by 2, not by 4: FSDP pads
WORLDS = [("llama", (2, 1, 1)), ("qwen3", (1, 2, 1)), ("qwen3", (2, 2, 1)), ("qwen3_moe", (4, 1, 2))]
SECONDS = ("seconds_forward", "seconds_backward", "seconds_optimizer", "seconds_total")


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


def sharded(settings, world):
    data, tensor, experts = world
    return replace(settings, ranks=data * tensor, tensor_parallel=tensor, expert_parallel=experts)


def told(report):
    """A report but for what ranks may tell differently."""
    return replace(report, **dict.fromkeys(SECONDS, 0.0), critic=replace(report.critic, seconds_critic=0.0))


def whole(adamw):
    """The whole parameters by name, of rank 0."""
    found = {name: adamw.gather(name, torch.float32) for name in adamw.parameters}
    return {name: tensor.numpy() for name, tensor in found.items() if tensor is not None}


def train_job(settings, state, batches, save):
    """The gradients of one step that is not applied; then from `state` through all batches: reports and weights."""
    backend, caught = ShardedBackend(settings), {}
    backend.load(state)
    adamw = backend._trained["critic_"]

    def keep(_lr, _norm):
        kept = {name: master.data.clone() for name, master in adamw._masters.items()}
        for master in adamw._masters.values():
            master.data.copy_(master.grad)
        caught.update(whole(adamw))
        for name, master in adamw._masters.items():
            master.data.copy_(kept[name])

    step, adamw.step = adamw.step, keep
    backend.train(batches[0])
    adamw.step = step
    backend.load(state)
    reports = [told(backend.train(batch)) for batch in batches]
    backend.save(save)
    return caught, reports, whole(adamw), backend.counters


def assert_near(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, err_msg=name, **tolerance)


@pytest.mark.parametrize(("kind", "world"), WORLDS, ids=str)
def test_gradients_and_five_steps_equal_one_process_and_any_number_goes_on(tmp_path, ranks, kind, world):
    """From the state of one process, whose head is not zero; batches of unequal samples, one of fewer than ranks;
    back into one process, which then holds what a process that went the whole way alone holds."""
    folder = make_model(tmp_path / "model", kind, tied=kind != "qwen3", words=WORDS)
    changes = {
        "critic": {"lambd": 0.7, "lr": 1e-3, "only_steps": 1},
        "gamma": 0.9,
        "lr": 1e-3,
        "normalize": True,
        "max_tokens_per_micro_batch": 40,
        "samples_per_optimizer_step": 5,
    }
    alone = backend_of(folder, **changes)
    state, save = tmp_path / "state", tmp_path / "saved"
    state.mkdir(), save.mkdir()
    alone.save(state)
    batches = [batch_of(rewarded(make_samples(seed=20 + i, groups=4)), i) for i in range(4)]
    batches.append(batch_of(rewarded(make_samples(seed=30))[:1], 4))
    gradient = critic_gradients(backend_of(folder, **changes), batches[0].samples)[1]
    expected = [told(alone.train(batch)) for batch in batches]
    settings = sharded(alone.settings, world)
    found = ranks.run(world[0] * world[1], train_job, settings, state, batches, save)
    assert_near(found[0][0], {n: g.numpy() for n, g in gradient.items()}, rtol=1e-3, atol=3e-6)
    flat = alone._critic.model.flat
    assert_near(found[0][2], dict(zip(flat.names, flat.views(flat.master))), rtol=5e-3, atol=5e-5)
    for rank in found:
        assert rank[1] == found[0][1] and rank[3] == alone.counters
    for one, other in zip(found[0][1], expected, strict=True):
        a, b = one.metrics(), other.metrics()
        for name in a.keys() - {"rows", "micro_batches"}:
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-4), (one.step, name)
    again = LocalBackend(alone.settings)
    again.load(save)
    for kept, straight in zip(again._flats.values(), alone._flats.values(), strict=True):
        for name, buffer in straight.state.items():
            torch.testing.assert_close(kept.state[name], buffer, rtol=5e-3, atol=5e-5, msg=name)


def poisoned_job(settings, good, bad):
    backend = ShardedBackend(settings)
    backend.train(good)
    adamw = backend._trained["critic_"]
    before = {name: m.clone() for name, m in adamw._masters.items()}
    skipped = backend.train(bad).critic.value_skipped_nonfinite
    kept = all(torch.equal(before[name], m) for name, m in adamw._masters.items())
    return skipped, kept, backend.train(good).critic.value_skipped_nonfinite, adamw.steps


def test_a_step_of_the_critic_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path, ranks):
    folder = make_model(tmp_path, words=WORDS)
    settings = sharded(with_critic(folder, critic={"only_steps": 9}), (2, 1, 1))
    good = rewarded(make_samples(seed=35))
    bad = [but(good[0], reward=math.inf), *good[1:]]
    found = ranks.run(2, poisoned_job, settings, batch_of(good), batch_of(bad))
    assert found == [(1, True, 0, 2)] * 2


def test_a_critic_that_cannot_be_split_is_refused_before_anything_is_loaded(tmp_path):
    policy, critic = make_model(tmp_path / "policy", words=WORDS), make_model(tmp_path / "critic", words=99)
    settings = with_critic(policy)
    settings = replace(settings, critic=replace(settings.critic, checkpoint=critic))
    with pytest.raises(ConfigError, match="the critic's vocabulary, 99, cannot be split by it -> one of 1"):
        ShardedBackend(sharded(settings, (1, 2, 1)))
