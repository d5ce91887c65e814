"""Prompt data, from a file or a generated task to the list of Prompts of a run.

Promises
- A prompt is tokenised once, here; engine and trainer both get that list of ids. Its length is counted on it,
  after the chat template, tools included.
- Order is kept, `prompt_id` is the row's number in the data (from 0, before slices and limits), so it is unique
  where rows repeat and stable when a limit changes. Ids that users give stay in the metadata.
- Labels and metadata keep the type that the file gives them.
- Every bad row is told, at load, with path:line, its first characters, the reason and a remedy (DataError).
- What becomes of odd rows: half a surrogate pair, bad UTF-8, an empty prompt, images: refused. A conversation
  that ends with an assistant message is continued in that message; any other gets a new assistant turn. Rows
  over the limit are dropped and counted (or refused); a limit that drops every row is an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from turnout.core.errors import DataError, Fault
from turnout.core.types import Prompt
from turnout.rollout import tasks
from turnout.rollout.conversation import (
    MEDIA_COLUMNS,
    PromptFault,
    check_text,
    messages,
    refuse_media,
    token_ids,
    tools,
)
from turnout.rollout.datasets import is_hub, saved_files
from turnout.rollout.rows import BadRow, Row, read_rows, refuse, split_path
from turnout.rollout.tokenizer import TokenizerLike

log = logging.getLogger(__name__)
Made = Callable[[Row, "DataSpec", TokenizerLike], Prompt]
ROW = "row"  # in a prompt's metadata: all columns of its row (DataSpec.columns)
_TEMPLATE_REMEDY = "set --apply-chat-template, or give a text"


@dataclass(frozen=True)
class DataSpec:
    """Which prompts to load and how. `path` is a .jsonl or .parquet file, a data set (turnout.rollout.datasets) or
    `reasoning_gym:TASK[:{options}]`, each with `@[a:b]` for a slice of rows. `max_prompt_tokens` None is no limit.
    `columns`: all that a row has goes into its prompt's metadata. `agent`: the context is an agent's to write, and
    a prompt is only how it begins."""

    path: str
    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    apply_chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    too_long: Literal["drop", "error"] = "drop"
    columns: bool = False
    agent: bool = False


@dataclass(frozen=True)
class Fingerprint:
    """What a position in the data is worth nothing without: compared on resume.

    `digest` is over the ids and labels of all prompts in order, so a changed tokenizer or template shows too."""

    size: int
    rows: int
    digest: str
    settings: dict[str, Any]

    def differences(self, other: Fingerprint) -> list[str]:
        """What changed from this one to the other, in words; empty where the data is the same."""
        found = [
            f"{key}: {old!r} then, {other.settings.get(key)!r} now"
            for key, old in self.settings.items()
            if other.settings.get(key) != old
        ]
        if self.size != other.size:
            found.append(f"the file had {self.size} bytes, now {other.size}")
        if self.rows != other.rows:
            found.append(f"there were {self.rows} prompts, now {other.rows}")
        if self.digest != other.digest and not found:
            found.append("same size and settings, but other prompts, another order, or another tokenizer")
        return found


def load_prompts(spec: DataSpec, tokenizer: TokenizerLike) -> list[Prompt]:
    """All prompts of a data set in file order; raises DataError with all faults, ModelError as the tokenizer."""
    return load_rows(spec, tokenizer, prompt_of)


def load_rows(spec: DataSpec, tokenizer: TokenizerLike, made: Made) -> list[Prompt]:
    """As load_prompts, with prompts that `made` makes of rows; it raises PromptFault for one that is no good."""
    if tasks.is_task(spec.path):
        spec = replace(spec, input_key="prompt", label_key="label", metadata_key="metadata", tool_key=None)
        rows, bad = tasks.task_rows(spec.path), []
    else:
        keys = (spec.input_key, spec.label_key, spec.metadata_key, spec.tool_key, *MEDIA_COLUMNS)
        named = tuple(key for key in keys if key is not None)
        rows, bad = read_rows(spec.path, None if spec.columns else named)
    prompts: list[Prompt] = []
    for row in rows:
        try:
            prompts.append(made(row, spec, tokenizer))
        except PromptFault as fault:
            bad.append(BadRow(row.where, row.shown, str(fault), fault.remedy))
    if bad:
        refuse(sorted(bad, key=_place))
    if not prompts:
        raise DataError(Fault("prompt data", spec.path, "the slice holds no row", "widen it"))
    _warn_of_unused_tools(rows, spec, tokenizer)
    return _within_limit(prompts, {row.index: row for row in rows}, spec)


def fingerprint(spec: DataSpec, prompts: list[Prompt]) -> Fingerprint:
    """The identity of loaded data: file size in bytes (0 for a task), rows, digest, settings."""
    total = hashlib.sha256()
    for prompt in prompts:
        line = [prompt.prompt_id, prompt.token_ids, prompt.label, prompt.metadata]
        total.update(json.dumps(line, sort_keys=True).encode() + b"\n")
    name, part = split_path(spec.path)
    size = 0 if tasks.is_task(spec.path) or is_hub(name) else sum(f.stat().st_size for f in _files(name))
    settings = {key: value for key, value in asdict(spec).items() if key != "path"}
    settings["slice"] = [part.start, part.stop]
    return Fingerprint(size, len(prompts), total.hexdigest(), settings)


def _files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    return saved_files(path) if path.is_dir() else [path]


def prompt_of(row: Row, spec: DataSpec, tokenizer: TokenizerLike) -> Prompt:
    values = row.values
    if spec.agent:
        return _agents_prompt(row, spec, tokenizer)
    refuse_media(values, tuple(key for key in MEDIA_COLUMNS if key != spec.input_key))
    value = required(values, spec.input_key, "prompt")
    if value in ("", []):
        raise PromptFault(f"the prompt (key {spec.input_key!r}) is empty")
    label = None if spec.label_key is None else _json_value(_label(values, spec.label_key), "label")
    given = tools(values.get(spec.tool_key)) if spec.tool_key is not None else None
    ids, text = _tokens(value, given, spec, tokenizer)
    if not ids:
        raise PromptFault("the prompt has no token")
    return Prompt(str(row.index), ids, text, label, _metadata(values, spec))


def _agents_prompt(row: Row, spec: DataSpec, tokenizer: TokenizerLike) -> Prompt:
    """What each conversation begins with, by the chat template; the row is the agent's."""
    ids = tokenizer.encode(rendered("", None, spec, tokenizer, opens=True), special=False)
    value, key = row.values.get(spec.input_key, ""), spec.label_key
    label = None if key is None else _json_value(_label(row.values, key), "label")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return Prompt(str(row.index), tuple(ids[:1]), text, label, _metadata(row.values, spec))


