"""The start of one engine of a run, whatever program it is and whoever runs it.

Promises: an engine that is returned serves and is what the run needs; of one that is not nothing is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.core.errors import ConfigError, DeadlineExceeded, EngineError, Fault, WeightError
from turnout.core.ports import Clock, Store
from turnout.placement.cluster import Cluster
from turnout.placement.processes import OwnProcess
from turnout.schedule import wiring
from turnout.schedule.inputs import RunInputs
from turnout.schedule.resume import Beginning
from turnout.schedule.weight_plane import check_engines
from turnout.serving.client import Traffic
from turnout.serving.external import ExternalEngines
from turnout.serving.launcher import Engine, launch
from turnout.serving.left_behind import taken_over
from turnout.serving.roster import EnginePlan, Program
from turnout.serving.sglang_launcher import launch_sglang


@dataclass(frozen=True)
class Run:
    """What is known of an incarnation before anything is started. `token`: of control calls to its own engines;
    `left`: engines by id that the incarnation before has left in this very process."""

    config: RunConfig
    paths: RunPaths
    run_id: str
    beginning: Beginning
    clock: Clock
    files: Store
    cluster: Cluster
    token: str | None = None
    traffic: Traffic = field(default_factory=Traffic)
    left: dict[str, OwnProcess] = field(default_factory=dict[str, OwnProcess])


async def launched(run: Run, inputs: RunInputs, external: ExternalEngines, plan: EnginePlan) -> Engine:
    """Starts an engine, or connects to it. Raises EngineError or ConfigError, with nothing left of it."""
    try:
        return await _launched(run, inputs, external, plan)
    except (DeadlineExceeded, OSError) as fault:
        raise EngineError(plan.engine_id, "start", "none", str(fault)) from fault


async def _launched(run: Run, inputs: RunInputs, external: ExternalEngines, plan: EnginePlan) -> Engine:
    config, folders = run.config, (run.paths.engines, run.paths.weights)
    if plan.program is Program.EXTERNAL:
        engine = await external.connect(plan, config.engine_start_timeout_s)
        try:
            await check_engines(config, [engine.client])
        except BaseException as fault:
            await engine.stop()
            if not isinstance(fault, WeightError):
                raise
            raise ConfigError(Fault("--update-weight-mode", config.update_weight_mode, str(fault))) from fault
        engine.client.traffic = run.traffic
        return engine
    model = inputs.model if plan.model_path is None else inputs.models[plan.model_path]
    if plan.program is Program.SGLANG:
        server = replace(wiring.sglang_launch(config, plan, model, folders[0]), key=run.token)
        engine = await launch_sglang(server, run.clock, run.cluster)
    else:
        spec = replace(wiring.engine_launch(config, plan, model, folders), token=run.token)
        own = run.left.pop(plan.engine_id, None)
        found = None if run.beginning.checkpoint is None else await taken_over(spec, run.clock, own)
        engine = await launch(spec, run.clock, run.cluster) if found is None else found
    engine.client.plan, engine.client.traffic = plan, run.traffic
    return engine
