"""Invariant 2: tokens, log-probs, mask and spans of a trajectory have one length."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import InvariantBroken
from turnout.core.types import Finish, Prompt, RolloutGroup, TrainBatch, TrainSample, Trajectory
from turnout.core.version import VersionSpans


def trajectory(tokens: int, logprobs: int, mask: int, spans: int, **more: Any) -> Trajectory:
    return Trajectory(
        response_ids=(1,) * tokens,
        logprobs=(-0.5,) * logprobs,
        loss_mask=(1,) * mask,
        spans=VersionSpans().extended(spans, "v"),
        finish=Finish.STOP,
        text="",
        engine_id="e",
        seed=0,
        **more,
    )


@given(st.tuples(*[st.integers(0, 3)] * 4))
def test_a_trajectory_is_made_only_of_one_length(lengths: tuple[int, int, int, int]) -> None:
    if len(set(lengths)) == 1:
        assert len(trajectory(*lengths).response_ids) == lengths[0]
        return
    with pytest.raises(InvariantBroken) as caught:
        trajectory(*lengths)
    assert ", ".join(map(str, lengths)) in str(caught.value)


def test_rewards_leave_out_the_unscored() -> None:
    members = tuple(trajectory(1, 1, 1, 1, reward=reward) for reward in (0.0, None, 1.0))
    assert RolloutGroup("g", 0, 0, Prompt("p", (1,), ""), members).rewards == [0.0, 1.0]


def test_response_tokens_of_a_batch_are_those_that_train() -> None:
    sample = TrainSample("g", (1,), (1, 2, 3), (0.0,) * 3, (1, 0, 1), (0.0,) * 3)
    assert TrainBatch(0, "v", (sample, sample)).response_tokens == 4