def _metadata(values: dict[str, Any], spec: DataSpec) -> dict[str, Any]:
    metadata = metadata_of(values, spec.metadata_key)
    return {**metadata, ROW: _json_value(values, "row")} if spec.columns else metadata


def _tokens(
    value: Any, given_tools: list[Any] | None, spec: DataSpec, tokenizer: TokenizerLike
) -> tuple[tuple[int, ...], str]:
    """The ids and the text of a prompt: the one place where prompts are tokenised."""
    if isinstance(value, list) and not isinstance(value[0], dict):
        if given_tools:
            raise PromptFault(
                "the row has tools, and its prompt is a list of ids", "put the tools into the ids"
            )
        ids = token_ids(value, tokenizer.size)
        return ids, tokenizer.decode(ids, skip_special_tokens=False)
    if isinstance(value, str):
        check_text(value)
    elif not isinstance(value, list):
        raise PromptFault(f"the prompt is {type(value).__name__}, not text, messages or ids")
    if not spec.apply_chat_template:
        if not isinstance(value, str):
            raise PromptFault(
                "the prompt is a list of messages, and no chat template applies", _TEMPLATE_REMEDY
            )
        if given_tools:
            raise PromptFault("the row has tools, and no chat template applies", _TEMPLATE_REMEDY)
        return tuple(tokenizer.encode(value, special=True)), value
    text = rendered(value, given_tools, spec, tokenizer)
    return tuple(tokenizer.encode(text, special=False)), text


