"""The reward of the virtual world: a function of prompt and response that takes its time and sometimes fails."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from turnout.core.ports import Clock
from turnout.sim.faults import Faults

HANGS_S = 1e5


class Decoder:
    """A tokenizer's part: a text that differs where token ids do. No simulated engine makes an end token."""

    eos_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=8).hexdigest()


def value_of(response: str) -> float:
    """0, 0.5 or 1 by the response's text."""
    return int(response[:4], 16) % 3 / 2


def make_reward(clock: Clock, faults: Faults) -> Callable[..., Any]:
    """The reward function of one controller."""

    async def reward(prompt: str, response: str, label: Any) -> float:
        del prompt, label
        await clock.sleep(faults.uniform(0.01, 0.3))
        if faults.hit("reward_failed", 0.002, "reward"):
            raise ValueError("the grader broke")
        if faults.hit("reward_hangs", 0.002, "reward"):
            await clock.sleep(HANGS_S)
        return value_of(response)

    return reward
