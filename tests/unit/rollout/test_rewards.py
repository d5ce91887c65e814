"""Outcomes of reward calls (ROL-17), loading by path, and the built-in rewards."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnout.core.errors import ConfigError
from turnout.core.types import ENVIRONMENT, Finish, Prompt, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.placement.real import RealClock
from turnout.placement.tasks import Part, Parts
from turnout.rollout.builtin_rewards import BUILTIN, exact, f1, last_number, math
from turnout.rollout.rewards import Reward, RewardRunner, Scored, load_reward

DEADLINE_S = 0.1
ASKED, MADE = Prompt("0", (1,), "p"), replace(Trajectory.unbegun(0), finish=Finish.STOP, text="r")


def run(reward: Reward, metadata: dict[str, Any] | None = None, deadline_s: float = 5.0) -> Scored:
    async def main() -> Scored:
        return await RewardRunner(reward, RealClock(), deadline_s).score(
            Prompt("0", (1,), "p", "l", metadata or {}), MADE
        )

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0, 0.0),
        (-0.5, -0.5),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int64(2), 2.0),
    ],
)
def test_rol_17_numbers_are_scores(value: Any, score: float) -> None:
    scored = run(lambda p, r, label: value)
    assert scored == Scored(score)
    assert type(scored.value) is float


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "returned None"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("0.5", "returned the text '0.5', not a number"),
        ({"score": 1}, "returned dict, not a number"),
        ([1.0], "returned list, not a number"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_rol_17_everything_else_is_unscored_and_never_zero(value: Any, why: str, is_async: bool) -> None:
    async def later(p: str, r: str, label: Any) -> Any:
        return value

    assert run(later if is_async else lambda p, r, label: value) == Scored(None, why)


@pytest.mark.parametrize(
    "fault", [ValueError("no"), SystemExit(3), StopIteration("end"), asyncio.CancelledError()]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_rol_17_an_exception_is_unscored(fault: BaseException, is_async: bool) -> None:
    def fails(p: str, r: str, label: Any) -> float:
        raise fault

    async def fails_async(p: str, r: str, label: Any) -> float:
        raise fault

    if is_async and isinstance(fault, SystemExit):
        pytest.skip("an event loop ends on SystemExit by Python's own rule")
    scored = run(fails_async if is_async else fails)
    assert scored.value is None
    assert "raised" in scored.why


def test_rol_17_a_hanging_grader_is_cut_and_the_event_loop_stays_free() -> None:
    release = threading.Event()

    def hangs(p: str, r: str, label: Any) -> float:
        release.wait(30)
        return 1.0

    async def main() -> None:
        runner = RewardRunner(hangs, RealClock(), DEADLINE_S, workers=2)
        lags: list[float] = []
        task = asyncio.gather(*(runner.score(ASKED, MADE) for _ in range(2)))
        while not task.done():
            start = time.monotonic()
            await asyncio.sleep(0.005)
            lags.append(time.monotonic() - start - 0.005)
        assert [s.why for s in await task] == ["no answer within 0.1 s"] * 2
        assert sorted(lags)[len(lags) // 2] < 0.05
        await asyncio.sleep(0.05)
        assert runner.left_behind == 2
        refused = await runner.score(ASKED, MADE)
        assert refused == Scored(None, "not called: 2 earlier calls never came back")
        release.set()
        for _ in range(200):
            if runner.left_behind == 0:
                break
            await asyncio.sleep(0.01)
        assert (await runner.score(ASKED, MADE)).value == 1.0

    asyncio.run(main())


def test_an_async_grader_that_ignores_its_cancellation_does_not_hold_the_batch() -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def stubborn(p: str, r: str, label: Any) -> float:
            while not release.is_set():
                try:
                    await asyncio.wait_for(release.wait(), 30)
                except asyncio.CancelledError:
                    continue
            return 1.0

        runner = RewardRunner(stubborn, RealClock(), DEADLINE_S)
        scored = await asyncio.wait_for(runner.score(ASKED, MADE), 5)
        assert scored == Scored(None, "no answer within 0.1 s")
        release.set()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_sync_graders_run_at_most_workers_at_a_time() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def counts(p: str, r: str, label: Any) -> float:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return 1.0

    async def main() -> None:
        runner = RewardRunner(counts, RealClock(), 5.0, workers=3)
        scored = await asyncio.gather(*(runner.score(ASKED, MADE) for _ in range(12)))
        assert all(s.value == 1.0 for s in scored)

    asyncio.run(main())
    assert most[0] == 3


def test_async_graders_run_as_many_as_are_asked_for() -> None:
    async def scores() -> None:
        running, all_run = 0, asyncio.Event()

        async def waits(_prompt: str, _response: str, _label: Any) -> float:
            nonlocal running
            running += 1
            if running == 200:
                all_run.set()
            await all_run.wait()
            return 1.0

        runner = RewardRunner(waits, RealClock(), 5.0, workers=2)
        scored = await asyncio.gather(*(runner.score(ASKED, MADE) for _ in range(200)))
        assert {s.value for s in scored} == {1.0}

    asyncio.run(scores())


def test_threads_are_used_again() -> None:
    async def scores() -> None:
        runner = RewardRunner(lambda p, r, label: float(threading.get_ident()), RealClock(), 5.0, workers=2)
        scored = [await runner.score(ASKED, MADE) for _ in range(20)]
        assert len({s.value for s in scored}) <= 2

    asyncio.run(scores())


def test_cancelling_the_caller_cancels_the_call() -> None:
    async def main() -> None:
        runner = RewardRunner(lambda p, r, label: asyncio.sleep(30), RealClock(), 60.0)
        task = asyncio.create_task(runner.score(ASKED, MADE))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)

    asyncio.run(main())


def test_an_async_grader_has_one_task_from_start_to_end() -> None:
    """The member's, so that its own timeouts and scopes end where they began."""

    async def asks(p: str, r: str, label: Any) -> float:
        mine = asyncio.current_task()
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            await asyncio.sleep(0)
        assert asyncio.current_task() is mine and mine is not None and not mine.cancelling()
        return 0.5

    assert run(asks) == Scored(0.5)


