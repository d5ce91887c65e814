"""Answers that the data gives, for supervised fine-tuning: from rows to prompts with responses and their masks.

Two forms of a row: messages that end with an assistant's (each of the assistant's trains), or a prompt and, as its
label (--label-key), the answer (that alone trains). Promises
- The prompt is what the engine would be asked with, to the token: all before the first turn that trains, with the
  template's opening of an answer. Each turn is tokenised on its own, as a model makes it.
- The mask is 1 for what the assistant says, to its end token, and 0 for the turns between and for what the template
  puts after an end token. An answer that no end token closes gets one.
- A template that renders a turn otherwise once more follow is refused, row by row: no mask would be right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnout.core.errors import DataError, Fault
from turnout.core.types import Finish, Prompt, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.rollout.conversation import PromptFault, check_text, messages, tools
from turnout.rollout.prompts import DataSpec, Row, load_rows, metadata_of, prompt_of, rendered, required
from turnout.rollout.sampler import Ask
from turnout.rollout.tokenizer import Message, TokenizerLike

DATA = "data"  # in the place of an engine's id
log = logging.getLogger(__name__)
_ONE_TURN = "give each answer a row of its own, with the messages before it as the prompt"


@dataclass(frozen=True)
class Demonstration:
    """A response: its ids, which of them train, and its text without special tokens."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    text: str


Shown = Mapping[str, Demonstration]  # by prompt id


def load_demonstrations(
    spec: DataSpec, tokenizer: TokenizerLike, longest: int
) -> tuple[list[Prompt], dict[str, Demonstration]]:
    """Prompts in file order and their answers; rows with a longer response, in tokens, are dropped and counted.
    Raises DataError with all faults."""
    shown: dict[str, Demonstration] = {}

    def made(row: Row, given: DataSpec, by: TokenizerLike) -> Prompt:
        prompt, shown[str(row.index)] = _demonstration(row, given, by)
        return prompt

    prompts = load_rows(spec, tokenizer, made)
    kept = [prompt for prompt in prompts if len(shown[prompt.prompt_id].ids) <= longest]
    if not kept:
        reason = f"all responses have more than {longest} tokens"
        raise DataError(Fault("prompt data", spec.path, reason, "raise --rollout-max-response-len"))
    if len(kept) < len(prompts):
        lost = len(prompts) - len(kept)
        log.warning("%s: %d responses have more than %d tokens and are dropped", spec.path, lost, longest)
    return kept, shown


class Demonstrations:
    """Makes samples of what the data shows, in the place of a Sampler; they count as of the version that is current
    when they are taken."""

    def __init__(self, shown: Shown, version: Callable[[], str]) -> None:
        """`version`: the label of the current one."""
        self._shown, self._version = shown, version

    async def sample(self, ask: Ask) -> Trajectory:
        shown = self._shown[ask.prompt.prompt_id]
        count = len(shown.ids)
        return Trajectory(
            response_ids=shown.ids,
            logprobs=(0.0,) * count,
            loss_mask=shown.mask,
            spans=VersionSpans(((count, self._version()),)),
            finish=Finish.STOP,
            text=shown.text,
            engines=Runs(((count, DATA),)),
            seed=ask.begun.seed,
        )


def _demonstration(row: Row, spec: DataSpec, tokenizer: TokenizerLike) -> tuple[Prompt, Demonstration]:
    answer = None if spec.label_key is None else required(row.values, spec.label_key, "answer")
    if answer is not None and not (isinstance(answer, str) and check_text(answer)):
        raise PromptFault(f"the answer (key {spec.label_key!r}) is no text, or empty")
    if not spec.apply_chat_template:
        if answer is None:
            raise PromptFault(
                "the row has no answer", "give --label-key, or messages with --apply-chat-template"
            )
        shown = _closed([(tokenizer.encode(answer, special=False), 1)], tokenizer)
        return prompt_of(row, spec, tokenizer), shown
    talk, first = _talk(required(row.values, spec.input_key, "prompt"), answer)
    given = None if spec.tool_key is None else tools(row.values.get(spec.tool_key))
    (opening, _), *turns = _turns(talk, first, given, spec, tokenizer)
    ids = tuple(tokenizer.encode(opening, special=False))
    parts = [(tokenizer.encode(text, special=False), trains) for text, trains in turns]
    shown = _closed(parts, tokenizer)
    label = shown.text if answer is None else answer
    return Prompt(str(row.index), ids, opening, label, metadata_of(row.values, spec.metadata_key)), shown


def _talk(value: Any, answer: str | None) -> tuple[list[Message], int]:
    """The conversation, and the first message that trains."""
    if isinstance(value, str):
        value = [{"role": "user", "content": check_text(value)}]
    if not (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        raise PromptFault("the prompt is no text and no list of messages")
    talk = messages(value)
    if answer is not None:
        return [*talk, {"role": "assistant", "content": answer}], len(talk)
    first = next((at for at, message in enumerate(talk) if message["role"] == "assistant"), 0)
    if not first or talk[-1]["role"] != "assistant":
        raise PromptFault(
            "no message of the assistant comes after another and ends the row", "give --label-key"
        )
    return talk, first


def _turns(
    talk: list[Message], first: int, given: list[Any] | None, spec: DataSpec, tokenizer: TokenizerLike
) -> list[tuple[str, int]]:
    """The text of the conversation in parts, each with its mask; the first is the prompt."""
    whole = rendered(talk, given, spec, tokenizer, opens=False)
    parts: list[tuple[str, int]] = []
    at = 0
    for number in range(first, len(talk)):
        if talk[number]["role"] != "assistant":
            continue
        begins = rendered(talk[:number], given, spec, tokenizer, opens=True)
        ends = rendered(talk[: number + 1], given, spec, tokenizer, opens=False)
        if not (whole.startswith(begins) and whole.startswith(ends) and at <= len(begins) < len(ends)):
            raise PromptFault(
                f"the chat template shows message {number} otherwise within the whole conversation", _ONE_TURN
            )
        parts += [(whole[at : len(begins)], 0), (whole[len(begins) : len(ends)], 1)]
        at = len(ends)
    return parts


def _closed(parts: list[tuple[list[int], int]], tokenizer: TokenizerLike) -> Demonstration:
    """The response of these parts."""
    ids: list[int] = []
    mask: list[int] = []
    ended = False
    for part, trains in parts:
        ends = [at for at, token in enumerate(part) if token in tokenizer.eos_ids]
        ended = bool(trains and ends)
        last = ends[-1] + 1 if ended else len(part)
        ids += part
        mask += [trains] * last + [0] * (len(part) - last)
    if not ended and tokenizer.eos_ids:
        ids.append(tokenizer.eos_ids[0])
        mask.append(1)
    last = len(mask) - mask[::-1].index(1)
    ids, mask = ids[:last], mask[:last]
    return Demonstration(tuple(ids), tuple(mask), tokenizer.decode(ids, skip_special_tokens=True))
