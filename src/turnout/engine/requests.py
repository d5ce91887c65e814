"""The bodies of control calls as typed values (that of /generate: turnout.engine.generate_request).

Promises: every refusal is a BadRequest with all faults of the body, raised before the compute thread hears of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.core.errors import Fault, UserError
from turnout.engine.core import PAUSE_MODES
from turnout.engine.settings import EngineSettings

RID_MAX = 256
TIMEOUT_MAX_S = 3600.0


class BadRequest(UserError):
    """A body that is refused with 400."""

    title = "request refused"


@dataclass(frozen=True)
class Update:
    """POST /update_weights_from_disk. `label` None means: the version that the folder's manifest names."""

    folder: Path
    label: str | None
    abort_all: bool
    flush: bool


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty object."""
    try:
        row = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as fault:
        raise BadRequest(Fault("body", "", f"is not JSON: {fault}")) from fault
    if not isinstance(row, dict):
        raise BadRequest(Fault("body", type(row).__name__, "must be a JSON object"))
    return row


def parse_abort(row: dict[str, Any]) -> str | None:
    """The id to abort, None for all."""
    everything, rid = row.get("abort_all", False), row.get("rid")
    if everything is True:
        return None
    if not isinstance(rid, str) or not rid:
        raise BadRequest(Fault("rid", str(rid), "must be the id of one request, or abort_all true"))
    return rid


def parse_pause(row: dict[str, Any]) -> str:
    mode = row.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise BadRequest(Fault("mode", str(mode), f"must be one of {', '.join(PAUSE_MODES)}"))
    return mode


def parse_timeout(text: str | None) -> float:
    """Seconds of a query's `timeout`, from 0 to TIMEOUT_MAX_S; 0 where there is none."""
    try:
        seconds = 0.0 if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= TIMEOUT_MAX_S:
        raise BadRequest(Fault("timeout", str(text)[:40], f"must be seconds from 0 to {TIMEOUT_MAX_S:g}"))
    return seconds


def parse_update(row: dict[str, Any], settings: EngineSettings) -> Update:
    """Defaults as in SGLang 0.5.23: abort_all_requests false, flush_cache true."""
    faults: list[Fault] = []
    path, label, load_format = row.get("model_path"), row.get("weight_version"), row.get("load_format")
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest(Fault("model_path", str(path), "must be a folder"))
    if label is not None and (not isinstance(label, str) or not 0 < len(label) <= RID_MAX):
        faults.append(Fault("weight_version", str(label)[:40], "must be a text"))
    if load_format not in (None, "auto", "safetensors"):
        faults.append(Fault("load_format", str(load_format), "must be auto or safetensors"))
    flags = {}
    for name, default in (("abort_all_requests", False), ("flush_cache", True)):
        flags[name] = row.get(name, default)
        if not isinstance(flags[name], bool):
            faults.append(Fault(name, str(flags[name]), "must be true or false"))
    folder = Path(path).resolve()
    roots = [root.resolve() for root in settings.allowed_roots]
    if not any(folder.is_relative_to(root) for root in roots) and (roots or not settings.loopback):
        faults.append(Fault("model_path", path, "lies outside the folders that updates may read from"))
    if faults:
        raise BadRequest(faults)
    return Update(folder, label, flags["abort_all_requests"], flags["flush_cache"])


def parse_label(row: dict[str, Any]) -> tuple[str, bool]:
    """Label and whether to abort all requests (SGLang's default is true) of /update_weight_version."""
    label, abort_all = row.get("new_version"), row.get("abort_all_requests", True)
    faults: list[Fault] = []
    if not isinstance(label, str) or not 0 < len(label) <= RID_MAX:
        faults.append(Fault("new_version", str(label)[:40], "must be a text"))
    if not isinstance(abort_all, bool):
        faults.append(Fault("abort_all_requests", str(abort_all), "must be true or false"))
    if faults:
        raise BadRequest(faults)
    return str(label), bool(abort_all)
