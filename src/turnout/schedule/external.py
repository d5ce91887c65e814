"""Engines that somebody else runs, as a run's configuration names them: where, and how they are asked."""

from __future__ import annotations

import os
from pathlib import Path

from turnout.config.checks import sglang_faults
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault
from turnout.core.ports import Clock
from turnout.schedule.roster import roster
from turnout.serving.access import Access, authorities
from turnout.serving.discovery import ModelIdentity
from turnout.serving.external import ExternalEngines, Tenure, Wanted, plans_of
from turnout.serving.roster import EnginePlan

LEASE_S, PROBES = 30.0, 3  # of a run that ended without a word: at least so long, and so many probes
LEASE_S_MAX = 3600.0  # no engine is leased for longer
FILE = "--rollout-external-engine-file"


def external_access(config: RunConfig) -> Access:
    """Keys and certificates; raises ConfigError for a variable that is not set, or a file that has none."""
    ca = config.rollout_engine_ca_file
    return Access(
        _key("--rollout-engine-api-key-env", config.rollout_engine_api_key_env),
        _key("--rollout-engine-admin-key-env", config.rollout_engine_admin_key_env),
        None if ca is None else authorities(Path(ca), "--rollout-engine-ca-file"),
    )


def external_engines(config: RunConfig, model: Path, clock: Clock, who: tuple[str, int]) -> ExternalEngines:
    """How the run asks engines of somebody else; `model` is its checkpoint, `who` its id and incarnation."""
    identity, access = ModelIdentity.of_folder(model), external_access(config)
    probe_s = config.rollout_health_check_interval + config.rollout_health_check_timeout
    # until the first probe: the other engines start, and the first version is published
    first_s = config.engine_start_timeout_s + config.update_weight_timeout_s
    first_s += config.rollout_health_check_first_wait
    first_s, renewed_s = (min(LEASE_S_MAX, max(LEASE_S, s)) for s in (first_s, PROBES * probe_s))
    tenure = Tenure(*who, first_s=first_s, renewed_s=renewed_s)
    return ExternalEngines(Wanted(config.dtype, identity, access, sglang_faults(config)), clock, tenure)


def listed(file: Path) -> tuple[EnginePlan, ...]:
    """The engines of --rollout-external-engine-file; raises ConfigError, also where it can't be read."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(Fault(FILE, str(file), f"can't be read: {fault}", "give a text file")) from None
    return plans_of(lines, FILE)


def beginning_roster(config: RunConfig) -> tuple[EnginePlan, ...]:
    """The engines that a run begins with: those of its configuration, and those that its file names now."""
    plans, file = roster(config), config.rollout_external_engine_file
    if file is None:
        return plans
    named = {plan.engine_id for plan in plans}
    plans = (*plans, *(plan for plan in listed(Path(file)) if plan.engine_id not in named))
    if len(plans) < config.engines_needed:
        reason = f"the run begins with {len(plans)} engines and needs {config.engines_needed}"
        raise ConfigError(Fault(FILE, file, reason, "name more of them"))
    return plans


def _key(flag: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    found = os.environ.get(variable)
    if not found:
        raise ConfigError(Fault(flag, variable, "the environment has no such variable", "export it"))
    return found
