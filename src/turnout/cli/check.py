"""`turnout check RUN.yaml [--option value ...]`: what of a deployment can be proved before a run needs it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from turnout.cli.options import split_run_file
from turnout.config.load import load
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault
from turnout.core.ports import Clock
from turnout.placement.devices import visible_gpus
from turnout.placement.real import RealClock
from turnout.schedule.external import beginning_roster, external_access
from turnout.schedule.wiring import router_of
from turnout.serving.access import Access
from turnout.serving.address import parse_address
from turnout.serving.checklist.engines import Look
from turnout.serving.checklist.facts import Deployment, HereFacts, ModelFacts
from turnout.serving.checklist.folder import Prober
from turnout.serving.checklist.group import try_group
from turnout.serving.checklist.here import depot_findings, model_facts, proxies, sglang_findings, store_facts
from turnout.serving.checklist.lines import Finding, exit_status, failed, proved, refused, render, unknown
from turnout.serving.checklist.router import own_router, their_router
from turnout.serving.checklist.verdicts import lines
from turnout.serving.client import EngineClient
from turnout.serving.roster import EnginePlan, Program
from turnout.serving.sglang_client import SglangClient
from turnout.train.model_zoo import at_hand

USAGE = """usage: turnout check RUN.yaml [--json] [--deep] [--deadline SECONDS] [--option value ...]

Reads the run's configuration as `turnout train` does, and tries what the run will need: the engines of somebody
else, the folder of versions, the process group, devices, programs. Each line is `proved`, `failed` or `not provable
here`, with how that was found and what to do. Nothing is started and no weight changes.
  --json      the list as JSON
  --deep      read checkpoints of any size; have stock engines that hold the run's checkpoint load
              it once more through the shared folder
  --deadline  of each probe, 20 by default
Exit status 0: all proved; 1: something failed; 3: nothing failed, but something can't be proved from here; 2: the
command itself is wrong. Options are those of `turnout train --help`."""
DEADLINE_S = 20.0
ABSENT = "it is not on this machine yet; a run fetches or makes it at its start"


def command(argv: list[str]) -> int:
    """Prints the list; the exit status, see USAGE."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0 if argv else 2
    as_json, deep = "--json" in argv, "--deep" in argv
    argv = [word for word in argv if word not in ("--json", "--deep")]
    deadline_s, argv = _deadline(argv)
    try:
        found = lines(asyncio.run(_deployment(load(*split_run_file(argv)), deep, deadline_s)))
    except ConfigError as fault:
        found = refused(fault)
    rows = {"lines": [line.row() for line in found], "exit_status": exit_status(found)}
    print(json.dumps(rows, indent=2) if as_json else render(found))
    return exit_status(found)


def _deadline(argv: Sequence[str]) -> tuple[float, list[str]]:
    words = list(argv)
    if "--deadline" not in words:
        return DEADLINE_S, words
    at = words.index("--deadline")
    try:
        seconds = float(words[at + 1])
    except (IndexError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(Fault("--deadline", " ".join(words[at + 1 : at + 2]), "needs seconds above 0"))
    return seconds, [*words[:at], *words[at + 2 :]]


async def _deployment(config: RunConfig, deep: bool, deadline_s: float) -> Deployment:
    clock, plans, access = RealClock(), beginning_roster(config), external_access(config)
    model, theirs = _model(config, deep), [plan for plan in plans if plan.program is Program.EXTERNAL]
    connects = [partial(_connect, plan, access, clock) for plan in theirs]
    with store_facts(_store_folder(config)) as store:
        prober = None
        if config.update_weight_transport == "disk" and not store.fault:
            prober = Prober(store.folder, clock, deadline_s, model.folder if deep else None)
        engines = await Look(clock, deadline_s, prober, model.folder if model.root else None).at_all(connects)
    up = [connect(False) for connect, engine in zip(connects, engines) if engine.said is not None]
    group = None
    if config.update_weight_transport == "group" and up:
        keys = {"api_key": access.api_key, "admin_key": access.admin_key, "ca": config.rollout_engine_ca_file}
        group = await try_group(up, keys, clock, deadline_s)
    programs = await sglang_findings(config, plans, clock)
    routers = await _router(config, clock, deadline_s)
    depot = await depot_findings(config.weight_url, clock, deadline_s)
    here = HereFacts(
        model, store, visible_gpus(), proxies(os.environ), programs, routers, _others(plans), depot
    )
    return Deployment(config, here, plans, engines, group)


async def _router(config: RunConfig, clock: Clock, deadline_s: float) -> tuple[Finding, ...]:
    plan = router_of(config, "check", Path())
    if plan is None:
        return ()
    if plan.launch is not None:
        return await own_router(plan.launch, clock)
    if plan.address is None:
        return ()
    return await their_router(plan.address, clock, deadline_s, plan.access)


def _model(config: RunConfig, deep: bool) -> ModelFacts:
    folder = at_hand(config.hf_checkpoint)
    if folder is None:
        return ModelFacts(None, ABSENT)
    return model_facts(folder, deep)


def _others(plans: Sequence[EnginePlan]) -> tuple[Finding, ...]:
    """Of the checkpoints that other models of the run begin with."""
    paths = dict.fromkeys(plan.model_path for plan in plans if plan.model_path is not None)
    return tuple(_other(path, at_hand(path)) for path in paths)


def _other(path: str, folder: Path | None) -> Finding:
    if folder is None:
        return unknown(ABSENT, path)
    facts = model_facts(folder, deep=False)
    return proved(f"{facts.elements} values", path) if facts.elements else failed(facts.fault, path)


def _store_folder(config: RunConfig) -> Path:
    """Where the run would write versions; the number of a run directory that is not named is not known yet."""
    if config.weight_folder is not None:
        return Path(config.weight_folder).expanduser().absolute()
    root = (
        Path("runs", f"{config.run_name}-NNN")
        if config.run_dir is None
        else Path(config.run_dir).expanduser()
    )
    return root.absolute() / "weights"


def _connect(plan: EnginePlan, access: Access, clock: Clock, stock: bool) -> EngineClient:
    """A client of an engine of somebody else."""
    kind = SglangClient if stock else EngineClient
    return kind(plan.engine_id, parse_address(plan.address or "", plan.engine_id), clock, access)