@pytest.mark.parametrize("holds", ["returns", "raises"])
def test_a_member_whose_grader_ends_after_its_deadline_is_unscored(holds: str) -> None:
    async def late(p: str, r: str, label: Any) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if holds == "raises":
                raise ValueError("cut") from None
        return 1.0

    async def main() -> None:
        runner, went_on = RewardRunner(late, RealClock(), DEADLINE_S), list[Scored]()

        async def member(part: Part[Scored], _item: int) -> Scored:
            scored = await runner.score(ASKED, MADE, part)
            went_on.append(scored)
            return scored

        made = await Parts[Scored]().made([0, 1], member)
        assert made == [Scored(None, "no answer within 0.1 s")] * 2
        await asyncio.sleep(0)
        assert not went_on, "a member that was left has its outcome already"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_grader_that_cancels_its_own_task_is_unscored() -> None:
    async def cancels(p: str, r: str, label: Any) -> float:
        mine = asyncio.current_task()
        assert mine is not None
        mine.cancel()
        await asyncio.sleep(60)
        return 1.0

    assert run(cancels) == Scored(None, "raised CancelledError")


def test_metadata_goes_to_those_who_name_it_or_take_all() -> None:
    metadata = {"a": 1, "b": 2, "label": "other"}
    assert run(lambda p, r, label, a: a, metadata) == Scored(1.0)
    assert run(lambda p, r, label, *, b: b, metadata) == Scored(2.0)
    assert run(lambda p, r, label: 3, metadata) == Scored(3.0)
    assert run(lambda prompt, response, label, **m: sum(m.values()), metadata) == Scored(3.0)
    assert "raised TypeError" in run(lambda p, r, label, missing: 0, metadata).why


