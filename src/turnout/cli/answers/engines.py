"""An engine: its lives and how they ended, the versions that it served, what it did and made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from turnout.cli.answers.run import Answer, Run, clock_time, not_there
from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineRemoved,
    Event,
    RunEnded,
    RunStarted,
    VersionAttested,
)
from turnout.observe.timeline import spans

SHOWN = 5  # newest versions that are listed


def engine(run: Run, name: str) -> Answer:
    """Raises ConfigError for a name that no engine had."""
    names = {event.engine for _, event in run.events if isinstance(event, EngineReady)}
    if name not in names:
        raise not_there("--engine", name, names)
    lives: list[Answer] = []
    versions: list[Answer] = []
    for at, event in run.events:
        if isinstance(event, RunStarted | RunEnded) and lives and lives[-1]["ended_at"] is None:
            began = (
                f"incarnation {event.incarnation} of the run began" if isinstance(event, RunStarted) else ""
            )
            lives[-1] |= {"ended_at": at, "end": "left", "reason": began or "the run ended"}
        elif getattr(event, "engine", None) == name:
            _told(at, event, lives, versions)
    seconds: defaultdict[str, float] = defaultdict(float)
    requests = 0
    for span in spans(run.events):
        if span.lane == name:
            seconds[span.name] += span.seconds
            requests += span.args.get("requests", 0)
    return {
        "engine": name,
        "lives": lives,
        "restarts": sum(life["end"] == "lost" for life in lives[:-1]),
        "losses": sum(life["end"] == "lost" for life in lives),
        "versions": versions,
        "requests": requests,
        "seconds": {phase: round(value, 3) for phase, value in sorted(seconds.items())},
        **_tokens(run, name),
    }


def _told(at: float, event: Event, lives: list[Answer], versions: list[Answer]) -> None:
    """One event of the engine."""
    if isinstance(event, EngineReady):
        lives.append(_born(at, event))
    elif isinstance(event, EngineLost) and lives:
        lives[-1] |= {"ended_at": at, "end": "lost", "phase": event.phase, "reason": event.reason}
    elif isinstance(event, EngineRemoved) and lives:
        lives[-1] |= {"ended_at": at, "end": "removed", "reason": event.reason}
    elif isinstance(event, EngineFenced) and lives:
        lives[-1]["fenced"].append({"at": at, "version": event.version, "reason": event.reason})
    elif isinstance(event, VersionAttested):
        versions.append({"version": event.version, "at": at, "level": event.level})


def _born(at: float, event: EngineReady) -> Answer:
    born = {"url": event.url, "pid": event.pid, "worker_type": event.worker_type, "updated": event.updated}
    return {"ready_at": at, **born, "ended_at": None, "end": None, "reason": None, "fenced": []}


def _tokens(run: Run, name: str) -> Answer:
    """Tokens that it made, by the version that made them (of groups that the ledger holds)."""
    versions = Counter[str]()
    for _, piece in run.ledger.every_piece():
        if all(engine != name for _, engine in piece["engines"]):
            continue
        made = [engine for count, engine in piece["engines"] for _ in range(count)]
        labels = [label for count, label in piece["versions"] for _ in range(count)]
        versions.update(label for engine, label in zip(made, labels) if engine == name)
    return {"tokens": versions.total(), "tokens_by_version": dict(sorted(versions.items()))}


def engine_lines(told: Answer) -> Iterator[str]:
    yield (
        f"engine {told['engine']}: {len(told['lives'])} lives, {told['losses']} lost, {told['restarts']} restarts"
    )
    for life in told["lives"]:
        process = "" if life["pid"] is None else f", process {life['pid']}"
        yield f"  {clock_time(life['ready_at'])}  ready at {life['url']}{process}"
        for fence in life["fenced"]:
            of = f" by {fence['version']}" if fence["version"] else ""
            yield f"  {clock_time(fence['at'])}  fenced{of}: {fence['reason']}"
        if life["ended_at"] is not None:
            where = f" in {life['phase']}" if "phase" in life else ""
            yield f"  {clock_time(life['ended_at'])}  {life['end']}{where}: {life['reason']}"
    for name, seconds in told["seconds"].items():
        count = f", {told['requests']} requests" if name == "rollout" else ""
        yield f"  {name:<10} {seconds:.3f} s{count}"
    made = len(told["tokens_by_version"])
    yield f"  tokens     {told['tokens']} by {made} versions"
    attested = told["versions"]
    if attested:
        yield f"  attested   {len(attested)} times; the newest:"
        for one in attested[-SHOWN:]:
            tokens = told["tokens_by_version"].get(one["version"], 0)
            yield f"    {clock_time(one['at'])}  {one['version']} ({one['level']}), {tokens} tokens"
