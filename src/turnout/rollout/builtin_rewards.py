"""Built-in rewards. Each is a pure function of response and label; a label that it cannot use raises ValueError,
so that the sample is unscored with a reason instead of wrong.

exact          1.0 where the whole answer or its last line, stripped, is the label
last_number    1.0 where the last number of the answer equals the label in value ("1,234" = 1234, "42." = 42)
f1             overlap of words with the label, or the best of a list of labels, as SQuAD counts it
math           math-verify: equal as mathematics, LaTeX or plain
reasoning_gym  the score function of the task that the prompt comes from
"""

# ruff: noqa: ARG001 - every reward has the one signature

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from turnout.rollout import tasks

# A minus sign counts where nothing that could be subtracted from stands before it.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+\b)?"
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def exact(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    wanted = _label_text(label).strip()
    answer = response.strip()
    last_line = answer.splitlines()[-1].strip() if answer else ""
    return float(wanted in (answer, last_line))


def last_number(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    wanted = _last(_label_text(label).strip(), whole=True)
    if wanted is None:
        raise ValueError(f"the label {label!r} is no number")
    return float(_last(response) == wanted)


def f1(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    labels = label if isinstance(label, list) and label else [label]
    return max(_f1(_words(response), _words(_label_text(one))) for one in labels)


def math(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    """Deadlines are the caller's: math-verify's own use signals, which work in the main thread only."""
    from math_verify import parse, verify  # noqa: PLC0415

    text = _label_text(label).strip()
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its timers are off: they shall be
    gold = parse(text, parsing_timeout=0)
    if not gold and "$" not in text:
        gold = parse(f"${text}$", parsing_timeout=0)
    if not gold:
        raise ValueError(f"math-verify cannot read the label {label!r}")
    return float(verify(gold, parse(response, parsing_timeout=0), timeout_seconds=0))


def reasoning_gym(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    if tasks.METADATA_KEY not in metadata:
        raise ValueError(f"the prompt comes from no reasoning-gym task: no metadata {tasks.METADATA_KEY!r}")
    return tasks.score(response, metadata)


def no_reward(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    """For a run in which something else than a reward says what is good."""
    return 0.0


def agents_own(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    """For a run in which agents give the rewards."""
    raise ValueError("the agent returned no reward, and the run has none")


BUILTIN: dict[str, Callable[..., float]] = {
    "exact": exact,
    "last_number": last_number,
    "f1": f1,
    "math": math,
    "reasoning_gym": reasoning_gym,
}
# by names that no option has as a value
UNLISTED: dict[str, Callable[..., float]] = {"none": no_reward, "agent": agents_own}


def _label_text(label: Any) -> str:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label {label!r} is neither text nor a number")
    return label if isinstance(label, str) else repr(label)


def _last(text: str, whole: bool = False) -> Decimal | None:
    """The last number of a text; with `whole` the text itself has to be one number."""
    if whole:
        match = _NUMBER.match(text)
        found = [match.group()] if match and match.group() == text.removesuffix(".") else []
    else:
        found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def _words(text: str) -> list[str]:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", kept).split()


def _f1(answer: list[str], wanted: list[str]) -> float:
    if not answer or not wanted:
        return float(answer == wanted)
    common = sum((Counter(answer) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(answer), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
