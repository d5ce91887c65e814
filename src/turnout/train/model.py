"""A causal language model of transformers as the trainer uses it: packed rows in, log-probs of chosen tokens out.

Promises: the model code is transformers'; what differs is the attention function (turnout.train.attention),
the embedding (its gradient goes sparse into the fp32 buffer) and the head (turnout.train.head). No dropout.
Buffers such as rotary frequencies stay in fp32 in every compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from turnout.core.errors import Fault, ModelError
from turnout.train import attention
from turnout.train.fused import fuse
from turnout.train.head import HeadOptions, chunked_logprobs
from turnout.train.parameters import GradientSlot
from turnout.train.rows import Rows

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class DeviceRows:
    """The tensors of one micro-batch on the model's device; meaning and shapes as in turnout.train.rows."""

    ids: Tensor
    positions: Tensor
    head_rows: Tensor
    targets: Tensor
    layout: attention.PackedLayout

    @staticmethod
    def of(rows: Rows, device: torch.device) -> DeviceRows:
        arrays = (rows.ids, rows.positions, rows.head_rows, rows.targets)
        return DeviceRows(
            *(torch.from_numpy(a).to(device) for a in arrays),
            layout=attention.PackedLayout(rows.blocks, device),
        )


class _SparseEmbedding(torch.autograd.Function):
    """Rows of the embedding; backward adds to the slot only the rows that were looked up."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, slot: GradientSlot) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.slot = slot
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,) = ctx.saved_tensors
        ctx.slot.ready().index_add_(0, ids, grads[0].float())
        return None, None, None


class CausalModel:
    """The module and what is left of its input and output. `slots` is set once its parameters are flat."""

    def __init__(self, module: torch.nn.Module, options: HeadOptions) -> None:
        self.module: Any = module
        self.options = options
        self.slots: dict[str, GradientSlot] = {}
        self._names = {id(p): name for name, p in module.named_parameters()}

    @property
    def embedding(self) -> torch.nn.Parameter:
        return self.module.get_input_embeddings().weight

    @property
    def head(self) -> torch.nn.Parameter:
        """The embedding where the head was dropped."""
        return getattr(self.module.get_output_embeddings(), "weight", self.embedding)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def tied_head(self) -> str | None:
        """The embedding's parameter name where the head shares it."""
        return self._names[id(self.embedding)] if self.head is self.embedding else None

    def drop_head(self) -> None:
        """For a model that is only asked for hidden states: an output head of its own takes no memory."""
        self.module.set_output_embeddings(torch.nn.Identity())

    def embed(self, ids: Tensor) -> Tensor:
        """[T, H]"""
        if torch.is_grad_enabled() and self.slots:
            return _SparseEmbedding.apply(self.embedding, ids, self._slot(self.embedding))  # pyright: ignore[reportReturnType]
        return F.embedding(ids, self.embedding)

    def hidden(self, rows: DeviceRows) -> Tensor:
        """Last hidden states [M, H] of the head's tokens. Differentiable where gradients are on."""
        embedded = self.embed(rows.ids)
        out = self.module.get_decoder()(
            inputs_embeds=embedded[None],
            position_ids=rows.positions[None],
            use_cache=False,
            packed=rows.layout,
        )
        return out.last_hidden_state[0].index_select(0, rows.head_rows)

    def logprobs(self, rows: DeviceRows) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, fp32 [M], of the head's tokens. Differentiable where gradients are on."""
        hidden_MH = self.hidden(rows)
        slot = self._slot(self.head) if self.slots else None
        return chunked_logprobs(hidden_MH, self.head, rows.targets, self.options, slot)

    def _slot(self, parameter: torch.nn.Parameter) -> GradientSlot:
        return self.slots[self._names[id(parameter)]]


def load_causal_model(folder: Path, options: HeadOptions, gradient_checkpointing: bool) -> CausalModel:
    """The model of an HF folder in fp32, on CUDA where there is a device, ready for packed rows.

    Raises ModelError where the folder holds no model that this trainer can run exactly.
    """
    config = read_config(folder)
    disable_progress_bar()
    module: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=attention.NAME, local_files_only=True
    )
    module.to("cuda" if torch.cuda.is_available() else "cpu")
    return prepare(module, folder, options, gradient_checkpointing)


def prepare(module: Any, folder: Path, options: HeadOptions, gradient_checkpointing: bool) -> CausalModel:
    """A module of transformers for packed rows; ModelError where its head is none that the trainer knows."""
    head = module.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError(Fault("--hf-checkpoint", str(folder), "its output head has a bias"))
    module.train(gradient_checkpointing)
    if gradient_checkpointing:
        module.activation_checkpointing_enable()
    return CausalModel(module, options)


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of a model that this trainer can run exactly; ModelError for any other."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as fault:
        reason = f"no readable HF model there ({str(fault).splitlines()[0]})"
        raise ModelError(Fault("--hf-checkpoint", str(folder), reason)) from fault
    except StrictDataclassError as fault:  # values that contradict each other, such as a head of odd size
        reason = f"its config.json is no good ({str(fault.__cause__ or fault).splitlines()[0]})"
        raise ModelError(Fault("--hf-checkpoint", str(folder), reason)) from fault
    faults: list[Fault] = []
    where = f"{folder}/config.json"
    if config.model_type not in SUPPORTED:
        reason = f"the trainer runs {', '.join(SUPPORTED)}"
        faults.append(Fault(f"{where}: model_type", str(config.model_type), reason))
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        faults.append(Fault(f"{where}: layer_types", str(sorted(kinds)), "only full attention is trained"))
    rotated = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1)
    if rotated not in (None, 1):
        reason = "only models that rotate whole heads are trained"
        faults.append(Fault(f"{where}: partial_rotary_factor", str(rotated), reason))
    if faults:
        raise ModelError(faults)
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if getattr(config, name, 0):
            setattr(config, name, 0.0)
    return config


def freeze(model: CausalModel, dtype: torch.dtype) -> CausalModel:
    """A reference: parameters in the compute dtype, no gradients ever."""
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    fuse(model.module, dtype)
    return model
