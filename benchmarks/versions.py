"""Consecutive bf16 versions of SmolLM2-135M, made by real training steps and kept in the cache of benchmarks.

    python -m benchmarks.versions [--rates 1e-6 5e-6 2e-5] [--check STEPS --json FILE]

Adam with the trainer's defaults on float32 masters, gradients of a policy-gradient-like loss (a random advantage
for each sequence times its log-probability) on sums from examples/data, computed in bf16 at the published weights.
A pair is a version and the next one:

- `fresh`: the checkpoint and the version after its first step. Masters begin at the very bf16 values.
- `steady`: the versions before and after a step with warm moments. In steady state the masters are spread over the
  intervals that round to their bf16 values, which takes thousands of steps at a small learning rate; here they are
  drawn uniformly from these intervals to begin with. One run takes WARM_STEPS steps, then two at each learning rate
  in turn; the second one makes the pair. `--check` shows that a long run from the checkpoint comes to the densities
  that its own steps would have on masters drawn so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnout.train.model_zoo import fetch
from turnout.weights.safetensors_file import read_file, write_file
from turnout.weights.tensors import HostTensor

RATES = (1e-6, 5e-6, 2e-5)
STATES = ("fresh", "steady")
WARM_STEPS = 50
SEQUENCES = 8
BETAS, EPS = (0.9, 0.98), 1e-8
RECIPE = 2  # raise it when other versions would be made, so that cached ones are made again
CACHE = Path.home() / ".cache" / "turnout" / "benchmarks" / f"versions-{RECIPE}"
DATA = Path(__file__).parent.parent / "examples" / "data" / "sums_train.jsonl"


@dataclass(frozen=True)
class Pair:
    """A version and the next one, the tensors in the same order, in memory."""

    learning_rate: float
    state: str
    base: list[HostTensor]
    new: list[HostTensor]


class Training:
    """One run. `spread`: masters are drawn from their rounding intervals."""

    def __init__(self, learning_rate: float, spread: bool, seed: int = 1) -> None:
        folder = fetch()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._rows = [json.loads(line) for line in DATA.read_text().splitlines()]
        self._rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.masters = [
            _spread(p.detach(), generator) if spread else p.detach().float() for p in self._model.parameters()
        ]
        self._adam = torch.optim.Adam(self.masters, learning_rate, BETAS, EPS, fused=True)

    def go_on_at(self, learning_rate: float) -> None:
        self._adam.param_groups[0]["lr"] = learning_rate

    def step(self) -> None:
        texts = []
        for row in self._rng.sample(self._rows, SEQUENCES):
            answer = {"role": "assistant", "content": row["label"]}
            texts.append(self._tokenizer.apply_chat_template([*row["prompt"], answer], tokenize=False))
        batch = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        advantages = torch.tensor([self._rng.gauss(0, 1) for _ in texts])
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = self._model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        logprobs_BT = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]
        (-(advantages - advantages.mean())[:, None] * logprobs_BT).sum().div(mask.sum()).backward()
        for master, parameter in zip(self.masters, self._model.parameters()):
            master.grad, parameter.grad = parameter.grad.float(), None
        self._adam.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self._model.parameters()):
                master.grad = None
                parameter.copy_(master)  # to the nearest, ties to even

    def tensors(self) -> list[HostTensor]:
        """The version as it is published now, copied."""
        return [
            HostTensor(name, "BF16", tuple(p.shape), p.detach().view(torch.uint16).numpy().reshape(-1).copy())
            for name, p in self._model.named_parameters()
        ]


def _spread(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Float32 values that round to these bf16 ones, uniform over their intervals: as bits, the lower half moves."""
    bits = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    offsets = torch.randint(-0x7FFF, 0x8000, weights.shape, generator=generator, dtype=torch.int32)
    offsets = torch.where(bits & 0x7FFFFFFF == 0, offsets.abs(), offsets)  # below zero there is its own sign
    return (bits + offsets).view(torch.float32)


def pair(learning_rate: float, state: str) -> Pair:
    """Made where it is not in the cache yet."""
    folder = _folder(learning_rate, state)
    if not (folder / "new").exists():
        if state == "fresh":
            _step(folder, Training(learning_rate, spread=False))
        else:
            _make_steady()
    return Pair(learning_rate, state, _read(folder / "base"), _read(folder / "new"))


def _folder(learning_rate: float, state: str) -> Path:
    return CACHE / f"{learning_rate:g}-{state}"


def _make_steady() -> None:
    training = Training(sorted(RATES)[len(RATES) // 2], spread=True)
    for at in range(WARM_STEPS):
        training.step()
        print(f"steady: step {at + 1} of {WARM_STEPS}", file=sys.stderr)
    for rate in RATES:
        training.go_on_at(rate)
        training.step()
        _step(_folder(rate, "steady"), training)


def _step(folder: Path, training: Training) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "base", training.tensors())
    training.step()
    _write(folder / "new", training.tensors())


def _write(path: Path, tensors: list[HostTensor]) -> None:
    write_file(path.with_suffix(".part"), tensors)
    path.with_suffix(".part").rename(path)


def _read(path: Path) -> list[HostTensor]:
    return [HostTensor(t.name, t.dtype, t.shape, t.bits.copy()) for t in read_file(path)]


def densities(learning_rate: float, steps: int, every: int = 5) -> list[dict[str, Any]]:
    """Of a run from the checkpoint, every so many steps: the share of elements that the step changes, and the share
    that it would change if the masters before it were drawn from their rounding intervals."""
    training, found = Training(learning_rate, spread=False), []
    generator = torch.Generator().manual_seed(2)
    for at in range(1, steps + 1):
        if at % every and at != 1:
            training.step()
            continue
        before = [master.clone() for master in training.masters]
        training.step()
        own = drawn = total = 0
        for old, new in zip(before, training.masters):
            weights = old.bfloat16()
            moved = _spread(weights, generator) + (new - old)
            own += int((new.bfloat16().view(torch.int16) != weights.view(torch.int16)).sum())
            drawn += int((moved.bfloat16().view(torch.int16) != weights.view(torch.int16)).sum())
            total += old.numel()
        found.append({"step": at, "own": round(own / total, 6), "drawn": round(drawn / total, 6)})
        print(f"{learning_rate:g}: {found[-1]}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--check", type=int, metavar="STEPS")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.check is None:
        for rate in asked.rates:
            for state in STATES:
                made = pair(rate, state)
                changed = sum(int(np.count_nonzero(a.bits != b.bits)) for a, b in zip(made.base, made.new))
                print(f"{rate:g} {state}: {changed} of {sum(t.bits.size for t in made.new)} elements")
        return
    found = {"learning_rate": asked.rates[-1], "densities": densities(asked.rates[-1], asked.check)}
    text = json.dumps(found)
    print(text) if asked.json is None else asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
