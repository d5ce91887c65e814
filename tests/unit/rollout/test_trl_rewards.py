"""Reward functions as they are written for TRL's GRPOTrainer, unchanged."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnout.core.errors import ConfigError
from turnout.core.types import Finish, Prompt, Trajectory
from turnout.placement.real import RealClock
from turnout.rollout.rewards import RewardRunner, Scored
from turnout.rollout.trl_rewards import TrlRewards, load_trl_rewards

TALK = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 2?"}]
PLAIN = {"prompt": "2 + 2?", "answer": "4", "task": "math"}


def format_reward(completions: Any, **kwargs: Any) -> list[float]:
    """Of messages, by their format."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]


def correctness_reward(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    """Of messages, by a column."""
    assert prompts[0][-1]["content"] == "2 + 2?"
    return [2.0 if a in completion[0]["content"] else 0.0 for completion, a in zip(completions, answer)]


def plain_length(completion_ids: Any, **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def only_math(prompts: Any, completions: Any, task: Any) -> list[float | None]:
    """Of texts; says nothing of other tasks, and takes nothing that it does not name."""
    assert prompts == ["2 + 2?"] * len(prompts)
    return [1.0 if t == "math" and "4" in c else None for c, t in zip(completions, task)]


def only_code(completions: Any, task: Any, log_metric: Any, **kwargs: Any) -> list[float | None]:
    log_metric("codes", 0.5)
    return [1.0 if t == "code" else None for t in task]


async def slow_judge(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.25 for _ in completions]


def by_rank(completions: Any, **kwargs: Any) -> Any:
    """Compares all that it is given."""
    lengths = np.array([len(c) for c in completions])
    return (lengths == lengths.max()).astype(float)


def score(row: dict[str, Any], texts: list[str], *functions: Any, whole: bool = False) -> list[Scored]:
    prompt = Prompt("0", (1,), "rendered", None, {"row": row, "other": 1})
    made = [
        replace(
            Trajectory.unbegun(0), finish=Finish.STOP, text=text, response_ids=(5,) * len(text),
            logprobs=(0.0,) * len(text), loss_mask=(1,) * len(text), kv_mixed=(),
            spans=Trajectory.unbegun(0).spans.extended(len(text), "v"),
            engines=Trajectory.unbegun(0).engines.extended(len(text), "e"),
        )
        for text in texts
    ]  # fmt: skip
    reward = TrlRewards([f if isinstance(f, tuple) else (f, 1.0) for f in functions], ("input", "prompt"))

    async def main() -> list[Scored]:
        runner = RewardRunner(reward, RealClock(), 30.0, whole=whole)
        if whole:
            return await runner.score_group(prompt, made)
        return [await runner.score(prompt, one) for one in made]

    return asyncio.run(main())


def test_conversational_functions_get_messages_and_columns() -> None:
    row = {"prompt": TALK, "answer": "4"}
    texts = ["<think>so</think>4", "five", "4"]
    assert score(row, texts, format_reward) == [Scored(1.0), Scored(0.0), Scored(0.0)]
    both = score(row, texts, (format_reward, 0.5), (correctness_reward, 1.0))
    assert both == [Scored(2.5), Scored(0.0), Scored(2.0)]
    assert score({"input": TALK, "answer": "4"}, texts[2:], correctness_reward) == [Scored(2.0)]


def test_plain_functions_get_texts_and_exact_ids() -> None:
    assert score(PLAIN, ["4", "abc"], plain_length) == [Scored(1.0), Scored(3.0)]
    assert score(PLAIN, ["4"], only_math, slow_judge, (plain_length, 10.0)) == [Scored(11.25)]


def test_none_is_no_part_of_the_sum_and_all_none_is_no_reward() -> None:
    assert score(PLAIN, ["4", "5"], only_math, only_code) == [Scored(1.0), Scored(None, "returned None")]
    assert score({**PLAIN, "task": "code"}, ["x"], only_math, only_code) == [Scored(1.0)]


def test_a_group_is_one_call_and_may_be_compared() -> None:
    assert score(PLAIN, ["a", "abc", "abc"], by_rank, whole=True) == [Scored(0.0), Scored(1.0), Scored(1.0)]
    with_none = score(PLAIN, ["4", "5"], only_math, whole=True)
    assert with_none == [Scored(1.0), Scored(None, "returned None")]


def gives_a_number(completions: Any, **kwargs: Any) -> Any:
    return 1.0


def gives_nan(completions: Any, **kwargs: Any) -> Any:
    return [float("nan")]


def needs_a_column(completions: Any, solution: Any, **kwargs: Any) -> Any:
    return [1.0]


@pytest.mark.parametrize(
    "function, why",
    [(gives_a_number, "gives_a_number returned float, not a list of 1"), (gives_nan, "gives_nan returned nan"),
     (needs_a_column, "missing 1 required positional argument: 'solution'")],
)  # fmt: skip
def test_what_is_no_reward_is_unscored_with_the_functions_name(function: Any, why: str) -> None:
    (scored,) = score(PLAIN, ["4"], function)
    assert scored.value is None and why in scored.why


def test_a_function_that_hangs_is_left_behind() -> None:
    def hangs(completions: Any, **kwargs: Any) -> list[float]:
        time.sleep(1)
        return [1.0]

    async def main() -> Scored:
        runner = RewardRunner(TrlRewards([(hangs, 1.0)], ("prompt",)), RealClock(), 0.1)
        prompt = Prompt("0", (1,), "p", None, {"row": PLAIN})
        return await runner.score(prompt, replace(Trajectory.unbegun(0), finish=Finish.STOP, text="r"))

    assert asyncio.run(main()).why == "no answer within 0.1 s"


def test_the_deadline_of_a_call_begins_with_its_turn() -> None:
    """64 calls for 8 threads are longer than the deadline, each is not."""

    def slow(completions: Any, **kwargs: Any) -> list[float]:
        time.sleep(0.2)
        return [1.0]

    async def main() -> list[Scored]:
        runner = RewardRunner(TrlRewards([(slow, 1.0), (slow_judge, 1.0)], ("prompt",)), RealClock(), 1.5)
        prompt = Prompt("0", (1,), "p", None, {"row": PLAIN})
        made = replace(Trajectory.unbegun(0), finish=Finish.STOP, text="r")
        return await asyncio.gather(*(runner.score(prompt, made) for _ in range(64)))

    assert asyncio.run(main()) == [Scored(1.25)] * 64


def test_a_call_that_is_left_behind_is_counted_once() -> None:
    release = threading.Event()

    def waits(completions: Any, **kwargs: Any) -> list[float]:
        release.wait(60)
        return [1.0]

    async def main() -> None:
        reward = TrlRewards([(waits, 1.0)], ("prompt",))
        runner = RewardRunner(reward, RealClock(), 0.05)
        prompt = Prompt("0", (1,), "p", None, {"row": PLAIN})
        made = replace(Trajectory.unbegun(0), finish=Finish.STOP, text="r")
        await asyncio.gather(*(runner.score(prompt, made) for _ in range(9)))
        assert "never came back" in (await runner.score(prompt, made)).why
        assert reward._threads.left_behind == 8
        release.set()

    asyncio.run(main())


def changes_its_rows(prompts: Any, completions: Any, tags: Any, **kwargs: Any) -> list[float]:
    count = float(len(tags[0]))
    for items in (*tags, prompts, completions):
        items.append("mine")
    return [count] * len(tags)


def test_a_function_that_changes_its_rows_changes_nobody_elses() -> None:
    row = {**PLAIN, "tags": ["a"]}
    assert score(row, ["4", "5"], changes_its_rows, changes_its_rows) == [Scored(2.0)] * 2
    assert row == {**PLAIN, "tags": ["a"]}
    assert score(row, ["4", "5"], changes_its_rows, changes_its_rows, whole=True) == [Scored(2.0)] * 2


def test_functions_are_loaded_with_their_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def good(completions, **kwargs): ...\ndef trains(completions, trainer_state): ...\n")
    assert load_trl_rewards({f"{path}:good": 2}, ("prompt",))._functions[0][1] == 2.0
    with pytest.raises(ConfigError, match="needs a trainer_state"):
        load_trl_rewards({f"{path}:trains": 1}, ("prompt",))
    with pytest.raises(ConfigError, match="no function 'absent'"):
        load_trl_rewards({f"{path}:absent": 1}, ("prompt",))
