"""Tiny random models and samples for trainer tests, and the slow reference that the trainer is compared with:
plain transformers, one sequence at a time, the loss written out token by token."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from turnout.core.types import TrainBatch, TrainSample
from turnout.train.local import LocalBackend
from turnout.train.settings import LossSettings, OffPolicy, OptimizerSettings, TrainerSettings

VOCABULARY = 97
KINDS = ("llama", "qwen3", "qwen3_moe")


def make_model(
    folder: Path, kind: str = "llama", tied: bool = True, seed: int = 0, dtype=torch.float32, words=VOCABULARY
) -> Path:
    torch.manual_seed(seed)
    common = {
        "vocab_size": words, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
        "tie_word_embeddings": tied, "initializer_range": 0.15,
    }  # fmt: skip
    if kind == "llama":
        config = LlamaConfig(**common)
    elif kind == "qwen3":
        config = Qwen3Config(**common)
    else:
        moe = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
        config = Qwen3MoeConfig(**common, **moe)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


def make_samples(
    seed: int = 0, groups: int = 3, members: int = 3, longest: int = 9
) -> tuple[TrainSample, ...]:
    """Ragged groups with shared prompts; some tokens are masked, never a whole response."""
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12)))
        for _ in range(members):
            count = rng.randint(1, longest)
            mask = [1, *(int(rng.random() < 0.8) for _ in range(count - 1))]
            samples.append(
                TrainSample(
                    group_id=f"g{group}",
                    prompt_ids=prompt,
                    response_ids=tuple(rng.randrange(VOCABULARY) for _ in range(count)),
                    logprobs=tuple(-4.5 + rng.gauss(0, 0.3) for _ in range(count)),
                    loss_mask=tuple(mask),
                    advantages=(rng.gauss(0, 1),) * count,
                    lags=tuple(t % 3 for t in range(count)),
                )
            )
    return tuple(samples)


def batch_of(samples, step: int = 0) -> TrainBatch:
    return TrainBatch(step, "v000001-0000000000000000", tuple(samples))


def settings_for(folder: Path, **changes) -> TrainerSettings:
    """fp32, one thread; changes may name fields of the settings, of `optimizer` and of `loss`."""
    optimizer = {k: changes.pop(k) for k in list(changes) if k in OptimizerSettings.__dataclass_fields__}
    loss = {k: changes.pop(k) for k in list(changes) if k in LossSettings.__dataclass_fields__}
    base = TrainerSettings(checkpoint=folder, dtype="float32", threads=1)
    base = replace(base, optimizer=OptimizerSettings(**({"lr": 1e-2} | optimizer)), loss=LossSettings(**loss))
    return replace(base, **changes)


def gradients(backend: LocalBackend, samples, old=None) -> tuple[float, dict[str, torch.Tensor]]:
    """The trainer's loss and fp32 gradients by parameter for one optimizer step over `samples`, not applied."""
    caught: dict[str, torch.Tensor] = {}
    flat = backend._flat

    def keep(lr: float, norm: float) -> None:
        caught.update({n: v.clone() for n, v in zip(flat.names, flat.views(flat.grad))})

    original, backend._optimizer.step = backend._optimizer.step, keep  # type: ignore[method-assign]
    report = backend.train(batch_of(samples))
    backend._optimizer.step = original  # type: ignore[method-assign]
    return report.loss, caught


def reference_logprobs(model, sample: TrainSample, temperature: float = 1.0) -> torch.Tensor:
    """fp32 [response tokens] from the whole matrix of logits of one unpacked sequence."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


def reference_weights(gaps, masks, off: OffPolicy) -> list[list[float]]:
    """The off-policy weight of each token, in Python floats: `gaps` is old - behaviour, one list per sample."""
    low, cap = off.bounds
    weights = []
    for gap, mask in zip(gaps, masks, strict=True):
        raw = [math.exp(g) for g in gap]
        if off.kind == "sequence":
            raw = [math.prod(r for r, m in zip(raw, mask) if m)] * len(gap)
        if off.kind in ("tis", "sequence"):
            raw = [min(max(r, low), cap) for r in raw]
        elif off.kind in ("mis", "decoupled"):
            raw = [r if low <= r <= cap else 0.0 for r in raw]
        else:
            raw = [1.0] * len(gap)
        weights.append(raw)
    return weights


def reference_loss(logprobs, samples, loss: LossSettings, old=None, reference=None) -> torch.Tensor:
    """GRPO token by token, in Python; `logprobs` is one tensor per sample. Where `old` is not given it is what the
    settings of the off-policy correction say."""
    off = loss.off_policy
    before = [x.detach() for x in logprobs] if old is None else [torch.as_tensor(x) for x in old]
    engine = [torch.tensor(s.logprobs) for s in samples]
    if off.rollout_logprobs:
        before = engine
    if off.kind == "decoupled" and off.prox == "interpolate":
        shares = [torch.tensor([lag / (lag + 1) for lag in s.lags]) for s in samples]
        before = [e + a * (x.detach() - e) for e, a, x in zip(engine, shares, logprobs)]
    gaps = [(b - e).tolist() for b, e in zip(before, engine)]
    weights = reference_weights(gaps, [s.loss_mask for s in samples], off)
    total = torch.zeros(())
    tokens = sum(sum(s.loss_mask) for s in samples)
    for index, sample in enumerate(samples):
        share = 1 / tokens if loss.aggregate == "token" else 1 / (len(samples) * sum(sample.loss_mask))
        for t, mask in enumerate(sample.loss_mask):
            if not mask:
                continue
            new = logprobs[index][t]
            ratio, a = torch.exp(new - before[index][t]), sample.advantages[t]
            value = -ratio * a
            low, high = 1 - loss.eps_clip, 1 + loss.eps_clip_high
            if (a > 0 and float(ratio.detach()) > high) or (a < 0 and float(ratio.detach()) < low):
                value = -(high if a > 0 else low) * a + 0.0 * new
            value = weights[index][t] * value
            if loss.kl_coef:
                gap = new - float(reference[index][t])
                kl = {"k1": gap, "k2": gap * gap / 2, "k3": math.e ** (-gap) - 1 + gap}[loss.kl_kind]
                value = value + loss.kl_coef * kl
            total = total + share * value
    return total


def reference_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
