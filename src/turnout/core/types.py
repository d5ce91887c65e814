"""What travels from prompt to gradient. Lists carry their axes: _P prompts, _G members of a group, _T tokens.

Legend: T = tokens of one response. `response_ids`, `logprobs`, `loss_mask`, the sum of the version spans, that of
the engines, `kv_mixed` and, where anything is recorded, `routed` have the same length T, checked when a Trajectory
is made, so they are extended, cut and joined together or not at all (invariant 2 of docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from turnout.core.errors import InvariantBroken
from turnout.core.record import record
from turnout.core.routed import ROUTED_NONE, RoutedExperts
from turnout.core.version import Runs, VersionSpans

T = TypeVar("T")
ENVIRONMENT = "environment"  # in the place of an engine's id: tokens that no model made


class Finish(StrEnum):
    """Why a response ended. ABORT is never a natural stop and never trains as one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


_ABORT = Finish.ABORT  # to look a member up takes longer than to compare it


def but(one: T, **changes: Any) -> T:
    """The same dataclass with other values for some fields, unchecked. Every sample and request comes by
    here; `replace` takes four times as long and checks all lists again."""
    made = object.__new__(type(one))
    fields = made.__dict__
    fields |= one.__dict__
    fields |= changes
    return made


@dataclass(frozen=True)
class Prompt:
    """One task. `prompt_id` is unique in the data set and stable over runs; `token_ids` is the only source
    of the prompt for engine and trainer alike."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@record
class Trajectory:
    """One sampled response, or the first tokens of one (`finish` ABORT, no text, no reward). `logprobs` are
    log-softmax(logits / temperature) over the whole vocabulary, as sampled; `loss_mask` is 1 where a token may
    train; `engines` are the ids of those that made the tokens. `kv_mixed` is 1 where a token was made on KV of
    older weights than its own (given as (): nowhere). `reward` is None until scored. `seed` tells the members of a
    group apart. `routed`: the experts of a mixture that each token's position went through."""

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    spans: VersionSpans
    finish: Finish
    text: str
    engines: Runs
    seed: int
    reward: float | None = None
    kv_mixed: tuple[int, ...] = ()
    routed: RoutedExperts = ROUTED_NONE

    def __post_init__(self) -> None:
        count = len(self.response_ids)
        if not self.kv_mixed:
            object.__setattr__(self, "kv_mixed", (0,) * count)
        same = len(self.logprobs) == len(self.loss_mask) == len(self.kv_mixed) == count
        same = same and len(self.spans) == len(self.engines) == count
        if not same or (self.routed.width and len(self.routed) != count):
            rest = (self.logprobs, self.loss_mask, self.spans, self.engines, self.kv_mixed)
            inner = [len(part) for part in rest] + [len(self.routed)] * (self.routed.width > 0)
            raise InvariantBroken(
                "tokens, log-probs, mask, spans, engines, KV marks and routed experts differ in length: "
                + ", ".join(map(str, (count, *inner)))
            )

    @classmethod
    def unbegun(cls, seed: int) -> Trajectory:
        """No token yet."""
        return but(_UNBEGUN, seed=seed)

    @property
    def partial(self) -> bool:
        """Whether it has not come to its end: never scored, never trained."""
        return self.finish is _ABORT

    @property
    def opening(self) -> int:
        """How many tokens it begins with that no model made: what an agent put in front of its first turn."""
        first = self.engines.runs[:1]
        return first[0][0] if first and first[0][1] == ENVIRONMENT else 0

    def cut(self, tokens: int) -> Trajectory:
        """Its first tokens, as what it was before the others were made."""
        return Trajectory(
            self.response_ids[:tokens],
            self.logprobs[:tokens],
            self.loss_mask[:tokens],
            self.spans.cut(tokens),
            Finish.ABORT,
            "",
            self.engines.cut(tokens),
            self.seed,
            kv_mixed=self.kv_mixed[:tokens],
            routed=self.routed.cut(tokens),
        )

    def after(self, tokens: int) -> Trajectory:
        """All but its first tokens, with how it ended: `cut(n).joined(after(n))` is the whole."""
        if not tokens:
            return self
        return Trajectory(
            self.response_ids[tokens:],
            self.logprobs[tokens:],
            self.loss_mask[tokens:],
            self.spans.after(tokens),
            self.finish,
            self.text,
            self.engines.after(tokens),
            self.seed,
            self.reward,
            self.kv_mixed[tokens:],
            self.routed.after(tokens),
        )

    def joined(self, more: Trajectory) -> Trajectory:
        """This one followed by what was made after it; how it ended, its text and its reward are those of `more`.
        Raises InvariantBroken where this one has ended, or `more` belongs to another."""
        if not self.partial or self.seed != more.seed:
            raise InvariantBroken(f"no tokens follow a {self.finish} of seed {self.seed}: {more.seed}")
        routed, counts = self.routed, (len(self.response_ids), len(more.response_ids))
        return replace(
            more,
            response_ids=self.response_ids + more.response_ids,
            logprobs=self.logprobs + more.logprobs,
            loss_mask=self.loss_mask + more.loss_mask,
            spans=self.spans.joined(more.spans),
            engines=self.engines.joined(more.engines),
            kv_mixed=self.kv_mixed + more.kv_mixed,
            routed=routed.joined(more.routed, counts),
        )


_UNBEGUN = Trajectory((), (), (), VersionSpans(), Finish.ABORT, "", Runs(), 0)


@record
class RolloutGroup:
    """The n samples of one prompt. `group_id` never repeats in a run; `ordinal` is its place in the source."""

    group_id: str
    ordinal: int
    attempt: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether a member of it was cut."""
        return any(t.partial for t in self.trajectories)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored members, in member order."""
        return [t.reward for t in self.trajectories if t.reward is not None]


@record
class TrainSample:
    """One sequence for the trainer: prompt and response ids, the behaviour log-probs of the response, its
    mask and its advantage (one number per response token, length T). `lags` is each token's age in train
    steps; empty means that all are 0. `reference`: log-probs of a reference, where another than the trainer has
    them; `teacher`: those of a teacher, where one is imitated. `reward` is that of the whole response.
    `routed`: rows of turnout.core.routed for all positions but the last; empty where nothing is recorded."""

    group_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    advantages: tuple[float, ...]
    lags: tuple[int, ...] = ()
    reference: tuple[float, ...] = ()
    reward: float = 0.0
    teacher: tuple[float, ...] = ()
    routed: bytes = b""


@dataclass(frozen=True)
class TrainBatch:
    """All samples of one train step, ordered by group id and member so that packing is repeatable.
    `version` is the label that every token of the batch was sampled with (sync), else its oldest."""

    step: int
    version: str
    samples: tuple[TrainSample, ...]

    @property
    def response_tokens(self) -> int:
        return sum([s.loss_mask.count(1) for s in self.samples])
