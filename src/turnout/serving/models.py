"""Which engines serve which model of a run, for functions of the user's: rewards, tools, environments.

Owns nothing but the question: what serves a model is told to it. Promises: a model is known by the name that it has
in the run (`default` is the one that is trained); an engine that is dead, or has yet to prove what it holds, is not
handed out; several of one model take turns; it may be asked from any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from turnout.core.errors import ConfigError, EngineDead, Fault
from turnout.serving.client import EngineClient

Live = Callable[[], Sequence[EngineClient]]


class Models:
    """What a reward function that has a parameter `run` is given. `serving`: by the name of a model, its engines
    that may be asked now, in a fixed order."""

    def __init__(self, serving: Mapping[str, Live]) -> None:
        self._serving = dict(serving)
        self._turns = {name: itertools.count() for name in serving}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._serving)

    def engine(self, name: str) -> EngineClient:
        """The engine of this model whose turn it is. Raises ConfigError for a name that no model has, EngineDead
        while no engine of the model is up."""
        if name not in self._serving:
            known = ", ".join(self._serving)
            raise ConfigError(Fault("model", name, "there is no such model in this run", f"one of {known}"))
        live = self._serving[name]()
        if not live:
            raise EngineDead(name, "rollout", "none", f"no engine of the model {name!r} is up")
        return live[next(self._turns[name]) % len(live)]


def model_url(run: Models, name: str, path: str = "") -> str:
    """The URL of `path` (such as /generate or /v1/chat/completions) on an engine that serves the model `name` of
    this run. One URL per call: ask anew for each request, and after a connection failed. Raises as
    Models.engine."""
    return run.engine(name).address.url + path
