"""The samples that both sides of `benchmarks.trainer` train on: seeded, the same on both."""

from __future__ import annotations

import random
from dataclasses import dataclass

from turnout.core.types import TrainSample

GROUP = 8
WORDS = 250  # ids of any vocabulary here


@dataclass(frozen=True)
class Work:
    """`groups` groups of GROUP samples with one prompt each; `tail`: lengths of responses are long-tailed up to
    `response`, else all are `response`."""

    groups: int
    prompt: int
    response: int
    tail: bool


WORK = {
    "shared": Work(8, prompt=48, response=128, tail=True),
    "long_prompt": Work(8, prompt=512, response=64, tail=True),
    "fixed": Work(8, prompt=8, response=64, tail=False),
}


def samples_of(work: Work, share: int) -> list[TrainSample]:
    """The samples of a step; `share` divides the number of groups."""
    rng = random.Random(7)
    found: list[TrainSample] = []
    for group in range(max(1, work.groups // share)):
        prompt = tuple(rng.randrange(WORDS) for _ in range(work.prompt))
        for member in range(GROUP):
            drawn = 8 + int(rng.expovariate(4 / work.response)) if work.tail else work.response
            count = min(work.response, drawn)
            response = tuple(rng.randrange(WORDS) for _ in range(count))
            sign = 1.0 if member % 2 else -1.0
            mask, logprobs = (1,) * count, (-5.0,) * count
            found.append(TrainSample(f"g{group}", prompt, response, logprobs, mask, (sign,) * count))
    return found
