"""Functions of the user's own for advantages and for the loss (docs/algorithms/custom.md).

Promises: each is loaded once in a process; what it raises, and a result of the wrong size or that is not finite, is
told as a TrainError that names the option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from turnout.core.errors import TrainError
from turnout.core.imports import load_function
from turnout.core.types import TrainSample
from turnout.train.gae import Doubles

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGE = "--custom-advantage-function-path"
LOSS = "--custom-loss-function-path"


@cache
def own_function(flag: str, path: str) -> Callable[..., Any]:
    """What the option `flag` names, with what it raises made a TrainError; raises ConfigError."""
    return partial(_called, f"{flag} {path}", load_function(flag, path))


def _called(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as fault:  # a user's function may raise anything
        raise TrainError(f"{what}: {type(fault).__name__}: {fault}") from fault


def own_advantages(path: str, samples: Sequence[TrainSample]) -> list[Doubles]:
    """Advantages of each sample's tokens: the function is given the samples, all members of their groups, and gives
    for each one number, or one for each response token."""
    found = own_function(ADVANTAGE, path)(samples)
    if len(found) != len(samples):
        raise TrainError(f"{ADVANTAGE} {path} gave {len(found)} advantages for {len(samples)} samples")
    values: list[Doubles] = []
    for sample, given in zip(samples, found):
        one, count = np.asarray(given, np.float64), len(sample.response_ids)
        if one.shape not in ((), (count,)) or not np.isfinite(one).all():
            raise TrainError(
                f"{ADVANTAGE} {path}: a sample of group {sample.group_id} needs one finite number, or {count}; it "
                f"has {given}"
            )
        values.append(np.broadcast_to(one, (count,)))
    return values


def checked_surrogate(path: str, found: Any, like: Tensor) -> Tensor:
    """The loss of each token as a function of the user's gave it, always with a gradient where `like` has one: no
    rank may leave out its backward pass. Raises TrainError unless it is like `like`."""
    if getattr(found, "shape", None) != like.shape:
        shape = tuple(getattr(found, "shape", ())) or found
        raise TrainError(f"{LOSS} {path} gave {shape}, not a loss for each of {like.shape[0]} tokens")
    return found if found.requires_grad else found + 0 * like
