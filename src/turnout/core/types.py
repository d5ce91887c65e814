"""What travels from prompt to gradient. Lists carry their axes: _P prompts, _G members of a group, _T tokens.

Legend: T = tokens of one response. `response_ids`, `logprobs`, `loss_mask` and the sum of the version spans
have the same length T, checked when a Trajectory is made (invariant 2 of docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from turnout.core.errors import InvariantBroken
from turnout.core.version import VersionSpans


class Finish(StrEnum):
    """Why a response ended. ABORT is never a natural stop and never trains as one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Prompt:
    """One task. `prompt_id` is unique in the data set and stable over runs; `token_ids` is the only source
    of the prompt for engine and trainer alike."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One sampled response. `logprobs` are log-softmax(logits / temperature) over the whole vocabulary, as
    sampled; `loss_mask` is 1 where a token may train. `reward` is None until scored."""

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    spans: VersionSpans
    finish: Finish
    text: str
    engine_id: str
    seed: int
    reward: float | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.logprobs), len(self.loss_mask), len(self.spans)}
        if len(lengths) != 1:
            raise InvariantBroken(
                f"tokens, log-probs, mask and spans differ in length: {len(self.response_ids)}, "
                f"{len(self.logprobs)}, {len(self.loss_mask)}, {len(self.spans)}"
            )


@dataclass(frozen=True)
class RolloutGroup:
    """The n samples of one prompt. `group_id` never repeats in a run; `ordinal` is its place in the source."""

    group_id: str
    ordinal: int
    attempt: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...] = ()

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored members, in member order."""
        return [t.reward for t in self.trajectories if t.reward is not None]


@dataclass(frozen=True)
class TrainSample:
    """One sequence for the trainer: prompt and response ids, the behaviour log-probs of the response, its
    mask and its advantage (one number per response token, length T)."""

    group_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    advantages: tuple[float, ...]


@dataclass(frozen=True)
class TrainBatch:
    """All samples of one train step, ordered by group id and member so that packing is repeatable.
    `version` is the label that every token of the batch was sampled with (sync), else its oldest."""

    step: int
    version: str
    samples: tuple[TrainSample, ...]

    @property
    def response_tokens(self) -> int:
        return sum(sum(s.loss_mask) for s in self.samples)
