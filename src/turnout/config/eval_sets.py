"""`--eval-config FILE`: several held-out data sets, each with its own sampling, keys and reward.

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:
        - {name: aime, path: aime.jsonl, max_response_len: 4096}
        - {name: gsm8k, path: gsm8k.jsonl, temperature: 0, n_samples_per_eval_prompt: 1, rm_type: last_number}

The form and the names of the keys are slime's (its skill "add-eval-dataset-config"). A value stands in the data
set, else in `defaults`, else it is that of the option of the run. Promises: an unknown key, a value of the wrong
kind and a name that stands twice are told with their place, all at once, before anything starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnout.config.file import read_file
from turnout.config.option import PATH
from turnout.core.errors import ConfigError, Fault

FLAG = "--eval-config"


class EvalDataset(BaseModel):
    """One data set as the file gives it; None is "as the run's option says"."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    path: str = Field(pattern=PATH)
    n_samples_per_eval_prompt: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_new_tokens: int | None = Field(default=None, ge=0)
    max_response_len: int | None = Field(default=None, ge=1)
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    input_key: str | None = None
    label_key: str | None = None
    num_prompts: int | None = Field(default=None, ge=1)
    rm_type: Literal["exact", "last_number", "f1", "math", "reasoning_gym"] | None = None
    custom_rm_path: str | None = None


def read_eval_sets(path: Path) -> list[EvalDataset]:
    """The data sets in the order of the file; raises ConfigError with every fault."""
    found = read_file(path)
    faults = [*found.faults, *_unknown(path.name, "", found.values, ("eval",))]
    content: object = found.values.get("eval")
    if not isinstance(content, dict):
        raise ConfigError([*faults, Fault(path.name, "eval", "is no mapping", "give eval: datasets: [...]")])
    content = cast("dict[str, Any]", content)
    faults += _unknown(path.name, "eval.", content, ("defaults", "datasets"))
    defaults: object = content.get("defaults", {})
    rows = content.get("datasets")
    if not isinstance(defaults, dict):
        raise ConfigError([*faults, Fault(path.name, "eval.defaults", "is no mapping")])
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            [
                *faults,
                Fault(path.name, "eval.datasets", "is no list of data sets", "give name and path of each"),
            ]
        )
    sets: list[EvalDataset] = []
    for number, row in enumerate(cast("list[Any]", rows)):
        place = f"{path.name}: eval.datasets[{number}]"
        made = _dataset(place, cast("dict[str, Any]", defaults), row, faults)
        if made is not None and made.name in [other.name for other in sets]:
            faults.append(
                Fault(f"{place}.name", made.name, "stands twice", "give each data set its own name")
            )
        elif made is not None:
            sets.append(made)
    if faults:
        raise ConfigError(faults)
    return sets


def _dataset(place: str, defaults: dict[str, Any], row: Any, faults: list[Fault]) -> EvalDataset | None:
    if not isinstance(row, dict):
        faults.append(Fault(place, str(row)[:40], "is no mapping", "give name and path"))
        return None
    try:
        made = EvalDataset.model_validate(defaults | cast("dict[str, Any]", row))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            where = ".".join([place, *map(str, detail["loc"])])
            value = "" if detail["type"] == "missing" else str(detail["input"])[:40]
            known = ", ".join(EvalDataset.model_fields)
            remedy = f"known are {known}" if detail["type"] == "extra_forbidden" else ""
            faults.append(Fault(where, value, detail["msg"], remedy))
        return None
    if made.rm_type is not None and made.custom_rm_path is not None:
        faults.append(Fault(f"{place}.rm_type", made.rm_type, "two rewards", "leave one of the two out"))
    return made


def _unknown(name: str, before: str, values: dict[str, Any], known: tuple[str, ...]) -> list[Fault]:
    return [
        Fault(name, f"{before}{key}", "no such key", f"known are {', '.join(known)}")
        for key in values
        if key not in known
    ]