def test_rewards_load_by_file_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_module.py").write_text(
        "def half(prompt, response, label, **metadata):\n    return 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    for text in (f"{tmp_path}/my_reward_module.py:half", "my_reward_module:half", "my_reward_module.half"):
        assert run(load_reward(text)) == Scored(0.5)
    assert all(load_reward(name) is BUILTIN[name] for name in BUILTIN)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing", "is no reward"),
        ("os.path:nothing", "has no function 'nothing'"),
        ("no_such_module_here:f", "cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:f", "no such file"),
        ("broken.py:f", "cannot be imported: ZeroDivisionError"),
        ("os:sep", "has no function 'sep'"),
        ("short.py:one", "cannot be called with three arguments"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_told_at_start(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "short.py").write_text("def one(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="refused") as caught:
        load_reward(text)
    assert reason in str(caught.value)
    assert "--custom-rm-path" in str(caught.value)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("1,234", "1234", 1.0),
        ("it is -5", "-5", 1.0),
        ("10-5", "5", 1.0),
        ("The answer is 42.", "42", 1.0),
        ("42.0", 42, 1.0),
        ("41 or 42", "41", 0.0),
        ("3.5", 3.5, 1.0),
        ("007", "7", 1.0),
        ("no number", "7", 0.0),
        ("", "7", 0.0),
        ("1,2,3", "3", 1.0),
        ("1e3", "1000", 1.0),
        ("\u22125", "-5", 1.0),
        ("x = 12,345.50!", "12345.5", 1.0),
    ],
)
def test_last_number(response: str, label: Any, score: float) -> None:
    assert last_number("", response, label) == score


@pytest.mark.parametrize("label", ["seven", None, True, ["7"], "7 apples", ""])
def test_last_number_refuses_a_label_that_is_no_number(label: Any) -> None:
    with pytest.raises(ValueError, match="label"):
        last_number("", "7", label)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (" Paris \n", "Paris", 1.0),
        ("I think\nParis", "Paris", 1.0),
        ("Paris it is", "Paris", 0.0),
        ("7", 7, 1.0),
        ("7", "007", 0.0),
        ("", "x", 0.0),
    ],
)
def test_exact(response: str, label: Any, score: float) -> None:
    assert exact("", response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The cat sat.", "cat sat", 1.0),
        ("a dog", "cat", 0.0),
        ("cat dog", "cat", 2 / 3),
        ("cat", ["dog", "cat"], 1.0),
        ("", "cat", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1(response: str, label: Any, score: float) -> None:
    assert f1("", response, label) == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{2}{4}", 1.0),
        ("the answer is 12", "12", 1.0),
        (r"$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("the answer is 13", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_math(response: str, label: Any, score: float) -> None:
    assert math("", response, label) == score


def test_math_works_from_threads_in_parallel() -> None:
    async def main() -> list[Scored]:
        runner = RewardRunner(math, RealClock(), 30.0)
        calls = (
            runner.score(
                replace(ASKED, label=str(i / 2 + i % 2)), replace(MADE, text=rf"it is $\frac{{{i}}}{{2}}$")
            )
            for i in range(40)
        )
        return await asyncio.gather(*calls)

    assert [s.value for s in asyncio.run(main())] == [float(i % 2 == 0) for i in range(40)]


def test_math_says_that_a_label_cannot_be_read() -> None:
    assert "raised ValueError" in run(lambda p, r, label: math(p, "1", "")).why


def test_a_reward_that_names_completion_ids_gets_the_models_own() -> None:
    """Those of the response, without what came before its first turn; a group's as lists."""
    seen: list[Any] = []
    made = Trajectory(
        (5, 6, 7), (0.0, -1.0, -1.0), (0, 1, 1), VersionSpans(((3, "v"),)), Finish.STOP, "r",
        Runs(((1, ENVIRONMENT), (2, "e0"))), 0,
    )  # fmt: skip

    def one(prompt: str, response: Any, label: Any, completion_ids: Any) -> Any:
        seen.append(completion_ids)
        return 1.0 if isinstance(response, str) else [1.0] * len(response)

    async def main() -> None:
        assert await RewardRunner(one, RealClock()).score(ASKED, made) == Scored(1.0)
        assert await RewardRunner(one, RealClock(), whole=True).score_group(ASKED, [made]) == [Scored(1.0)]

    asyncio.run(main())
    assert seen == [(6, 7), [(6, 7)]]
