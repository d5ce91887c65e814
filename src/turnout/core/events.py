"""Typed events of a run. Each is written once, by one writer, to events.jsonl; audit rules read them back.

The JSON form is {"event": <class name>, "at": <wall seconds>, ...fields}. Fields are JSON values only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STALE = "stale: "  # how reasons of groups begin that were evicted by --staleness-policy


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class RunStarted(Event):
    """Once for each incarnation. `resumed_at` is the number of train steps done at the checkpoint that a later one
    goes on from (0: there was none): what was trained at that step or later is as if it had never been.
    `update_interval`: train steps from one version to the next."""

    run_id: str
    incarnation: int
    seed: int
    schedule: str
    max_lag: int
    trust_label: bool = False
    resumed_at: int | None = None
    update_interval: int = 1


@dataclass(frozen=True)
class EngineReady(Event):
    """`updated`: weight updates go to it; `devices` are the numbers of those that it lies on."""

    engine: str
    url: str
    pid: int | None
    version: str
    updated: bool = True
    model: str = ""
    worker_type: str = ""
    devices: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class ModelAttested(Event):
    """An engine of a frozen model told what its live weights are: `root` is a digest of them, `level` how it was
    computed (memory, checksum), or "label" with their name."""

    engine: str
    model: str
    root: str
    level: str


@dataclass(frozen=True)
class EngineLost(Event):
    engine: str
    phase: str
    last_version: str
    reason: str


@dataclass(frozen=True)
class RouterReady(Event):
    """A request router answers; `pid` is none where somebody else runs it."""

    router: str
    url: str
    pid: int | None


@dataclass(frozen=True)
class RouterLost(Event):
    """It ended, or answers no more; `then` is what follows."""

    router: str
    reason: str
    then: str


@dataclass(frozen=True)
class EngineRemoved(Event):
    """The run has this engine no more; `version` is what it attested last."""

    engine: str
    version: str
    reason: str


@dataclass(frozen=True)
class GroupTaken(Event):
    """A prompt left the source; a slot is charged. `step`: as GroupRow.admitted of turnout.rollout.ledger_rows."""

    group: str
    prompt: str
    step: int


@dataclass(frozen=True)
class GroupCompleted(Event):
    """All members are generated and scored. `lengths` holds per member (tokens, log-probs, mask, spans),
    `digest` is over the token ids and log-probs of all members, so that runs can be compared bit for bit."""

    group: str
    lengths: list[list[int]]
    versions: list[str]
    rewards: list[float]
    digest: str = ""


@dataclass(frozen=True)
class GroupCut(Event):
    """Stopped at a token boundary; `tokens` so far, of all members."""

    group: str
    tokens: int


@dataclass(frozen=True)
class GroupResumed(Event):
    """Goes on from the tokens that it has; `samples` of it have some and have not ended."""

    group: str
    tokens: int
    samples: int = 0


@dataclass(frozen=True)
class GroupDropped(Event):
    group: str
    reason: str


@dataclass(frozen=True)
class GroupRequeued(Event):
    """This attempt has ended; `attempt` is the group that samples its prompt anew."""

    group: str
    reason: str
    attempt: str


@dataclass(frozen=True)
class GroupTrained(Event):
    """`versions` are the labels of the tokens that trained, `lag` their largest age in train steps."""

    group: str
    step: int
    versions: list[str]
    lag: int


@dataclass(frozen=True)
class StepTrained(Event):
    """`tokens` are those that carried loss, `lags` pairs of (lag, how many of them had it), `masked` the tokens
    that --staleness-policy took out of the loss."""

    step: int
    groups: int
    tokens: int
    inner_steps: int
    lags: list[list[int]] = field(default_factory=list[list[int]])
    masked: int = 0


@dataclass(frozen=True)
class VersionPublished(Event):
    """Committed when all of `required` that are not fenced have attested it, and `at_least` so many; where they
    `follow`, as soon as `at_least` so many have. `encoding` is that of a delta, empty for a full version; `density`
    the share of elements that it holds."""

    version: str
    incarnation: int
    counter: int
    root: str
    step: int
    bytes: int
    required: list[str]
    at_least: int = 1
    encoding: str = ""
    density: float = 1.0
    follow: bool = False


@dataclass(frozen=True)
class VersionPrepared(Event):
    """The engine can put the version into place; it serves what it served."""

    engine: str
    version: str


@dataclass(frozen=True)
class EngineFenced(Event):
    """No request goes to the engine until it has attested a committed version. `version` is the one that it failed
    to take, empty where there is none."""

    engine: str
    version: str
    reason: str


@dataclass(frozen=True)
class VersionAttested(Event):
    """`level` is how it was proved: memory, checksum or label. `root` is what the engine itself computed."""

    engine: str
    version: str
    root: str
    level: str


@dataclass(frozen=True)
class VersionCommitted(Event):
    version: str


@dataclass(frozen=True)
class VersionAborted(Event):
    version: str
    reason: str


@dataclass(frozen=True)
class MemoryReleased(Event):
    """An engine, or the trainer, gave back `asked` bytes by its own account; what it holds fell by `fell`."""

    who: str
    asked: int
    fell: int


@dataclass(frozen=True)
class EvalDone(Event):
    """A point at the step of its version. `digest` is over token ids and log-probs of all finished samples,
    `pass_at` maps k to pass@k."""

    name: str
    version: str
    step: int
    score: float
    items: int
    failed: int
    digest: str = ""
    pass_at: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class EvalSkipped(Event):
    """A point that was due at this version's step and isn't written."""

    name: str
    version: str
    step: int
    reason: str


@dataclass(frozen=True)
class PhaseEnded(Event):
    """`who` (the run, or the update beside it: turnout.core.waits) went through a phase, begun `seconds` ago."""

    who: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class EngineWorked(Event):
    """For `seconds` until now the engine had at least one request of the run without a break; `requests` of them
    ended meanwhile. Work that goes on for long is told in parts."""

    engine: str
    seconds: float
    requests: int


@dataclass(frozen=True)
class RunStalled(Event):
    """The root of what the run waits for (turnout.core.waits) has not moved for so long. Told once for each."""

    line: str
    root: str
    seconds: float


@dataclass(frozen=True)
class RunEnded(Event):
    status: str
    reason: str
    leftovers: list[str]


KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def to_json(event: Event, at: float) -> dict[str, Any]:
    return {"event": type(event).__name__, "at": at, **vars(event)}


def from_json(row: dict[str, Any]) -> Event:
    """Rebuilds an event; raises KeyError for an unknown kind and TypeError for wrong fields."""
    fields = {name: value for name, value in row.items() if name not in ("event", "at")}
    return KINDS[row["event"]](**fields)
