"""From what a user writes as a model to a checkpoint folder on this machine.

A text is a folder, `tiny:KIND`, `smollm2-135m`, or a hub id (ORG/NAME). Every failure is a ModelError that
names the text. Nothing here loads a model.
"""

from __future__ import annotations

import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

from turnout.core.errors import Fault, ModelError
from turnout.train import model_smollm2, model_tiny
from turnout.train.model_cache import cached, copy_of, existing, place
from turnout.train.model_tiny import KINDS

__all__ = ["KINDS", "NAMES", "fetch", "resolve_checkpoint", "tiny"]

NAMES = (model_smollm2.NAME,)
PROBE_DEADLINE_S = 4.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "LICENSE*",
]
_SMOLLM2 = f"{model_smollm2.NAME}-{model_smollm2.ROOT[:12]}"
_TINY_RECIPE = 1  # raise it when model_tiny or its tokenizer changes, so that cached ones are made again


def fetch(name: str = model_smollm2.NAME, target: Path | None = None, prefer_hub: bool = False) -> Path:
    """The folder of a named model: in the cache, or copied to `target` where one is given.

    `prefer_hub` takes the original instead of the conversion where a hub answers within a few seconds.
    """
    if name not in NAMES:
        raise ModelError(Fault("model", name, "there is no model of this name", f"one of {', '.join(NAMES)}"))
    if prefer_hub and hub_answers(model_smollm2.HUB_ID):
        source = _from_hub(model_smollm2.HUB_ID)
    else:
        source = cached(_SMOLLM2, model_smollm2.build)
    return source if target is None else place(target, copy_of(source))


def tiny(target: Path, kind: str, seed: int = 0) -> Path:
    """A tiny random model (see model_tiny) in a new folder."""
    return place(target, lambda folder: model_tiny.build(folder, kind, seed))


def resolve_checkpoint(text: str) -> Path:
    """The checkpoint folder for a user's text; made or downloaded where it is not there yet."""
    folder = Path(text).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if text in NAMES:
        return fetch(text)
    if text.startswith("tiny:"):
        kind = text.removeprefix("tiny:")
        if kind not in KINDS:
            known = ", ".join(f"tiny:{k}" for k in KINDS)
            raise ModelError(Fault("checkpoint", text, "there is no such tiny model", f"one of {known}"))
        return cached(_tiny_key(kind), lambda made: model_tiny.build(made, kind, 0))
    if not _HUB_ID.fullmatch(text):
        known = ", ".join([*NAMES, *(f"tiny:{k}" for k in KINDS)])
        reason = "is no folder, no known model and no hub id (ORG/NAME)"
        raise ModelError(Fault("checkpoint", text, reason, f"name a checkpoint folder, or one of {known}"))
    return _checked(_from_hub(text))


def at_hand(text: str) -> Path | None:
    """The folder that `resolve_checkpoint` would give, where it is on this machine already: nothing is made,
    fetched or judged."""
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if text in NAMES:
        return existing(_SMOLLM2)
    if text.startswith("tiny:"):
        return existing(_tiny_key(text.removeprefix("tiny:")))
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    found = try_to_load_from_cache(text, "config.json") if _HUB_ID.fullmatch(text) else None
    return Path(found).parent if isinstance(found, str) else None


def _tiny_key(kind: str) -> str:
    return f"tiny-{kind}-{_TINY_RECIPE}"


def hub_answers(hub_id: str, deadline_s: float = PROBE_DEADLINE_S) -> bool:
    """Whether a hub serves this model now. Never waits longer than the deadline; HF_HUB_OFFLINE means no."""
    from huggingface_hub import constants  # noqa: PLC0415

    if _offline():
        return False
    answers: list[int] = []

    def probe() -> None:
        url = f"{constants.ENDPOINT}/{hub_id}/resolve/main/config.json"
        try:
            request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - the user's own endpoint
            with urllib.request.urlopen(request, timeout=deadline_s) as reply:  # noqa: S310
                answers.append(reply.status)
        except (OSError, ValueError):
            answers.append(0)

    # a thread, because resolving a host name has no timeout of its own
    thread = threading.Thread(target=probe, daemon=True, name="hub-probe")
    thread.start()
    thread.join(deadline_s)
    return answers == [200]


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    local_only = not hub_answers(hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=local_only))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as fault:
        reason = "is no folder here, and no hub that serves it can be reached" if local_only else str(fault)
        remedy = "download it to a folder and name that folder, or use smollm2-135m or tiny:llama"
        raise ModelError(Fault("checkpoint", hub_id, reason.splitlines()[0], remedy)) from fault


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        reason = "the folder has no config.json: it is not a Hugging Face checkpoint"
        raise ModelError(Fault("checkpoint", str(folder), reason, "name the folder that holds config.json"))
    return folder
