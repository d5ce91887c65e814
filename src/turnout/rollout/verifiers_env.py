"""Environments of `verifiers` (0.4) as prompts and agent: `--prompt-data verifiers:TASKSET[:{config}]`.

The tasks of the taskset are the prompts; a sample is one episode, whose model calls go to the sample's own
endpoint (turnout.rollout.agent), and its reward is the trace's. The config is that of verifiers' environment as
JSON, for example {"taskset": {"num_tasks": 100}, "agent": {"harness": {"id": "null"}}}; `size` (default 1000) is
how many tasks are taken. Promises: the program of the single agent runs as a process of this machine unless its
runtime is named; an episode that verifiers calls no success of its own machinery fails its sample with verifiers'
error. The servers that an environment's episodes share live while there are any. verifiers is an optional
dependency."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from turnout.core.errors import ConfigError, DataError, Fault
from turnout.rollout.rows import Row, shown, split_path

if TYPE_CHECKING:
    from turnout.rollout.agent import AgentEndpoint

PREFIX = "verifiers:"
WHAT = "prompt data"
DEFAULT_SIZE = 1000


def is_verifiers(path: str) -> bool:
    return path.startswith(PREFIX)


def task_rows(path: str) -> list[Row]:
    """The tasks, or a slice of them, as rows; raises DataError, and ConfigError without the library."""
    text, wanted = split_path(path)
    tasks = _environment(text).tasks
    rows: list[Row] = []
    for index in range(*wanted.indices(len(tasks))):
        prompt = tasks[index].data.model_dump(mode="json").get("prompt")
        values = {"prompt": prompt, "label": None, "metadata": {}, "env": text, "index": index}
        rows.append(Row(index, f"{text}:{index}", shown(str(prompt)), values))
    return rows


async def agent(endpoint: AgentEndpoint, row: dict[str, Any]) -> float:
    """One episode of the row's task; its reward."""
    import verifiers.v1 as vf  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    place = _environment(row["env"])
    client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var="TURNOUT_NO_KEY")
    async with place.served():
        context = vf.ModelContext(model=endpoint.model, client=client)
        episode = await place.env.run_episode(place.tasks[row["index"]], context)
    if not episode.ok:
        faults = [*episode.errors, *(fault for trace in episode.traces for fault in trace.errors)]
        raise RuntimeError(
            f"verifiers: {faults[0].type}: {faults[0].message}" if faults else "verifiers: not ok"
        )
    return sum(trace.reward for trace in episode.traces)


class _Environment:
    """A loaded environment; what its episodes share is there from the first that runs to the last."""

    def __init__(self, env: Any, tasks: list[Any]) -> None:
        self.env, self.tasks = env, tasks
        self._users = 0
        self._server: asyncio.Task[None] | None = None
        self._ready, self._done = asyncio.Event(), asyncio.Event()
        self._entry = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        async with self._entry:
            if self._server is not None and self._done.is_set():  # the last one's servers are on their end
                await asyncio.gather(self._server, return_exceptions=True)
                self._server = None
            if self._server is None:
                self._ready, self._done = asyncio.Event(), asyncio.Event()
                self._server = asyncio.ensure_future(self._serve(self._ready, self._done))
            server, ready = self._server, self._ready
            self._users += 1
        try:
            await ready.wait()
            if server.done():
                server.result()
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._done.set()

    async def _serve(self, ready: asyncio.Event, done: asyncio.Event) -> None:
        """One task begins and ends what is shared, as scopes of tasks want it."""
        try:
            async with self.env.serving():
                ready.set()
                await done.wait()
        finally:
            ready.set()
            done.set()


@functools.lru_cache(maxsize=8)
def _environment(text: str) -> _Environment:
    try:
        import verifiers.v1 as vf  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        remedy = "pip install 'verifiers>=0.4,<0.5'"
        raise ConfigError(Fault(WHAT, text, "verifiers is not installed", remedy)) from None
    name, config, size = _parts(text)
    try:
        env = vf.load_environment(vf.resolve_env_config(config))
        tasks = list(itertools.islice(env.taskset, size))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError) as fault:
        reason = f"verifiers cannot load it: {type(fault).__name__}: {fault}"
        raise DataError(
            Fault(WHAT, text, reason, f"is a package {name} installed that has a taskset?")
        ) from fault
    return _Environment(env, tasks)


def _parts(text: str) -> tuple[str, dict[str, Any], int]:
    """The taskset's name, the environment's config, and how many tasks."""
    name, mark, raw = text.removeprefix(PREFIX).partition(":{")
    try:
        config: dict[str, Any] = json.loads("{" + raw) if mark else {}
    except ValueError as fault:
        remedy = 'write verifiers:NAME:{"size": 100}'
        raise DataError(Fault(WHAT, text, f"the config is no JSON: {fault}", remedy)) from None
    size = config.pop("size", DEFAULT_SIZE)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise DataError(Fault(WHAT, text, f"size {size!r} is no whole number of at least 1"))
    for key in ("taskset", "agent"):
        if not isinstance(config.get(key, {}), dict):
            raise DataError(Fault(WHAT, text, f"its {key} {config[key]!r} is no object"))
    config["taskset"] = {"id": name, **config.get("taskset", {})}
    if "id" not in config:  # verifiers' own choice is a sandbox in its cloud
        config["agent"] = {"runtime": {"type": "subprocess"}, **config.get("agent", {})}
    return name, config, size
