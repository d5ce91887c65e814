"""One conversation as token ids that only grow. Pure.

A client sends the whole conversation with every request; what the model wrote in it is already there as tokens. So
only what follows the last answer is rendered and tokenised: the chat template is given a mark in place of that
answer, and what comes after the mark is new. Promises: tokens that exist are never made again from text; a
conversation that is another one than that which exists is a HistoryDiffers which names the message. Blanks around
an answer, and the spelling of a tool call's arguments, may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnout.rollout.conversation import PromptFault, messages, tools
from turnout.rollout.prompts import DataSpec, rendered
from turnout.rollout.tokenizer import Message, TokenizerLike

MARK = "TURNOUT-ANSWER-7f3a9c"


class HistoryDiffers(Exception):
    """The client's conversation is not the one that was recorded."""


class Conversation:
    """See the module. `spec`: what else the chat template is given. Raises PromptFault for messages and tools that
    cannot be rendered."""

    def __init__(self, tokenizer: TokenizerLike, spec: DataSpec) -> None:
        self._tokenizer, self._spec = tokenizer, spec
        self._known: list[Message] = []  # with the last answer
        self._tools: list[Any] | None = None
        self._closing = ""  # the end token of the last answer, where it had one

    @property
    def begun(self) -> bool:
        return bool(self._known)

    def new(self, talk: list[Any], given: Any) -> tuple[list[Message], list[int]]:
        """The messages in one form, and the ids that follow what exists: at the first time all of them, to the
        place where the model speaks. Nothing is taken over before `answered`."""
        told, wanted = messages(talk, marks=True), tools(given)
        if not self._known:
            return told, self._ids(rendered(told, wanted, self._spec, self._tokenizer, opens=True))
        self._check(told, wanted)
        marked = [*told]
        marked[len(self._known) - 1] = {"role": "assistant", "content": MARK}
        text = rendered(marked, wanted, self._spec, self._tokenizer, opens=True)
        if MARK not in text:
            raise PromptFault("the chat template does not show what an assistant said")
        return told, self._ids(text.rpartition(MARK)[2].removeprefix(self._closing))

    def answered(self, told: list[Message], given: Any, answer: Message, ids: Sequence[int]) -> None:
        """The model said `answer` after these messages, as these ids."""
        self._known, self._tools = [*told, *messages([answer], marks=True)], tools(given)
        ended = bool(ids) and ids[-1] in self._tokenizer.eos_ids
        self._closing = self._tokenizer.decode(ids[-1:], skip_special_tokens=False) if ended else ""

    def shows_tools(self, talk: list[Any], given: Any) -> bool:
        """Whether the template shows tools at all."""
        wanted = tools(given)
        texts = (rendered(talk, one, self._spec, self._tokenizer, opens=True) for one in (wanted, None))
        return wanted is None or next(texts) != next(texts)

    def same(self, talk: list[Any]) -> bool:
        """Whether these are the messages that the last answer was given to."""
        told = messages(talk, marks=True)
        return len(told) == len(self._known) - 1 and all(map(_same, told, self._known))

    def _check(self, told: list[Message], wanted: list[Any] | None) -> None:
        if wanted != self._tools:
            raise HistoryDiffers(
                "its tools are others than before, and they stand at the beginning of the context"
            )
        for at, known in enumerate(self._known):
            if at == len(told):
                raise HistoryDiffers(f"it has {at} messages, and {len(self._known)} were said")
            if not _same(told[at], known):
                shown = str(told[at].get("content"))[:60]
                raise HistoryDiffers(f"message {at} ({told[at]['role']}) is another than before: {shown!r}")
        if len(told) == len(self._known):
            raise HistoryDiffers("it ends with the last answer, nothing was said since")

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise PromptFault(f"the messages hold half of a character: {fault}") from None
        return self._tokenizer.encode(text, special=False)


def _same(one: Message, other: Message) -> bool:
    if one["role"] != other["role"] or _calls(one) != _calls(other):
        return False
    if one["role"] == "assistant":
        return one["content"].strip() == other["content"].strip()
    return one["content"] == other["content"]


def _calls(message: Message) -> list[tuple[Any, Any]]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return [(call.get("name"), call.get("arguments")) for call in calls]
