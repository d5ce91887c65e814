"""Every --advantage-estimator as the command line makes it, from rewards to gradients: against its paper's formula
in float64 loops, whatever the packing, and in a train step that makes good responses likelier."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train_models import batch_of, gradients, make_model, make_samples, settings_for
from tests.unit.train.test_losses import found, inputs_of
from turnout.config import load
from turnout.config.estimators import ESTIMATORS
from turnout.config.run_config import RunConfig
from turnout.core.types import TrainSample
from turnout.schedule.train_wiring import advantage_settings, loss_settings, trainer_settings
from turnout.train.advantages import with_advantages
from turnout.train.local import LocalBackend
from turnout.train.losses.weights import token_weights
from turnout.train.lr_schedule import learning_rate
from turnout.train.settings import OffPolicy

LIMIT = 12
POLICY = [name for name in ESTIMATORS if name != "ppo"]


def configured(tmp_path: Path, *words: str) -> RunConfig:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"input": "a", "label": "b"}\n')
    places = ["--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "train.jsonl")]
    run = ["--rm-type", "exact", "--num-rollout", "1", "--rollout-max-response-len", str(LIMIT)]
    return load(None, [*places, *run, *words])


def rewarded(seed: int) -> list[TrainSample]:
    samples = make_samples(seed=seed, groups=4, members=3)
    return [replace(s, advantages=(), reward=math.sin(3.0 * i)) for i, s in enumerate(samples)]


def paper_advantages(name: str, samples: list[TrainSample]) -> list[float]:
    """One number per response."""
    values: list[float] = []
    for s in samples:
        group = [other.reward for other in samples if other.group_id == s.group_id]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        others = (sum(group) - s.reward) / (len(group) - 1)
        values.append(
            {
                "dr_grpo": s.reward - mean,
                "rloo": s.reward - others,
                "reinforce_plus_plus": s.reward,
                "reinforce_plus_plus_baseline": s.reward - mean,
            }.get(name, (s.reward - mean) / std)
        )
    if name.startswith("reinforce"):
        tokens = [v for v, s in zip(values, samples) for m in s.loss_mask if m]
        mean = sum(tokens) / len(tokens)
        std = math.sqrt(sum((v - mean) ** 2 for v in tokens) / (len(tokens) - 1))
        values = [(v - mean) / std for v in values]
    return values


def paper_objective(name: str, new, old, samples: list[TrainSample]) -> torch.Tensor:
    """What is maximised, token by token."""
    total, tokens = torch.zeros((), dtype=torch.float64), sum(sum(s.loss_mask) for s in samples)
    for index, (s, a) in enumerate(zip(samples, paper_advantages(name, samples))):
        trained = [t for t, m in enumerate(s.loss_mask) if m]
        logs = [new[index][t] - old[index][t] for t in trained]
        if name == "gspo":
            ratio = torch.exp(sum(logs) / len(logs))
            total = total + torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a) / len(samples)
            continue
        for t, log in zip(trained, logs):
            ratio = torch.exp(log)
            if name == "cispo":
                term = ratio.detach().clamp(0.0, 5.0) * a * new[index][t]
            else:
                term = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28 if name == "dapo" else 1.2) * a)
            total = total + term / (len(samples) * LIMIT if name == "dr_grpo" else tokens)
    return total


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("spread", [0.0002, 0.3, 1.5])
def test_loss_and_gradient_are_those_of_the_paper(tmp_path, name, spread):
    config = configured(tmp_path, "--advantage-estimator", name)
    plain = rewarded(seed=7)
    samples = list(with_advantages(plain, advantage_settings(config)))
    torch.manual_seed(2)
    old = [-4.5 + torch.randn(len(s.loss_mask)).double() for s in samples]
    new = [(o + spread * torch.randn(len(o)).double()).requires_grad_() for o in old]
    loss = loss_settings(config)
    inputs = inputs_of(samples, loss.aggregate, old)
    counts = token_weights([s.loss_mask for s in samples], loss.aggregate, loss.constant_length)
    weights = [w for counted, s in zip(counts, samples) for w, m in zip(counted.tolist(), s.loss_mask) if m]
    value, slopes, _ = found(new, samples, replace(inputs, weights=torch.tensor(weights).double()), loss)
    objective = paper_objective(name, new, old, plain)
    assert float(value.detach()) == pytest.approx(-float(objective.detach()), rel=1e-6, abs=1e-7)
    for slope, wanted in zip(slopes, torch.autograd.grad(-objective, new), strict=True):
        torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=1e-9)


def test_equal_clips_make_dapo_grpo(tmp_path):
    dapo = configured(tmp_path, "--advantage-estimator", "dapo", "--eps-clip", "0.2")
    grpo = configured(tmp_path)
    assert loss_settings(dapo) == loss_settings(grpo)
    assert advantage_settings(dapo) == advantage_settings(grpo)


def test_dr_grpo_is_grpo_where_the_deviation_is_one_and_all_lengths_are_the_limit(tmp_path):
    one, other = configured(tmp_path, "--advantage-estimator", "dr_grpo"), configured(tmp_path)
    (first, second), count = make_samples(groups=1, members=2)[:2], LIMIT
    whole = {
        "response_ids": (5,) * count, "logprobs": (-4.0,) * count, "loss_mask": (1,) * count, "lags": ()
    }  # fmt: skip
    pair = [replace(first, reward=0.0, **whole), replace(second, reward=math.sqrt(2.0), **whole)]
    a, b = (with_advantages(pair, advantage_settings(c)) for c in (one, other))
    assert [s.advantages for s in a] == [pytest.approx(s.advantages) for s in b]
    masks = [s.loss_mask for s in pair]
    constant = token_weights(masks, "constant", loss_settings(one).constant_length)
    assert [w.tolist() for w in constant] == [
        pytest.approx(w.tolist()) for w in token_weights(masks, "token")
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def trainer_of(model: Path, config: RunConfig, **more):
    """With ratios that are not 1: they are taken to the given log-probs."""
    loss = replace(loss_settings(config), off_policy=OffPolicy(rollout_logprobs=True), **more)
    return LocalBackend(replace(settings_for(model), loss=loss, advantage=advantage_settings(config)))


@pytest.mark.parametrize("name", POLICY)
def test_gradients_do_not_depend_on_the_packing(tmp_path, model, name):
    config = configured(tmp_path, "--advantage-estimator", name, "--eps-clip-high", "0.2")
    backend = trainer_of(model, config, entropy_coef=0.05, opsm_delta=0.05)

    @settings(max_examples=5, deadline=None)
    @given(st.integers(0, 99), st.integers(25, 90), st.randoms(use_true_random=False))
    def holds(seed, budget, random):
        samples = list(with_advantages(rewarded(seed), advantage_settings(config)))
        shuffled = random.sample(samples, len(samples))
        backend.settings = replace(backend.settings, max_tokens_per_micro_batch=10_000)
        wanted_loss, wanted = gradients(backend, samples)
        backend.settings = replace(backend.settings, max_tokens_per_micro_batch=budget)
        loss, grads = gradients(backend, shuffled)
        assert loss == pytest.approx(wanted_loss, rel=1e-4, abs=1e-6)
        for key, grad in wanted.items():
            torch.testing.assert_close(grads[key], grad, rtol=1e-3, atol=2e-6)

    holds()


@pytest.mark.parametrize("name", POLICY)
def test_a_train_step_makes_responses_likelier_by_their_advantage(tmp_path, model, name):
    config = configured(tmp_path, "--advantage-estimator", name)
    samples = with_advantages(rewarded(seed=1), advantage_settings(config))
    sized = replace(settings_for(model, lr=1e-3), samples_per_optimizer_step=6)
    backend = LocalBackend(replace(sized, loss=loss_settings(config)))

    def objective() -> float:
        return sum(
            a * float(p) * m
            for s, values in zip(samples, backend.logprobs(samples))
            for a, p, m in zip(s.advantages, values, s.loss_mask)
        )

    before = objective()
    reports = [backend.train(batch_of(samples, step)) for step in range(3)]
    assert objective() > before + 0.01
    assert [report.optimizer_steps for report in reports] == [2, 2, 2]


def test_a_decay_ends_with_the_last_optimizer_step_of_each_model(tmp_path: Path) -> None:
    """The policy has no optimizer step in the train steps of the critic alone."""
    decay = {"lr_decay_style": "linear", "num_steps_per_rollout": 2, "num_critic_only_steps": 4}
    config = configured(tmp_path, "--advantage-estimator", "ppo").model_copy(update=decay)
    made = trainer_settings(config, tmp_path, 10)
    assert made.critic is not None
    for optimizer, steps in ((made.optimizer, 12), (made.critic.optimizer, 20)):
        assert learning_rate(optimizer, steps - 1) > 0 == learning_rate(optimizer, steps)
