"""The critic's model: the layers of a causal language model under a scalar head.

Promises: its rows, its packing and the sharing of a prompt are those of the policy (turnout.train.model); the head
begins at zero, so that all values are 0 before the first step, whatever the backbone; its product is in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from turnout.train.fused import fuse
from turnout.train.head import HeadOptions
from turnout.train.model import DeviceRows, load_causal_model
from turnout.train.parameters import FlatParameters

HEAD = "value_head"


def new_head(width: int, device: torch.device) -> torch.nn.Linear:
    """A head that says 0 of everything."""
    head = torch.nn.Linear(width, 1, device=device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def head_values(hidden_MH: Tensor, head: torch.nn.Linear) -> Tensor:
    """fp32 [M], whatever the dtype of the model."""
    return hidden_MH.float() @ head.weight[0].float() + head.bias.float()  # no view: FSDP hooks it


class ValueModel:
    """Implements turnout.train.critic.Values. Owns its parameters: `flat` is their memory, in the compute dtype and
    as fp32 masters."""

    def __init__(self, folder: Path, dtype: torch.dtype, gradient_checkpointing: bool) -> None:
        """The backbone is that of an HF folder; raises ModelError as load_causal_model."""
        self._body = load_causal_model(folder, HeadOptions(), gradient_checkpointing)
        self._body.drop_head()
        self.head = new_head(self._body.embedding.shape[1], self._body.device)
        self.flat = FlatParameters(self._named(), dtype)
        self._body.slots = self.flat.slots
        fuse(self._body.module, dtype)

    @property
    def device(self) -> torch.device:
        return self._body.device

    def values(self, rows: DeviceRows) -> Tensor:
        return head_values(self._body.hidden(rows), self.head)

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._body.module.named_parameters()
        for name, parameter in self.head.named_parameters():
            yield f"{HEAD}.{name}", parameter
