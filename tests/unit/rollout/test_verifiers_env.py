"""Tasks of verifiers as prompts and agent, with a stand-in for the library; the real one: tests/verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from turnout.core.errors import ConfigError, DataError
from turnout.rollout import tasks, verifiers_env
from turnout.rollout.agent import AgentEndpoint


class Data:
    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def model_dump(self, mode: str) -> dict[str, str]:
        return {"prompt": self.prompt}


class Env:
    """Tells how many of its servers there are, and were."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.live, self.begun, self.most = config, 0, 0, 0
        self.taskset = (SimpleNamespace(data=Data(f"{n}?")) for n in range(10_000))

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        await asyncio.sleep(0)
        self.live, self.begun = self.live + 1, self.begun + 1
        self.most = max(self.most, self.live)
        yield
        await asyncio.sleep(0)
        self.live -= 1

    async def run_episode(self, task: Any, context: Any) -> Any:
        assert self.live == 1 and context.client.base_url == "http://here/v1"
        await asyncio.sleep(0)
        bad = [SimpleNamespace(type="TaskError", message="no tool")] if task.data.prompt == "3?" else []
        traces = [SimpleNamespace(reward=0.25, errors=bad)]
        return SimpleNamespace(ok=not bad, errors=[], traces=traces)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = types.ModuleType("verifiers.v1")

    def load(config: dict[str, Any]) -> Env:
        if config["taskset"]["id"] == "absent":
            raise ModuleNotFoundError("taskset 'absent' not found")
        return Env(config)

    module.load_environment, module.resolve_env_config = load, lambda config: config
    module.EvalClientConfig = module.ModelContext = SimpleNamespace
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", module)
    sys.modules["verifiers"].v1 = module  # type: ignore[attr-defined]
    verifiers_env._environment.cache_clear()
    yield
    verifiers_env._environment.cache_clear()


def test_tasks_are_rows_and_the_config_is_the_librarys() -> None:
    text = 'verifiers:sums:{"size": 6, "taskset": {"n": 1}, "agent": {"harness": {"id": "null"}}}'
    rows = tasks.task_rows(f"{text}@[2:4]")
    assert [(row.values["prompt"], row.values["index"]) for row in rows] == [("2?", 2), ("3?", 3)]
    assert verifiers_env._environment(text).env.config == {
        "taskset": {"id": "sums", "n": 1}, "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    }  # fmt: skip
    assert len(tasks.task_rows("verifiers:sums")) == 1000, "a taskset may have no end"


def test_episodes_share_their_servers_which_live_while_there_are_any() -> None:
    async def main() -> None:
        env = verifiers_env._environment("verifiers:sums").env
        row = {"env": "verifiers:sums", "index": 0}
        for burst in range(3):
            calls = (verifiers_env.agent(AgentEndpoint("http://here/v1"), row) for _ in range(4))
            assert await asyncio.gather(*calls) == [0.25] * 4
            for _ in range(5):
                await asyncio.sleep(0)
            assert (env.live, env.begun, env.most) == (0, burst + 1, 1)
        with pytest.raises(RuntimeError, match="verifiers: TaskError: no tool"):
            await verifiers_env.agent(AgentEndpoint("http://here/v1"), {**row, "index": 3})

    asyncio.run(main())


@pytest.mark.parametrize(
    "text, said",
    [("verifiers:absent", "cannot load it: ModuleNotFoundError"), ("verifiers:x:{size}", "no JSON"),
     ('verifiers:x:{"size": 0}', "size 0"), ('verifiers:x:{"taskset": 5}', "taskset 5 is no object")],
)  # fmt: skip
def test_what_is_wrong_is_told_by_name(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        tasks.task_rows(text)


def test_without_the_library_there_is_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match="pip install 'verifiers"):
        tasks.task_rows("verifiers:x")
