"""The texts of a trajectory: what each token says, and the prompt it answers. Read where they are at hand.

Owns nothing. Promises: no model is loaded, made or fetched for it; where a text can't be had the reason is told in
its place. A character of several tokens stands at its last one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnout.core.errors import TurnoutError
from turnout.rollout.datasets import is_hub
from turnout.rollout.rows import read_rows, split_path

MAX_DATA_BYTES = 256 << 20
MAX_PROMPT_CHARACTERS = 20_000
HALF = "\ufffd"


class Texts:
    """`config` is the run's configuration as it was written, `find` gives the folder of a checkpoint's name."""

    def __init__(self, config: dict[str, Any], find: Callable[[str], Path | None]) -> None:
        self._config, self._find = config, find
        self._decode: Callable[[Sequence[int]], str] | None = None
        self.missing = ""
        self._tried = False

    def pieces(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[str] | None:
        """One text per token, as it reads after `before`; None without a tokenizer (`missing` says why)."""
        decode = self._tokenizer()
        if decode is None:
            return None
        texts: list[str] = []
        front, held = list(before or token_ids[:1]), list[int]()
        for token in token_ids:
            held.append(token)
            text = _after(decode, front, held)
            if text.endswith(HALF) and len(held) < 8:
                texts.append("")
                continue
            texts.append(text)
            front, held = held, []
        if held:
            texts[-1] = _after(decode, front, held)
        return texts

    def _tokenizer(self) -> Callable[[Sequence[int]], str] | None:
        if self._tried:
            return self._decode
        self._tried = True
        name = str(self._config.get("hf_checkpoint") or "")
        try:
            folder = self._find(name) if name else None
        except TurnoutError as fault:
            folder, self.missing = None, str(fault)
        path = None if folder is None else folder / "tokenizer.json"
        if path is None or not path.is_file():
            self.missing = self.missing or f"no tokenizer.json of {name or 'the checkpoint'} on this machine"
            return None
        self._decode, self.missing = _load(path)
        return self._decode

    def prompt(self, prompt_id: str) -> tuple[str, str]:
        """(text, why there is none) of a row of the prompt data, as the file is now."""
        data = self._config.get("prompt_data")
        if not isinstance(data, str) or data.startswith("reasoning_gym:"):
            return "", "the prompts of this run are made, not read from a file"
        if data.startswith("verifiers:"):
            return (
                "",
                f"the prompts of this run come from an environment of verifiers ({data}), not from a file",
            )
        if is_hub(data):
            return "", f"the prompts of this run come from {data}; the dashboard reads no data set of the hub"
        if not prompt_id.isdecimal():
            return "", "the prompt has no row number"
        path = Path(split_path(data)[0]).expanduser()
        if not path.exists():
            return "", f"{path} is not here: start this in the directory in which the run was started"
        stat = path.stat()
        if path.is_file() and stat.st_size > MAX_DATA_BYTES:
            return "", f"{path} is too large to be searched for one row"
        key = str(self._config.get("input_key") or "input")
        label = self._config.get("label_key")
        columns = (key, label) if isinstance(label, str) else (key,)
        return _row(str(path), stat.st_mtime_ns, int(prompt_id), columns)


def _after(decode: Callable[[Sequence[int]], str], front: list[int], ids: list[int]) -> str:
    """What tokens add to the text of those in front: some tokenizers drop the blank that a text begins with."""
    base, text = decode(front), decode([*front, *ids])
    return text[len(base) :] if text.startswith(base) else decode(ids)


def _load(path: Path) -> tuple[Callable[[Sequence[int]], str] | None, str]:
    from tokenizers import Tokenizer  # noqa: PLC0415  late: only a trajectory needs it

    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as fault:  # noqa: BLE001  the library raises no type of its own
        return None, f"{path} can't be read: {fault}"
    return lambda ids: inner.decode(list(ids), skip_special_tokens=False), ""


@lru_cache(256)
def _row(path: str, changed: int, number: int, columns: tuple[str, ...]) -> tuple[str, str]:
    del changed  # a part of the key
    try:
        rows, _ = read_rows(f"{path}@[{number}:{number + 1}]", columns)
    except TurnoutError as fault:
        return "", str(fault)
    if not rows:
        return "", f"{path} has no row {number} that can be read"
    values = rows[0].values
    text = _shown(values.get(columns[0]))
    if len(columns) > 1 and columns[1] in values:
        text += f"\n\n[label] {_shown(values[columns[1]])}"
    return text[:MAX_PROMPT_CHARACTERS], ""


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        turns = (f"[{turn['role']}] {_shown(turn.get('content', ''))}" for turn in value)
        return "\n".join(turns)
    return json.dumps(value, ensure_ascii=False)
