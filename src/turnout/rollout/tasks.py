"""Tasks of reasoning-gym by name: `reasoning_gym:TASK`, with options as JSON: `reasoning_gym:TASK:{"size": 500}`.

`size` (default 1000) and `seed` (default 0) say which items; the other options go to the task. Promises: the
same text gives the same items; two seeds share no item's random stream, so that a second seed is held-out data
(reasoning-gym itself draws item i from seed + i, so that neighbouring seeds overlap there); a prompt's metadata
holds what its verifier needs, in JSON, and the verifier is the task's own score function. reasoning-gym is an
optional dependency: without it there is a ConfigError with the command that installs it.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from turnout.core.errors import ConfigError, DataError, Fault
from turnout.rollout import verifiers_env
from turnout.rollout.rows import Row, shown, split_path

PREFIX = "reasoning_gym:"
METADATA_KEY = "reasoning_gym"
DEFAULT_SIZE, DEFAULT_SEED = 1000, 0
SEED_STRIDE = 1 << 24  # items that one seed has; keeps the first 256 seeds within 32 bits
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def is_task(path: str) -> bool:
    """Whether a program makes the prompts."""
    return path.startswith(PREFIX) or verifiers_env.is_verifiers(path)


def task_rows(path: str) -> list[Row]:
    """The items of a task (or of a slice of it), as rows with the keys prompt, label and metadata."""
    if verifiers_env.is_verifiers(path):
        return verifiers_env.task_rows(path)
    text, wanted = split_path(path)
    name, options = _parts(text)
    dataset = _dataset(name, options)
    rows: list[Row] = []
    for index in range(*wanted.indices(len(dataset))):
        entry = dataset[index]
        metadata = {METADATA_KEY: {"task": name, "options": json.loads(options), "index": index}}
        values = {"prompt": entry["question"], "label": entry["answer"], "metadata": metadata}
        rows.append(Row(index, f"{PREFIX}{name}:{index}", shown(entry["question"]), values))
    return rows


def score(response: str, metadata: dict[str, Any]) -> float:
    """The task's own score of a response, usually 0 to 1. The answer is the text in the last <answer> tags,
    without tags the whole response; KeyError where the prompt is none of a reasoning-gym task."""
    item = metadata[METADATA_KEY]
    options = json.dumps(item["options"], sort_keys=True)
    tagged = _ANSWER.findall(response)
    answer = (tagged[-1] if tagged else response).strip()
    return float(
        _dataset(item["task"], options).score_answer(answer, _entry(item["task"], options, item["index"]))
    )


def _parts(text: str) -> tuple[str, str]:
    """The name and the options in one spelling of JSON."""
    name, _, raw = text.removeprefix(PREFIX).partition(":")
    try:
        options = json.loads(raw) if raw else {}
    except ValueError as fault:
        remedy = 'write reasoning_gym:TASK:{"size": 500, "seed": 1}'
        raise DataError(Fault("prompt data", text, f"the options are no JSON: {fault}", remedy)) from None
    if not isinstance(options, dict):
        raise DataError(Fault("prompt data", text, "the options are no JSON object"))
    options = {"size": DEFAULT_SIZE, "seed": DEFAULT_SEED, **options}
    for key, least, most in (("size", 1, SEED_STRIDE), ("seed", 0, SEED_STRIDE)):
        value = options[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            reason = f"{key} {value!r} is no whole number from {least} to {most}"
            raise DataError(Fault("prompt data", text, reason))
    return name, json.dumps(options, sort_keys=True)


@functools.lru_cache(maxsize=16)
def _dataset(name: str, options: str) -> Any:
    try:
        import reasoning_gym  # noqa: PLC0415
        from reasoning_gym.factory import DATASETS  # noqa: PLC0415
    except ImportError:
        remedy = "pip install 'turnout[reasoning-gym]'"
        raise ConfigError(
            Fault("prompt data", f"{PREFIX}{name}", "reasoning-gym is not installed", remedy)
        ) from None
    if name not in DATASETS:
        raise DataError(
            Fault("prompt data", f"{PREFIX}{name}", "reasoning-gym has no such task", _near(name, DATASETS))
        )
    try:
        given = json.loads(options)
        return reasoning_gym.create_dataset(name, **{**given, "seed": given["seed"] * SEED_STRIDE})
    except (TypeError, ValueError, AssertionError) as fault:
        raise DataError(
            Fault("prompt data", f"{PREFIX}{name}:{options}", f"the task refuses its options: {fault}")
        ) from fault


@functools.lru_cache(maxsize=4096)
def _entry(name: str, options: str, index: int) -> dict[str, Any]:
    return _dataset(name, options)[index]


def _near(name: str, known: dict[str, Any]) -> str:
    import difflib  # noqa: PLC0415

    close = difflib.get_close_matches(name, known, n=3)
    return (
        f"did you mean {', '.join(close)}?"
        if close
        else f"one of {len(known)} names, such as basic_arithmetic"
    )
