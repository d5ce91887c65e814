"""What is known of engines and weight versions by the events of a run, and what went wrong. In bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineRemoved,
    EvalSkipped,
    Event,
    ModelAttested,
    RouterLost,
    RouterReady,
    RunEnded,
    RunStalled,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)

VERSIONS, FAULTS = 400, 400
READY, LOST, FENCED, REMOVED, ENDED = "ready", "lost", "fenced", "removed", "ended"


@dataclass
class EnginePicture:
    """`state` by what was told last; `version` is what it attested last; `lives` counts its starts."""

    name: str
    state: str = READY
    url: str = ""
    model: str = ""
    worker_type: str = ""
    updated: bool = True
    devices: list[int] = field(default_factory=list[int])
    version: str = ""
    since: float = 0.0
    lives: int = 0
    losses: int = 0
    fences: int = 0
    reason: str = ""


@dataclass
class VersionPicture:
    """Times are wall seconds; `prepared` and `attested` by engine."""

    version: str
    step: int | None = None
    bytes: int | None = None
    density: float | None = None
    encoding: str = ""
    published: float | None = None
    committed: float | None = None
    aborted: str = ""
    required: int = 0
    revision: int = 0
    prepared: dict[str, float] = field(default_factory=dict[str, float])
    attested: dict[str, float] = field(default_factory=dict[str, float])


class FleetPicture:
    """`faults` are (wall time, kind, who, text), the newest last; `fault_counts` count all of them by kind."""

    def __init__(self) -> None:
        self.revision = 0
        self.engines: dict[str, EnginePicture] = {}
        self.routers: dict[str, str] = {}
        self.versions: dict[str, VersionPicture] = {}
        self.version_count, self.committed = 0, ""
        self.faults: deque[tuple[float, str, str, str]] = deque(maxlen=FAULTS)
        self.fault_counts: Counter[str] = Counter()

    def fold(self, at: float, event: Event) -> None:
        match event:
            case EngineReady() | EngineLost() | EngineFenced() | EngineRemoved() | ModelAttested():
                self._engine(at, event)
            case (
                VersionPublished()
                | VersionPrepared()
                | VersionAttested()
                | VersionCommitted()
                | VersionAborted()
            ):
                self._version(at, event)
            case RouterReady():
                self.routers[event.router] = event.url
            case RouterLost():
                self.fault(at, "router lost", event.router, f"{event.reason}; {event.then}")
            case RunStalled():
                self.fault(at, "stall", event.root, event.line)
            case EvalSkipped():
                self.fault(at, "evaluation skipped", event.name, event.reason)
            case RunEnded():
                for engine in self.engines.values():
                    if engine.state not in (LOST, REMOVED):
                        engine.state, engine.since = ENDED, at
            case _:
                pass

    def fault(self, at: float, kind: str, who: str, text: str) -> None:
        self.faults.append((at, kind, who, text))
        self.fault_counts[kind] += 1

    def _engine(
        self, at: float, event: EngineReady | EngineLost | EngineFenced | EngineRemoved | ModelAttested
    ) -> None:
        engine = self.engines.setdefault(event.engine, EnginePicture(event.engine))
        before, engine.since = engine.since, at
        match event:
            case EngineReady():
                engine.state, engine.reason = READY, ""
                engine.lives += 1
                engine.url, engine.model, engine.worker_type = event.url, event.model, event.worker_type
                engine.updated, engine.devices, engine.version = event.updated, event.devices, event.version
            case EngineLost():
                engine.state, engine.reason = LOST, event.reason
                engine.losses += 1
                self.fault(at, "engine lost", event.engine, f"in {event.phase}: {event.reason}")
            case EngineFenced():
                engine.state, engine.reason = FENCED, event.reason
                engine.fences += 1
                self.fault(at, "engine fenced", event.engine, event.reason)
            case EngineRemoved():
                engine.state, engine.reason = REMOVED, event.reason
                self.fault(at, "engine removed", event.engine, event.reason)
            case ModelAttested():
                engine.version, engine.since = f"{event.model} {event.root[:16]}", before

    def _version(
        self,
        at: float,
        event: VersionPublished | VersionPrepared | VersionAttested | VersionCommitted | VersionAborted,
    ) -> None:
        found = self.versions.get(event.version)
        if found is None:
            found = self.versions[event.version] = VersionPicture(event.version)
            self.version_count += 1
            while len(self.versions) > VERSIONS:
                del self.versions[next(iter(self.versions))]
        found.revision = self.revision
        match event:
            case VersionPublished():
                found.step, found.bytes, found.density = event.step, event.bytes, event.density
                found.encoding, found.published, found.required = event.encoding, at, len(event.required)
            case VersionPrepared():
                found.prepared[event.engine] = at
            case VersionAttested():
                found.attested[event.engine] = at
                engine = self.engines.setdefault(event.engine, EnginePicture(event.engine))
                engine.version = event.version
                if engine.state == FENCED:
                    engine.state, engine.reason, engine.since = READY, "", at
            case VersionCommitted():
                found.committed, self.committed = at, event.version
            case VersionAborted():
                found.aborted = event.reason
                self.fault(at, "update aborted", event.version, event.reason)

    def engine_rows(self) -> list[dict[str, Any]]:
        return [
            {**vars(engine), "current": bool(engine.version) and engine.version == self.committed}
            for _, engine in sorted(self.engines.items())
        ]

    def version_rows(self, revision: int) -> list[dict[str, Any]]:
        """Versions that have changed after a revision, the oldest first, with `key` as their name; `prepared` and
        `attested` in seconds after it was published, by engine."""
        return [
            {
                **vars(one),
                "key": one.version,
                "prepared": _after(one.prepared, one.published),
                "attested": _after(one.attested, one.published),
            }
            for one in self.versions.values()
            if one.revision > revision
        ]

    def serving(self) -> dict[str, list[str]]:
        """Engines by what they attested last, but for those that are lost or removed."""
        found: dict[str, list[str]] = {}
        for name, engine in sorted(self.engines.items()):
            if engine.state not in (LOST, REMOVED):
                found.setdefault(engine.version, []).append(name)
        return found


def _after(times: dict[str, float], start: float | None) -> dict[str, float | None]:
    return {name: None if start is None else round(at - start, 3) for name, at in times.items()}
