"""Ranks of every shape against LocalBackend, which test_gradients and test_step compare with plain transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.ranks import Ranks
from tests.train_models import batch_of, gradients, make_model, make_samples, settings_for
from turnout.train.local import LocalBackend
from turnout.train.settings import AdvantageSettings, OffPolicy
from turnout.train.sharded import ShardedBackend

WORLDS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # data parallel x tensor parallel
WORDS = 98  # divisible by 2, not by 4: FSDP pads


@pytest.fixture(scope="module")
def ranks():
    started = Ranks()
    yield started
    started.close()


def sharded(settings, world):
    return replace(settings, ranks=world[0] * world[1], tensor_parallel=world[1])


def weights(backend) -> dict[str, np.ndarray]:
    return {t.name: t.bits.copy() for t in backend.export()}


def sharded_gradients(settings, samples):
    """Loss, and on rank 0 the whole gradients: they are put where the masters lie and gathered from there."""
    backend, caught = ShardedBackend(settings), {}
    optimizer = backend._adamw

    def keep(_lr, _norm):
        for master in optimizer._masters.values():
            master.data.copy_(master.grad)
        caught.update({name: optimizer.gather(name, torch.float32) for name in optimizer.parameters})

    optimizer.step = keep
    report = backend.train(batch_of(samples))
    return report, {n: g.numpy() for n, g in caught.items() if g is not None}


def gradients_job(cases):
    return [sharded_gradients(*case) for case in cases]


def other_algorithm(folder):
    """GSPO, whose ratio is of whole responses, with a KL in the reward: advantages are of all ranks' log-probs."""
    model = make_model(folder / "gspo", words=WORDS)
    loss = {"eps_clip": 0.02, "opsm_delta": 0.01, "off_policy": OffPolicy(rollout_logprobs=True)}
    base = settings_for(model, name="gspo", kl_kind="k1", max_tokens_per_micro_batch=40, **loss)
    reference = make_model(folder / "reference", words=WORDS, seed=9)
    return replace(base, advantage=AdvantageSettings(kl_coef=0.1), reference=reference)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_gradients_equal_one_process_for_any_packing(tmp_path, ranks, world):
    cases = []
    for kind, tied in (("llama", True), ("qwen3", False), ("qwen3_moe", True)):
        folder = make_model(tmp_path / f"{kind}", kind, tied, words=WORDS)
        for budget in (21, 60, 4096) if kind == "llama" else (60,):
            settings = settings_for(
                folder, max_tokens_per_micro_batch=budget, temperature=0.7, entropy_coef=0.01
            )
            cases.append((sharded(settings, world), make_samples(seed=4, groups=4, members=4)))
    one = (cases[0][0], make_samples(seed=4)[:1])  # fewer samples than ranks
    cases += [one, (sharded(other_algorithm(tmp_path), world), make_samples(seed=5, groups=4, members=3))]
    found = ranks.run(world[0] * world[1], gradients_job, cases)
    for number, (settings, samples) in enumerate(cases):
        loss, expected = gradients(LocalBackend(settings), samples)
        for rank in found:
            assert rank[number][0].loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert found[0][number][1].keys() == expected.keys()
        for name, grad in expected.items():
            mine = torch.from_numpy(found[0][number][1][name])
            torch.testing.assert_close(
                mine, grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name, c=number: f"case {c}, {n}: {m}"
            )


def metrics_job(settings, samples):
    return ShardedBackend(settings).train(batch_of(samples)).metrics()


def test_met_01_a_steps_numbers_are_those_of_one_process_on_any_split(tmp_path, ranks):
    """Twelve samples of unequal length, one of them without a gradient, over 1, 2 and 4 ranks."""
    samples = make_samples(seed=9, groups=4, members=3)
    samples = (replace(samples[0], advantages=(0.0,) * len(samples[0].advantages)), *samples[1:])
    settings = settings_for(
        make_model(tmp_path, words=WORDS), kl_coef=0.1, off_policy=OffPolicy("tis"), reference=tmp_path
    )
    expected = LocalBackend(settings).train(batch_of(samples)).metrics()
    apart = {name for name in expected if name.startswith("seconds_")} | {"rows", "micro_batches"}
    for size in (1, 2, 4):
        for found in ranks.run(size, metrics_job, sharded(settings, (size, 1)), samples):
            assert found.keys() == expected.keys()
            for name in expected.keys() - apart:
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (size, name)
