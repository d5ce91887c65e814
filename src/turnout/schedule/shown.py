"""Where a run is shown from outside its directory: TensorBoard, W&B, Prometheus, as its options say."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.observe.boards import Board, Guarded, TensorBoard, WandbBoard, WandbPlan
from turnout.observe.eventlog import EventLog
from turnout.observe.metrics import MetricsLog
from turnout.observe.panel import Panel
from turnout.observe.run_metrics import RunMetrics
from turnout.schedule.metrics_server import metrics_served


async def metrics_log(
    stack: AsyncExitStack,
    config: RunConfig,
    paths: RunPaths,
    about: tuple[str, int | None],
    told: tuple[EventLog, Panel],
) -> MetricsLog:
    """The run's metrics and all that shows them, open on `stack`. `about`: the run's id, and the steps that it goes
    on from. Raises ConfigError where one of them can't be had."""
    (run_id, behind), (events, panel), name = about, told, config.run_name or "run"
    boards: list[Board] = []
    if config.tensorboard:
        boards.append(Guarded(TensorBoard(paths.tensorboard, behind), "TensorBoard"))
    if config.use_wandb:
        boards.append(Guarded(WandbBoard(wandb_plan(config, paths, run_id)), "W&B"))
    if config.metrics_port is not None:
        metrics = RunMetrics(name)
        events.told = metrics.take
        url = await stack.enter_async_context(metrics_served(config.metrics_port, metrics.text))
        panel.say(f"metrics for Prometheus at {url}")
        boards.append(metrics)
    return stack.enter_context(MetricsLog(paths.metrics, boards, behind))


def wandb_plan(config: RunConfig, paths: RunPaths, run_id: str) -> WandbPlan:
    return WandbPlan(
        run_id,
        config.run_name or "run",
        paths.root / "wandb" if config.wandb_dir is None else Path(config.wandb_dir).expanduser(),
        config.wandb_project,
        config.wandb_team,
        config.wandb_group,
        config.wandb_mode,
        config.model_dump(mode="json"),
    )