def rendered(
    value: str | list[Any],
    given_tools: list[Any] | None,
    spec: DataSpec,
    tokenizer: TokenizerLike,
    opens: bool | None = None,
) -> str:
    """A conversation by the chat template; `opens` an answer at its end, or not (None: unless one is there)."""
    from jinja2 import TemplateError  # noqa: PLC0415

    talk = (
        [{"role": "user", "content": value}]
        if isinstance(value, str)
        else messages(value, marks=opens is not None)
    )
    goes_on = talk[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    if opens is not None:
        options = {"add_generation_prompt": opens}
    try:
        return tokenizer.render(talk, given_tools, {**options, **spec.chat_template_kwargs})
    except (TemplateError, TypeError, ValueError, KeyError) as fault:
        raise PromptFault(f"the chat template refuses the messages: {fault}") from fault


def required(values: dict[str, Any], key: str, what: str) -> Any:
    if key not in values:
        present = ", ".join(sorted(values)) or "none"
        raise PromptFault(f"has no {what} (key {key!r}; keys here: {present})")
    if values[key] is None:
        raise PromptFault(f"the {what} (key {key!r}) is null")
    return values[key]


def _label(values: dict[str, Any], key: str) -> Any:
    """A label may be null, which is kept; a row without the key is a fault."""
    if key not in values:
        raise PromptFault(f"has no label (key {key!r})")
    return values[key]


def metadata_of(values: dict[str, Any], key: str | None) -> dict[str, Any]:
    found = None if key is None else values.get(key)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as fault:
            raise PromptFault(f"the metadata (key {key!r}) is no JSON: {fault}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise PromptFault(f"the metadata (key {key!r}) is {type(found).__name__}, not an object")
    return _json_value(found, "metadata")


def _json_value(value: Any, what: str) -> Any:
    """The value itself, if it can be written to a ledger and an event log; Parquet also has other types."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError) as fault:
        raise PromptFault(f"the {what} cannot be written as JSON: {fault}") from None
    return value


def _within_limit(prompts: list[Prompt], rows: dict[int, Row], spec: DataSpec) -> list[Prompt]:
    limit = spec.max_prompt_tokens
    if limit is None:
        return prompts
    long = [p for p in prompts if len(p.token_ids) > limit]
    if long and spec.too_long == "error":
        places = [rows[int(p.prompt_id)] for p in long]
        remedy = "shorten it, or raise --rollout-max-prompt-len"
        refuse(
            [
                BadRow(row.where, row.shown, f"has {len(p.token_ids)} tokens; the limit is {limit}", remedy)
                for row, p in zip(places, long)
            ]
        )
    kept = [p for p in prompts if len(p.token_ids) <= limit]
    if not kept:
        shortest = min(len(p.token_ids) for p in prompts)
        reason = f"all {len(prompts)} rows have more than {limit} tokens; the shortest has {shortest}"
        raise DataError(Fault("prompt data", spec.path, reason, "raise --rollout-max-prompt-len"))
    if long:
        log.warning("%s: %d of %d rows have more than %d tokens and are dropped", spec.path, len(long),
                    len(prompts), limit)  # fmt: skip
    return kept


def _warn_of_unused_tools(rows: list[Row], spec: DataSpec, tokenizer: TokenizerLike) -> None:
    """A template that does not know tools ignores them in silence; the user should hear of it."""
    if spec.tool_key is None or not spec.apply_chat_template:
        return
    row = next((r for r in rows if tools(r.values.get(spec.tool_key))), None)
    if row is None:
        return
    value = row.values[spec.input_key]
    if isinstance(value, str) or isinstance(value[0], dict):
        given = tools(row.values[spec.tool_key])
        if rendered(value, given, spec, tokenizer) == rendered(value, None, spec, tokenizer):
            log.warning("%s: the rows have tools, but the chat template does not show them", spec.path)


def _place(row: BadRow) -> tuple[str, int]:
    path, _, line = row.where.rpartition(":")
    return path, int(line)
