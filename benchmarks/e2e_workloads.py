"""The work that `benchmarks.e2e` gives to both sides: texts that tokenize to the same ids on both.

Promises: all prompts of a workload have the same number of tokens, so that no side pads; no prompt comes twice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

GROUP_SIZE = 8
PROMPTS_PER_STEP = 8
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Workload:
    """A kind of prompt and the exact number of new tokens. `trl_micro_batch` is TRL's fastest that fits in 24 GiB,
    `turnout_pack` Turnout's, in tokens."""

    name: str
    new_tokens: int
    examples: int
    trl_micro_batch: int
    turnout_pack: int

    @property
    def samples_per_step(self) -> int:
        return GROUP_SIZE * PROMPTS_PER_STEP

    @property
    def tokens_per_step(self) -> int:
        """Response tokens of one optimizer step."""
        return self.samples_per_step * self.new_tokens


WORKLOADS = {
    w.name: w
    for w in (
        Workload("short", new_tokens=16, examples=0, trl_micro_batch=64, turnout_pack=4096),
        Workload("fixed64", new_tokens=64, examples=0, trl_micro_batch=32, turnout_pack=8192),
        Workload(
            "long_prompt",
            new_tokens=32,
            examples=39,  # 12 tokens each
            trl_micro_batch=8,
            turnout_pack=8192,
        ),
    )
}


@dataclass(frozen=True)
class Prompts:
    """`steps[i]` are the texts of step i, each `tokens` long."""

    steps: list[list[str]]
    tokens: int


def make_prompts(workload: Workload, model: Path, steps: int, seed: int) -> Prompts:
    """Two-digit sums in the model's chat template; a long prompt has other sums, solved, before its question.

    Raises ValueError where the tokenizer makes prompts of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(f"{workload.name}-{seed}")
    wanted = steps * PROMPTS_PER_STEP
    texts: dict[str, int] = {}
    while len(texts) < wanted:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _question(draw, workload.examples)}],
            tokenize=False,
            add_generation_prompt=True,
        )
        texts[text] = len(tokenizer.encode(text, add_special_tokens=False))
    lengths = set(texts.values())
    if len(lengths) != 1:
        raise ValueError(f"prompts of {workload.name} have different lengths in tokens: {sorted(lengths)}")
    flat = list(texts)
    rows = [flat[i : i + PROMPTS_PER_STEP] for i in range(0, wanted, PROMPTS_PER_STEP)]
    return Prompts(rows, lengths.pop())


def _question(draw: random.Random, examples: int) -> str:
    lines: list[str] = []
    for _ in range(examples):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        lines.append(f"{a} + {b} = {a + b:03d}\n")
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return "".join(lines) + f"What is {a} + {b}? Answer with the number only."
