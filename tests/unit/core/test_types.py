"""Invariant 2: all that is known per token of a trajectory has one length, also when it is cut and joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import InvariantBroken
from turnout.core.types import Finish, Prompt, RolloutGroup, TrainBatch, TrainSample, Trajectory
from turnout.core.version import Runs, VersionSpans


def trajectory(tokens: int, logprobs: int, mask: int, spans: int, engines: int, **more: Any) -> Trajectory:
    return Trajectory(
        response_ids=(1,) * tokens,
        logprobs=(-0.5,) * logprobs,
        loss_mask=(1,) * mask,
        spans=VersionSpans().extended(spans, "v"),
        finish=Finish.STOP,
        text="",
        engines=Runs().extended(engines, "e"),
        seed=0,
        **more,
    )


@given(st.tuples(*[st.integers(1, 3)] * 6))
def test_a_trajectory_is_made_only_of_one_length(lengths: tuple[int, int, int, int, int, int]) -> None:
    *sizes, marks = lengths
    if len(set(lengths)) == 1:
        assert len(trajectory(*sizes, kv_mixed=(0,) * marks).response_ids) == lengths[0]
        return
    with pytest.raises(InvariantBroken) as caught:
        trajectory(*sizes, kv_mixed=(0,) * marks)
    assert ", ".join(map(str, lengths)) in str(caught.value)


TOKENS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from("uv"), st.sampled_from("de"), st.integers(0, 1)), max_size=12
)


def of(rows: list[tuple[int, str, str, int]]) -> Trajectory:
    """A partial trajectory of (token, version, engine, KV mark)."""
    made = Trajectory.unbegun(7)
    for token, version, engine, mixed in rows:
        spans, engines = VersionSpans(((1, version),)), Runs(((1, engine),))
        one = Trajectory(
            (token,), (-float(token),), (1 - mixed,), spans, Finish.ABORT, "", engines, 7, None, (mixed,)
        )
        made = made.joined(one)
    return made


@given(TOKENS, TOKENS, st.integers(0, 30))
def test_what_is_cut_and_joined_is_the_list_of_its_tokens(
    rows: list[tuple[int, str, str, int]], more: list[tuple[int, str, str, int]], cut: int
) -> None:
    assert of(rows).joined(of(more)) == of(rows + more)
    whole = replace(of(rows), finish=Finish.STOP, text="text", reward=1.0)
    assert whole.cut(cut) == of(rows[:cut])
    assert whole.cut(cut).joined(whole.after(cut)) == whole
    assert of(more).joined(whole) == replace(of(more + rows), finish=Finish.STOP, text="text", reward=1.0)


def test_nothing_follows_an_end_or_another_member() -> None:
    ended = trajectory(1, 1, 1, 1, 1)
    with pytest.raises(InvariantBroken, match="no tokens follow a stop"):
        ended.joined(Trajectory.unbegun(0))
    with pytest.raises(InvariantBroken, match="seed 1: 2"):
        Trajectory.unbegun(1).joined(Trajectory.unbegun(2))


def test_rewards_leave_out_the_unscored() -> None:
    members = tuple(trajectory(1, 1, 1, 1, 1, reward=reward) for reward in (0.0, None, 1.0))
    assert RolloutGroup("g", 0, 0, Prompt("p", (1,), ""), members).rewards == [0.0, 1.0]


def test_response_tokens_of_a_batch_are_those_that_train() -> None:
    sample = TrainSample("g", (1,), (1, 2, 3), (0.0,) * 3, (1, 0, 1), (0.0,) * 3)
    assert TrainBatch(0, "v", (sample, sample)).response_tokens == 4
