"""The critic's model: the layers of a causal language model under a scalar head.

Promises: its rows, its packing and the sharing of a prompt are those of the policy (turnout.train.model); the head
begins at zero, so that all values are 0 before the first step, whatever the backbone; its product is in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.train.fused import fuse
from turnout.train.head import HeadOptions
from turnout.train.model import DeviceRows, load_causal_model
from turnout.train.parameters import FlatParameters

HEAD = "value_head"


class ValueModel:
    """Owns its parameters: `flat` is their memory, in the compute dtype and as fp32 masters."""

    def __init__(self, folder: Path, dtype: torch.dtype, gradient_checkpointing: bool) -> None:
        """The backbone is that of an HF folder; raises ModelError as load_causal_model."""
        self._body = load_causal_model(folder, HeadOptions(), gradient_checkpointing)
        self._body.drop_head()
        width = self._body.embedding.shape[1]
        self.head = torch.nn.Linear(width, 1, device=self._body.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.flat = FlatParameters(self._named(), dtype)
        self._body.slots = self.flat.slots
        fuse(self._body.module, dtype)

    @property
    def device(self) -> torch.device:
        return self._body.device

    def values(self, rows: DeviceRows) -> Tensor:
        """fp32 [M]: the value of the state before each of the head's tokens."""
        hidden_MH = self._body.hidden(rows).float()
        return F.linear(hidden_MH, self.head.weight.float(), self.head.bias.float())[:, 0]

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._body.module.named_parameters()
        for name, parameter in self.head.named_parameters():
            yield f"{HEAD}.{name}", parameter
