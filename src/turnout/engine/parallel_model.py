"""The module of transformers with one rank's part of the weights.

Promises: no rank ever holds the whole model (it is built without data, then given empty parameters of the rank's
own shapes, which the first update fills); every rank's hidden states are the same bits; a row's bits do not depend
on the batch. Layers out of a projection add over the ranks: two sums a layer and one for the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.core.errors import ModelError
from turnout.engine import attention, linear
from turnout.engine.linear import row_blocks
from turnout.engine.model import DTYPES, LoadedModel, read_config, shape_of
from turnout.engine.parallel_group import Group
from turnout.engine.parallel_plan import Sizes, faults
from turnout.engine.runner import ModuleForward
from turnout.engine.settings import EngineSettings
from turnout.engine.storage import ModuleStorage, Spec
from turnout.weights.map_rules import Place, piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS = "turnout_parallel_experts"


@dataclass(frozen=True)
class Shard:
    """One rank's model; `module` is the model's. `specs` and `tied`: the whole tensors, as in a checkpoint."""

    model: LoadedModel
    module: PreTrainedModel
    place: Place
    specs: dict[str, Spec]
    tied: list[list[str]]


class RowParallelLinear(nn.Linear):
    """Input columns of a linear layer; the ranks' products are added. Made from a live nn.Linear."""

    row_block: int
    group: Group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        bias = self.bias if self.group.rank == 0 else None  # added once
        flat = input.reshape(-1, input.shape[-1])
        part = row_blocks(flat, self.row_block, lambda x: F.linear(x, self.weight, bias))
        return self.group.add(part).view(*input.shape[:-1], self.weight.shape[0])


class VocabularyPart(nn.Embedding):
    """Rows of an embedding; ids of other ranks give zeros, and the ranks' rows are added."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Embedding's own name
        count = self.weight.shape[0]
        local = input - self.group.rank * count
        here = (local >= 0) & (local < count)
        rows = F.embedding(torch.where(here, local, 0), self.weight)
        return self.group.add(rows.masked_fill_(~here[..., None], 0))


class ParallelForward(ModuleForward):
    """ModuleForward over a shard: rank 0 gets the logits of the whole vocabulary, the others give their part."""

    def __init__(self, module: PreTrainedModel, row_block: int, group: Group) -> None:
        super().__init__(module, row_block)
        self._group = group

    def logits(self, hidden: Tensor) -> Tensor:
        return self._group.gather_columns(super().logits(hidden))


def check_split(config: Any, settings: EngineSettings) -> int:
    """Raises ModelError where the model cannot be divided as asked; returns its number of experts."""
    experts = int(getattr(config, "num_experts", 0))
    dense = not experts or bool(config.mlp_only_layers) or config.decoder_sparse_step > 1
    sizes = Sizes(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        config.intermediate_size if dense else 0,
        experts,
        config.moe_intermediate_size if experts else 0,
    )
    found = faults(sizes, settings.tp_size, settings.ep_size)
    if found:
        raise ModelError(found)
    return experts


def load_shard(settings: EngineSettings, rank: int, group: Group) -> Shard:
    """This rank's module, its weights undefined; raises ModelError with every fault."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow, see engine.model
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415

    config = read_config(settings)
    place = Place(rank, settings.tp_size, settings.ep_size, check_split(config, settings))
    attention.register()
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts_forward)
    extra = {"experts_implementation": EXPERTS} if place.experts else {}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[settings.dtype], attn_implementation=attention.NAME, **extra
        )
    module.eval().requires_grad_(False)
    whole = ModuleStorage(module)
    _take_part(module, place)
    _connect(module, settings.row_block, place, group)
    linear.convert(module, settings.row_block)
    shape = shape_of(config, settings)
    shape = replace(shape, kv_heads=shape.kv_heads // place.tp, heads=shape.heads // place.tp)
    model = LoadedModel(config, module, shape, settings.model_path)
    return Shard(model, module, place, whole.specs, whole.tied)


def _take_part(module: PreTrainedModel, place: Place) -> None:
    """Puts empty parameters of the rank's shapes in place of those without data; tied ones stay tied. Buffers
    (rotary frequencies) are made anew: each is derived from the config."""
    made: dict[int, nn.Parameter] = {}
    old = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in old:
        if id(parameter) not in made:
            shape = _local_shape(name, tuple(parameter.shape), place)
            made[id(parameter)] = nn.Parameter(torch.empty(shape, dtype=parameter.dtype), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made[id(parameter)])
    for name, part in list(module.named_modules()):
        if hasattr(part, "inv_freq"):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, type(part)(module.config))


def _local_shape(name: str, shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    if len(shape) != 3:
        part = piece(name, shape, place)
        return shape if part is None else part.shape(shape)
    _, rows, columns = shape  # a stack: gate_up_proj [experts, gate then up, hidden] or down_proj
    if name.endswith("down_proj"):
        return place.experts_here, rows, columns // place.expert_tp
    return place.experts_here, rows // place.expert_tp, columns


def _connect(module: PreTrainedModel, row_block: int, place: Place, group: Group) -> None:
    """Makes the layers that need the other ranks add over them."""
    for name, part in module.named_modules():
        leaf = name.rpartition(".")[2]
        if type(part) is nn.Linear:
            part.out_features, part.in_features = part.weight.shape
            if leaf in ("o_proj", "down_proj"):
                part.__class__ = RowParallelLinear
                part.row_block, part.group = row_block, group  # type: ignore[assignment]
        elif type(part) is nn.Embedding:
            part.__class__ = VocabularyPart
            part.group = group  # type: ignore[assignment]
        elif leaf == "experts":
            part.group, part.first_expert = group, place.first_expert  # type: ignore[assignment]


def _experts_forward(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """linear.experts_forward over this rank's experts; the ranks' sums are added in float32."""
    count = len(self.down_proj)  # type: ignore[arg-type]
    local = top_k_index - self.first_expert  # type: ignore[operator]
    local = torch.where((local >= 0) & (local < count), local, count)
    total = linear.expert_sum(self, hidden, local, top_k_weights)
    return self.group.add(total).to(hidden.dtype)  # type: ignore[union-attr, operator]
