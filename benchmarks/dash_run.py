"""A run's directory without a run: written by the classes that a run writes with, at a time of its own.

Events, ledger, metrics, waits.json and run.json are what the dashboard reads. Lengths have a long tail, some groups
are dropped as stale, engines are lost and come back, an update is aborted now and then; the times are those of a
clock that this writer moves. Phases and the work of engines are told as a run tells them.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineWorked,
    EvalDone,
    GroupTrained,
    PhaseEnded,
    RunEnded,
    RunStarted,
    StepTrained,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans, WeightVersion
from turnout.core.waits import RUN, UPDATE
from turnout.observe.eventlog import EventLog
from turnout.observe.metrics import MetricsLog
from turnout.rollout.book import GroupBook, versions_of
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_rows import group_id_of
from turnout.rollout.ledger_schema import open_database

SAVE_EVERY, EVAL_EVERY = 20, 20
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@dataclass(frozen=True)
class Shape:
    """What the run is like. `trajectories` = steps * groups * members."""

    groups: int = 16
    members: int = 8
    tokens: int = 60
    engines: int = 4
    lag: int = 2
    step_s: float = 2.0
    seed: int = 1


class MovedClock:
    """Only `at` moves it."""

    def __init__(self, at: float) -> None:
        self.at = at

    def wall(self) -> float:
        return self.at

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds

    async def within(self, seconds: float, what: str, work: Awaitable[Any]) -> Any:
        del seconds, what
        return await work


def write_tokenizer(folder: Path) -> None:
    """One token per character of ASCII, with its number; number 0 is HOSTILE."""
    from tokenizers import Tokenizer, decoders, models  # noqa: PLC0415  late, as the dashboard does

    folder.mkdir(exist_ok=True)
    made = Tokenizer(
        models.WordLevel({HOSTILE: 0} | {chr(code): code for code in range(1, 128)}, unk_token=" ")
    )
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))


class RunWriter:
    """Writes step after step; `close` ends the run where `ended`."""

    def __init__(self, root: Path, shape: Shape, started: float) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.shape, self.clock = root, shape, MovedClock(started)
        self._random = random.Random(shape.seed)
        self.events = EventLog(root / "events.jsonl", self.clock)
        self.metrics = MetricsLog(root / "metrics.jsonl")
        self.ledger = Ledger(open_database(root / "ledger.sqlite"), Claim.of_this_process(self.clock))
        self.book = GroupBook(self.events, self.ledger)
        self.steps, self._admitted = 0, 0
        self._names = [f"engine-{at}" for at in range(shape.engines)]
        self._flying: list[tuple[int, RolloutGroup]] = []
        model = root / "model"
        write_tokenizer(model)
        config = {"hf_checkpoint": str(model), "rollout_batch_size": shape.groups, "num_rollout": None}
        (root / "run.json").write_text(json.dumps({"format": 1, "run_id": "synthetic"}))
        (root / "config.json").write_text(json.dumps(config | {"n_samples_per_prompt": shape.members}))
        self.version = WeightVersion(0, 0, f"{0:032x}")
        self.events.emit(RunStarted("synthetic", 0, shape.seed, "async", shape.lag))
        for at, name in enumerate(self._names):
            self._ready(name, at)
        self._committed(0)
        self.events.emit(VersionCommitted(self.version.label))

    def _ready(self, name: str, at: int) -> None:
        url = f"http://127.0.0.1:{30000 + at}"
        self.events.emit(EngineReady(name, url, 100 + at, self.version.label, model="actor", devices=[at]))

    def _committed(self, step: int) -> None:
        for name in self._names:
            self.events.emit(VersionAttested(name, self.version.label, self.version.root, "memory"))
        self.ledger.put_version(self.version, step, "committed")

    def step(self) -> None:
        """One train step: groups are admitted, made, taken, trained; its version goes out."""
        shape, step, begun = self.shape, self.steps, self.clock.at
        fresh = [self._fresh(step) for _ in range(shape.groups)]
        with self.book.transaction():
            for group in fresh:
                self.book.admit(group, step)
                self.book.start(group.group_id)
        done = [self._made(group, step) for group in fresh]
        for at, group in enumerate(done):
            self.clock.at = begun + shape.step_s * 0.6 * (at + 1) / len(done)
            self.book.complete(group)
        if step % 7 == 3:
            stale = f"stale: lag {shape.lag + 1} > {shape.lag}"
            self.book.drop(done[-1].group_id, f"reward failed: {HOSTILE}" if step % 2 else stale)
            done.pop()
        self.book.take(step, done)
        self._worked()
        self.events.emit(PhaseEnded(RUN, "rollout", 0.3 * shape.step_s))
        self.clock.at = begun + shape.step_s * 0.9
        lag = min(step, self._random.randrange(shape.lag + 1))
        self.book.train([GroupTrained(group.group_id, step, versions_of(group), lag) for group in done])
        self.events.emit(PhaseEnded(RUN, "train", 0.3 * shape.step_s))
        self._told(step, done, lag)
        self._update(step)
        self._mishaps(step)
        self.clock.at = begun + shape.step_s
        self.steps += 1
        if self.steps % SAVE_EVERY == 0:
            self.ledger.put_checkpoint(self.steps, self.version.label)
        self._waits()

    def _worked(self) -> None:
        for at, name in enumerate(self._names):
            share = 0.5 * (1 - 0.1 * at)
            self.events.emit(EngineWorked(name, share * self.shape.step_s, self.shape.groups * 2))

    def _fresh(self, step: int) -> RolloutGroup:
        del step
        number, self._admitted = self._admitted, self._admitted + 1
        prompt = Prompt(str(number), (1, 2, 3), "")
        return RolloutGroup(group_id_of(number, 0), number, 0, prompt)

    def _made(self, group: RolloutGroup, step: int) -> RolloutGroup:
        good = 1 - math.exp(-step / 60)
        members = tuple(self._response(group.ordinal, at, good) for at in range(self.shape.members))
        return replace(group, trajectories=members)

    def _response(self, ordinal: int, member: int, good: float) -> Trajectory:
        pick = self._random
        drawn = round(pick.lognormvariate(0, 0.6) * self.shape.tokens)
        count = max(2, min(20 * self.shape.tokens, drawn))
        ids = (0, *(32 + (7 * at + ordinal + member) % 94 for at in range(count - 1)))
        return Trajectory(
            ids,
            tuple(-0.02 * (1 + (at * 37 + ordinal) % 90) for at in range(count)),
            (0, *(1,) * (count - 1)),
            VersionSpans().extended(count, self.version.label),
            Finish.STOP,
            HOSTILE + bytes(ids[1:]).decode(),
            Runs().extended(count, self._names[member % len(self._names)]),
            pick.getrandbits(60),
            float(pick.random() < 0.1 + 0.8 * good),
        )

    def _told(self, step: int, done: list[RolloutGroup], lag: int) -> None:
        members = [one for group in done for one in group.trajectories]
        tokens, second = sum(len(one.response_ids) for one in members), self.shape.step_s
        lags = [[one, tokens // (lag + 1)] for one in range(lag + 1)]
        self.events.emit(StepTrained(step, len(done), tokens, 1, lags))
        rewards = [one.reward or 0.0 for one in members]
        row = {
            "rollout/reward_mean": sum(rewards) / len(rewards),
            "rollout/response_len_mean": tokens / len(members),
            "rollout/lag_mean": lag / 2,
            "rollout/lag_max": lag,
            "train/mismatch_mean_abs_logprob": 0.01 + 0.005 * self._random.random(),
            "train/grad_norm": 1 / (1 + step / 50) + 0.1 * self._random.random(),
            "train/entropy": 2.5 * math.exp(-step / 200) + 0.3,
            "tokens/response": tokens,
            "weights/bytes": 2_000_000 + 20_000 * self._random.random(),
            "weights/density": 0.02 + 0.01 * self._random.random(),
        }
        shares = {"rollout": 0.25, "train": 0.55, "publish": 0.05, "prepare": 0.04, "activate": 0.02}
        row |= {
            f"seconds/{name}": second * share * (0.9 + 0.2 * self._random.random())
            for name, share in shares.items()
        }
        self.metrics.write(step + 1, row | {"seconds/step": second})
        if step % EVAL_EVERY == 0:
            score = 0.1 + 0.7 * (1 - math.exp(-step / 60))
            self.events.emit(EvalDone("eval", self.version.label, step, score, 200, 0))

    def _update(self, step: int) -> None:
        counter = self.version.counter + 1
        new = WeightVersion(0, counter, f"{counter * 2654435761 % 2**64:016x}{counter:016x}")
        sized = {"bytes": 2_000_000 + counter, "encoding": "packed", "density": 0.02}
        self.events.emit(
            VersionPublished(new.label, 0, counter, new.root, step + 1, required=self._names, **sized)
        )
        self.events.emit(PhaseEnded(UPDATE, "publish", 0.03 * self.shape.step_s))
        self.clock.at += 0.02 * self.shape.step_s
        if step % 97 == 50:
            self.events.emit(VersionAborted(new.label, "engine-1 has not attested within 60 s"))
            self.ledger.put_version(new, step + 1, "aborted")
            return
        for name in self._names:
            self.events.emit(VersionPrepared(name, new.label))
        self.events.emit(PhaseEnded(UPDATE, "prepare", 0.02 * self.shape.step_s))
        self.version = new
        self._committed(step + 1)
        self.clock.at += 0.01 * self.shape.step_s
        self.events.emit(PhaseEnded(UPDATE, "activate", 0.01 * self.shape.step_s))
        self.events.emit(VersionCommitted(new.label))

    def _mishaps(self, step: int) -> None:
        name = self._names[step % len(self._names)]
        if step % 40 == 25:
            self.events.emit(
                EngineLost(name, "rollout", self.version.label, "the process ended with status -9")
            )
        if step % 40 == 27:
            name = self._names[(step - 2) % len(self._names)]
            self._ready(name, self._names.index(name))
            self.events.emit(VersionAttested(name, self.version.label, self.version.root, "memory"))
        if step % 60 == 33:
            self.events.emit(
                EngineFenced(name, self.version.label, "asked for its weights, gave no answer in 10 s")
            )
            self.events.emit(VersionAttested(name, self.version.label, self.version.root, "memory"))

    def _waits(self) -> None:
        chain = [
            ("run", "rollout", "its end"),
            ("rollout", "group g00000012.0", "a member"),
            ("group g00000012.0", "engine engine-1", "a token"),
        ]
        rows = [{"who": a, "on": b, "what": c, "seconds": 0.4, "limit_s": 600.0} for a, b, c in chain]
        line = "run -> rollout -> group g00000012.0 -> engine engine-1: a token, for 0 s of at most 600 s"
        about = {"pid": os.getpid(), "host": socket.gethostname(), "phase": "rollout", "line": line}
        row = {"at": self.clock.at, **about, "seconds": 0.4, "stalled": False, "chain": rows}
        (self.root / "waits.json").write_text(json.dumps(row))

    def close(self, ended: bool) -> None:
        if ended:
            self.events.emit(RunEnded("finished", "", []))
            (self.root / "summary.json").write_text(json.dumps({"status": "finished", "reason": ""}))
        self.events.close()
        self.metrics.close()
        self.ledger.close()
