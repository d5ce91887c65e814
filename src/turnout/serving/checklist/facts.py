"""What `turnout check` looked at, before anything is concluded. Plain values: the verdicts are functions of
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.config.run_config import RunConfig
from turnout.serving.checklist.lines import Finding
from turnout.serving.client import Attestation
from turnout.serving.discovery import EngineInfo, ModelIdentity
from turnout.serving.roster import EnginePlan

UNTOUCHED = "default"  # the label of weights that no update has touched


@dataclass(frozen=True)
class ModelFacts:
    """The checkpoint that the run begins with. `folder` None: not on this machine yet, `fault` says why.
    `elements`: values of all tensors; `identity`: what names it; `root`: the digest of its values, empty where it
    was not computed, and `fault` says why then."""

    folder: Path | None
    fault: str = ""
    elements: int = 0
    identity: ModelIdentity = field(default_factory=ModelIdentity)
    root: str = ""


@dataclass(frozen=True)
class StoreFacts:
    """The folder of published versions. `fault`: why nothing can be written there (empty: it can). `free_bytes` for
    this user."""

    folder: Path
    fault: str
    free_bytes: int | None


@dataclass(frozen=True)
class HereFacts:
    """This machine. `gpus`: how many a process sees, None: not known; `proxies`: names of variables that are set.
    Findings that are made where one looks: `sglang` of --sglang-python, `router` of the router, `others` of the
    models besides the run's own, `depot` of the object store; each empty where there is none."""

    model: ModelFacts
    store: StoreFacts
    gpus: int | None
    proxies: tuple[str, ...]
    sglang: tuple[Finding, ...] = ()
    router: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    depot: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class EngineFacts:
    """One engine that somebody else runs. `fault`: why it does not answer (empty: it does); `strange`: why what
    answers is no engine (empty: it is one, and `said` is what it says of itself, `info` the same in its own shape);
    `weights` what it has loaded, None where `weights_fault` says why that is not known; `differs`: in what its
    checksums are not those of the checkpoint, empty: in nothing, None where they were not compared; `near` whether
    its address is of this host; `shared` what came of the probe of the store's folder, None where none was made."""

    name: str
    fault: str = ""
    strange: str = ""
    said: EngineInfo | None = None
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: Attestation | None = None
    weights_fault: str = ""
    differs: str | None = None
    near: bool = False
    shared: Finding | None = None


@dataclass(frozen=True)
class Deployment:
    """All of it. `plans`: every engine of the run; `engines`: facts of those that somebody else runs. `group`:
    what came of making a process group with them, None where the run makes none."""

    config: RunConfig
    here: HereFacts
    plans: tuple[EnginePlan, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    group: Finding | None = None

    @property
    def answering(self) -> tuple[tuple[EngineFacts, EngineInfo], ...]:
        """Those that answer as engines do, with what they say."""
        return tuple((engine, engine.said) for engine in self.engines if engine.said is not None)
