"""The critic's model over ranks: turnout.train.value_model, divided as the policy is (turnout.train.sharded_model).

Promises: the names and the values of the parameters are those of ValueModel; what it tells of a micro-batch is the
same on every rank of a tensor-parallel row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from turnout.train.head import HeadOptions
from turnout.train.model import DeviceRows
from turnout.train.sharded_load import Source, empty_causal_model
from turnout.train.sharded_model import Mesh, ShardedModel
from turnout.train.value_model import HEAD, head_values, new_head


class ShardedValueModel(ShardedModel):
    """Implements turnout.train.critic.Values."""

    def __init__(self, folder: Path, mesh: Mesh, dtype: torch.dtype, gradient_checkpointing: bool) -> None:
        """The backbone is that of an HF folder. Collective; raises ModelError as ValueModel."""
        model = empty_causal_model(folder, HeadOptions(), gradient_checkpointing)
        source = Source(folder, model, torch.float32)
        model.drop_head()
        setattr(model.module, HEAD, new_head(model.embedding.shape[1], source.device))
        super().__init__(model, source, mesh, dtype)

    def values(self, rows: DeviceRows) -> Tensor:
        return self._root(rows)

    def run(self, rows: DeviceRows) -> Tensor:
        return head_values(self.hidden(rows), getattr(self.module, HEAD))
