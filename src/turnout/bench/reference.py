"""What the model should answer: a plain forward of transformers in float32 on a checkpoint folder.

torch and transformers are imported at the first use only. Results are NumPy arrays; forwards run in a thread,
one at a time, and are kept for repeated prompts.

Legend: T positions, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_MAX = 256


class Reference:
    """The model of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model: Any = None
        self._tokenizer: Any = None
        self._kept: dict[tuple[int, ...], NDArray[np.float64]] = {}
        self._busy = asyncio.Lock()

    async def logits(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Logits [T, V] in float64 of a float32 forward; row t is what follows ids[:t + 1]."""
        key = tuple(ids)
        async with self._busy:
            if key not in self._kept:
                if len(self._kept) >= KEPT_MAX:
                    self._kept.clear()
                self._kept[key] = await asyncio.to_thread(self._forward, key)
            return self._kept[key]

    async def output_logprobs(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
    ) -> NDArray[np.float64]:
        """Log-softmax(logits / temperature) [len(output), V] at the places of the output's tokens."""
        logits_TV = await self.logits([*prompt, *output])
        return log_softmax(logits_TV[len(prompt) - 1 : -1] / temperature)

    def tokenizer(self) -> Any:
        """The folder's tokenizer, None where it has none."""
        if self._tokenizer is None and (self.folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer  # noqa: PLC0415

            self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        return self._tokenizer

    def _forward(self, ids: tuple[int, ...]) -> NDArray[np.float64]:
        import torch  # noqa: PLC0415

        if self._model is None:
            from transformers import AutoModelForCausalLM  # noqa: PLC0415
            from transformers.utils import logging  # noqa: PLC0415

            logging.disable_progress_bar()
            self._model = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            ).eval()
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].double().numpy()


def log_softmax(logits_TV: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))


def picked(logprobs_TV: NDArray[np.float64], tokens: Sequence[int]) -> NDArray[np.float64]:
    """The log-prob of each token at its place."""
    return logprobs_TV[np.arange(len(tokens)), list(tokens)]
