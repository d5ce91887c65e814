"""The models of a run besides the one that is trained: their engines, who may ask them, and that they stay.

Owns the engines that no weight update goes to: those of `frozen` models, and those that only evaluate. Promises:
one is asked only once it is up and has attested; when it ends nothing asks it, and its next life joins as the first
did.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, Fault
from turnout.core.ports import Clock, EventSink
from turnout.placement.tasks import together
from turnout.rollout.tokenizer import HubTokenizer, load_tokenizer
from turnout.schedule.dedicated import DedicatedEngines, Following
from turnout.schedule.frozen import FrozenModels
from turnout.schedule.loop import Trainer
from turnout.schedule.reference import Reference, ReferencedTrainer, TaughtTrainer
from turnout.schedule.roster import actor_model, roster
from turnout.schedule.run_engines import RunEngines
from turnout.serving.client import EngineClient
from turnout.serving.models import Live, Models
from turnout.serving.roster import Program, WorkerType
from turnout.transfer.transport import Transport

TRIES_MAX = 3
PAUSE_S = 2.0

log = logging.getLogger(__name__)


class RunModels:
    """See the module. `models` is what custom functions get; `dedicated` is None without --eval-mode dedicated."""

    def __init__(
        self,
        config: RunConfig,
        engines: RunEngines,
        transport: Transport,
        events: EventSink,
        clock: Clock,
    ) -> None:
        self._config, self._engines, self._clock = config, engines, clock
        self.frozen = FrozenModels(events, config.update_weight_timeout_s, config.trust_label)
        deadline_s, trust, again = config.update_weight_timeout_s, config.trust_label, config.restarts > 0
        following = Following(transport, clock, deadline_s, trust, again)
        self.dedicated = DedicatedEngines(following) if config.eval_mode == "dedicated" else None
        serving: dict[str, Live] = {actor_model(config): self._actors}
        for name in dict.fromkeys(plan.model for plan in roster(config) if not plan.updated):
            if name != config.eval_model:
                serving[name] = partial(self.frozen.serving, name)
        self.models = Models(serving)

    async def begun(self) -> RunModels:
        """Takes in the engines that were started; raises as FrozenModels.joins. One that the controller before left
        may have given its weights back."""
        kept = self._engines.kept if self._config.offloads_rollout else frozenset[str]()
        await together(
            self.frozen.returns(engine) if engine.engine_id in kept else self._joins(engine)
            for engine in self._engines.others
        )
        return self

    async def again(self, engine: EngineClient) -> str:
        """Takes in the next life of an engine; what to tell of it. Raises WeightError where it is another one,
        EngineDead where it does not attest in TRIES_MAX tries: a life that nobody would ask."""
        name, tries = engine.engine_id, 1
        while True:
            try:
                await self._joins(engine)
                return f"serves the model {engine.plan.model!r} again"
            except (EngineError, DeadlineExceeded) as fault:
                if tries == TRIES_MAX:
                    reason = f"it does not attest, asked {tries} times, the last with: {fault}"
                    raise EngineDead(name, "attest", engine.version, reason) from fault
                log.warning("engine %s runs again, but is not asked yet: %s", name, fault)
            tries += 1
            await self._clock.sleep(PAUSE_S)

    def lost(self, engine_id: str) -> None:
        self.frozen.lost(engine_id)
        if self.dedicated is not None:
            self.dedicated.lost(engine_id)

    async def stay(self, work: Awaitable[None]) -> None:
        """Waits for `work`; raises WeightError for an engine of a frozen model that holds other weights then than
        at its start."""
        await work
        await self.frozen.stayed()

    def informed(self, trainer: Trainer) -> Trainer:
        """The trainer, with log-probs of --ref-model and --opd-teacher where they are given."""
        for name, kind in (
            (self._config.ref_model, ReferencedTrainer),
            (self._config.opd_teacher, TaughtTrainer),
        ):
            if name is not None:
                deadline_s = self._config.rollout_request_timeout_s
                trainer = kind(trainer, Reference(self.models, name, self._clock, deadline_s))
        return trainer

    async def _joins(self, engine: EngineClient) -> None:
        if self.dedicated is not None and engine.plan.model == self._config.eval_model:
            self.dedicated.joins(engine)
        else:
            await self.frozen.joins(engine)

    def _actors(self) -> Sequence[EngineClient]:
        if self._engines.router is not None:
            return self._engines.router.serving()
        holding = [engine for engine in self._engines.updated if engine.holds is not None]
        whole = [engine for engine in holding if engine.plan.worker_type is WorkerType.REGULAR]
        if holding and not whole:
            reason = "its engines are halves of pairs, which answer nothing that is asked of one of them"
            remedy = "give the run a router (--router), which is asked then"
            raise ConfigError(Fault("model", actor_model(self._config), reason, remedy))
        return whole


def check_models(config: RunConfig) -> None:
    """Raises ConfigError where an option names a model that the run has no engines of, or not such."""
    frozen = {plan.model: plan for plan in roster(config) if not plan.updated}
    known = f"one of {', '.join(frozen)}" if frozen else "give --sglang-config with update_weights: false"
    for flag, name in (
        ("--ref-model", config.ref_model),
        ("--opd-teacher", config.opd_teacher),
        ("--eval-model", config.eval_model),
    ):
        if name is not None and name not in frozen:
            reason = "no engines of a model of this name are left out of weight updates"
            raise ConfigError(Fault(flag, name, reason, known))
    name = config.eval_model
    if name is not None and frozen[name].model_path not in (None, config.hf_checkpoint):
        reason = f"is {frozen[name].model_path}, and evaluates versions of {config.hf_checkpoint}"
        raise ConfigError(Fault("--eval-model", name, reason, "leave its model_path out"))
    if name is not None and any(
        plan.model == name and plan.program is Program.SGLANG for plan in roster(config)
    ):
        reason = (
            "engines that only evaluate prove each version by its root, which a stock SGLang does not know"
        )
        remedy = "give its server groups engine: embedded, or use another --eval-mode"
        raise ConfigError(Fault("--eval-model", name, reason, remedy))


def check_tokens(config: RunConfig, tokenizer: HubTokenizer, folders: Mapping[str, Path]) -> None:
    """Raises ConfigError where a model that is to score the policy's tokens knows others by their ids. `folders`
    are those of the models besides the one that is trained, by what the configuration calls them."""
    for flag, name in (("--ref-model", config.ref_model), ("--opd-teacher", config.opd_teacher)):
        path = next((plan.model_path for plan in roster(config) if plan.model == name), None)
        if path is None:  # that of --hf-checkpoint
            continue
        if load_tokenizer(folders[path]).inner.get_vocab() != tokenizer.inner.get_vocab():
            reason = f"the tokenizer of {path} gives other ids than that of {config.hf_checkpoint}"
            raise ConfigError(Fault(flag, str(name), reason, "take a model of the same family"))
