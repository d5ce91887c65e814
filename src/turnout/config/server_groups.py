"""`--sglang-config FILE`: which models are served, and by which groups of engines.

    sglang:
      - name: actor
        server_groups:
          - {worker_type: regular, num_gpus: 2}
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_total_tokens: 65536}}

The form and the names of the keys are slime's (its documentation of `--sglang-config`); `engine` is ours. A value
stands in the group, else in its model, else it is that of the option of the run. Promises: `read_models` tells all
unknown keys, wrong kinds and names that stand twice at once, with the file, the model and the group; a `Group`
holds nothing that is still to be looked up. What must hold between groups is in turnout.config.check_topology.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnout.config.file import read_file
from turnout.config.option import PATH
from turnout.core.errors import ConfigError, Fault

Worker = Literal["regular", "prefill", "decode", "placeholder"]
Program = Literal["embedded", "sglang"]
GROUP_LISTS = ("server_groups", "engine_groups")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class ServerGroup(_Strict):
    """Engines that are alike, as the file gives them. A placeholder keeps its devices free."""

    worker_type: Worker
    num_gpus: int = Field(ge=1)
    num_gpus_per_engine: int | None = Field(default=None, ge=1)
    overrides: dict[str, Any] = {}
    engine: Program | None = None


class ServedModel(_Strict):
    """One model as the file gives it; None is "as the run's option says"."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)
    model_path: str | None = Field(default=None, pattern=PATH)
    update_weights: bool | None = None
    num_gpus_per_engine: int | None = Field(default=None, ge=1)
    server_groups: list[ServerGroup] = Field(min_length=1)


@dataclass(frozen=True)
class Group:
    """A group of engines with every value decided. `place` names file, model and group for a person; `label` is how
    ids of its engines begin; `model_path` None is the run's own."""

    place: str
    label: str
    model: str
    worker_type: Worker
    num_gpus: int
    ranks: int
    program: Program
    updated: bool
    model_path: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.ranks


@dataclass(frozen=True)
class Unsaid:
    """What the options of the run say where the file says nothing."""

    hf_checkpoint: str
    ranks: int
    program: Program


def groups_of(path: Path, unsaid: Unsaid) -> tuple[Group, ...]:
    """All groups in the order of the file; raises ConfigError where its form is no good."""
    made: list[Group] = []
    for model in read_models(path):
        own = model.model_path
        if own is not None and _same(own, unsaid.hf_checkpoint):
            own = None
        updated = model.update_weights if model.update_weights is not None else own is None
        for number, group in enumerate(model.server_groups, 1):
            ranks = group.num_gpus_per_engine or model.num_gpus_per_engine or unsaid.ranks
            made.append(
                Group(
                    _place(path.name, model.name, number, group.worker_type),
                    f"{model.name}.{group.worker_type}{number}",
                    model.name,
                    group.worker_type,
                    group.num_gpus,
                    ranks,
                    group.engine if group.engine is not None else unsaid.program,
                    updated,
                    own,
                    group.overrides,
                )
            )
    return tuple(made)


@cache
def read_models(path: Path) -> tuple[ServedModel, ...]:
    """The models in the order of the file, read once by a process: what a run has does not change under it. Raises
    ConfigError with every fault."""
    found = read_file(path)
    faults = [*found.faults, *unknown_keys(path.name, found.values, ("sglang",))]
    rows = found.values.get("sglang")
    if not isinstance(rows, list) or not rows:
        reason, remedy = "is no list of models", "give sglang: [{name: ..., server_groups: [...]}]"
        raise ConfigError([*faults, Fault(path.name, "sglang", reason, remedy)])
    made = [_model(path.name, number, row, faults) for number, row in enumerate(cast("list[Any]", rows), 1)]
    names = [model.name for model in made if model is not None]
    faults += [
        Fault(f"{path.name}: model {name}", "", "the name stands twice", "give each its own")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if faults:
        raise ConfigError(faults)
    return tuple(model for model in made if model is not None)


def divisors(total: int) -> str:
    """The numbers that divide `total`, as text."""
    return ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)


def too_many(groups: Sequence[Group], available: int, offset: int = 0) -> Iterator[Fault]:
    """The fault of the first group that ends beyond the `available` devices, with all its values."""
    for group in groups:
        end = offset + group.num_gpus
        if end > available:
            reason = (
                f"worker_type {group.worker_type} begins at device {offset} with {group.engines} engines of "
                f"{group.ranks}: {end} are required, {available} are available"
            )
            remedy = "give fewer, or more devices (--rollout-num-gpus)"
            yield Fault(group.place, f"num_gpus {group.num_gpus}", reason, remedy)
            return
        offset = end


def _model(file: str, number: int, row: Any, faults: list[Fault]) -> ServedModel | None:
    """The model of a row; None where it is no good, with its faults added."""
    if not isinstance(row, dict):
        reason, remedy = "is no mapping", "give name and server_groups"
        faults.append(Fault(f"{file}: model {number}", str(row)[:40], reason, remedy))
        return None
    values = dict(cast("dict[str, Any]", row))
    name = values.get("name")
    place = f"{file}: model {name if isinstance(name, str) else number}"
    if all(key in values for key in GROUP_LISTS):
        faults.append(Fault(place, "engine_groups", "is another name of server_groups", "leave one out"))
    if "engine_groups" in values:
        values["server_groups"] = values.pop("engine_groups")
    try:
        return ServedModel.model_validate(values)
    except ValidationError as error:
        faults.extend(_fault(file, place, values, detail) for detail in error.errors(include_url=False))
        return None


def _fault(file: str, place: str, model: dict[str, Any], detail: Mapping[str, Any]) -> Fault:
    loc = list(detail["loc"])
    schema: type[BaseModel] = ServedModel
    if loc[0] == "server_groups" and len(loc) > 1:
        row: Any = model["server_groups"][loc[1]]
        worker = cast("dict[str, Any]", row).get("worker_type", "?") if isinstance(row, dict) else "?"
        place, schema = _place(file, str(model.get("name", "?")), loc[1] + 1, str(worker)), ServerGroup
        loc = loc[2:]
    key = ".".join(map(str, loc))
    if detail["type"] == "extra_forbidden":
        return next(iter(unknown_keys(place, [key], schema.model_fields)))
    value = key if detail["type"] == "missing" else f"{key} {str(detail['input'])[:40]}"
    reason = "is required" if detail["type"] == "missing" else str(detail["msg"])
    return Fault(place, value.strip(), reason[0].lower() + reason[1:])


def unknown_keys(place: str, keys: Iterable[str], known: Iterable[str]) -> list[Fault]:
    """A fault for each key that isn't known, with the nearest ones."""
    faults: list[Fault] = []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            faults.append(Fault(place, key, "no such key", remedy))
    return faults


def _place(file: str, model: str, number: int, worker: str) -> str:
    return f"{file}: model {model}, group {number} ({worker})"


def _same(one: str, other: str) -> bool:
    """Whether two model paths are one place, or one name of the hub."""
    return one == other or os.path.realpath(Path(one).expanduser()) == os.path.realpath(
        Path(other).expanduser()
    )
