"""The tokenizer as rollouts see it: text to ids and back, and the chat template.

Importing this module imports neither torch nor transformers. Promise: `load_tokenizer` raises ModelError for a
folder without a tokenizer, and rendering messages without a chat template is a ModelError that says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnout.core.errors import Fault, ModelError
from turnout.weights.tokenizer import read_tokenizer

Message = dict[str, Any]


class TokenizerLike(Protocol):
    """What rollouts need of a tokenizer."""

    @property
    def size(self) -> int:
        """Ids from 0 to size - 1 have a token; a model may have more rows than that."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response, sorted."""
        ...

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a text; `special` adds what the tokenizer puts around a text by itself, such as bos."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def render(self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]) -> str:
        """The text of a conversation by the chat template; `options` go to the template."""
        ...


@dataclass(frozen=True)
class HubTokenizer:
    """A tokenizer of transformers."""

    folder: Path
    inner: Any
    eos_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.inner)

    def encode(self, text: str, special: bool) -> list[int]:
        return self.inner.encode(text, add_special_tokens=special)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render(self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]) -> str:
        self.require_chat_template()
        return self.inner.apply_chat_template(messages, tools=tools, tokenize=False, **options)

    def require_chat_template(self) -> None:
        if self.inner.chat_template is None:
            reason = "the tokenizer has no chat template, and --apply-chat-template asks for one"
            remedy = "take an instruction-tuned checkpoint, or send the prompts as they are"
            raise ModelError(Fault("tokenizer", str(self.folder), reason, remedy))


def load_tokenizer(folder: Path) -> HubTokenizer:
    """The tokenizer of a checkpoint folder. Never reaches for a hub."""
    inner = read_tokenizer(folder)
    ids = set(_generation_eos(folder))
    if inner.eos_token_id is not None:
        ids.add(inner.eos_token_id)
    return HubTokenizer(folder, inner, tuple(sorted(ids)))


def _generation_eos(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except ValueError as fault:
        raise ModelError(Fault("tokenizer", str(path), f"is not JSON: {fault}")) from fault
    if found is None:
        return []
    return found if isinstance(found, list) else [found]
