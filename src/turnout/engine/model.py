"""The model of a checkpoint folder: its shape, its tokenizer, and the module of transformers, made batch-invariant,
where the fused runner (engine.llama) does not take it.

Promises: a model that this engine would serve wrongly (sliding windows, rotary scaling that looks at the
batch, an unknown architecture) is refused with ModelError; the module that is returned
runs `module.base_model(input_ids [1, rows], position_ids [1, rows], step=StepRows)` and owns aligned parameters.
An engine with the fused runner and a plain config doesn't import transformers, which takes more CPU time than
torch, before a request has to do with text.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from turnout.core.errors import Fault, ModelError
from turnout.engine import attention, linear, llama, quantised
from turnout.engine.plain_config import plain_config
from turnout.engine.settings import UNQUANTISED, EngineSettings
from turnout.engine.shape import ModelShape
from turnout.weights.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
SERVED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """`module` is None where the weights are kept otherwise (engine.packed)."""

    config: Any
    module: PreTrainedModel | None
    shape: ModelShape
    folder: Path

    @cached_property
    def tokenizer(self) -> Any | None:
        """Loaded when it is first asked for; None where the folder has none: then only token ids are served. Raises
        ModelError for one that cannot be read."""
        return read_tokenizer(self.folder) if has_tokenizer(self.folder) else None

    async def text_ready(self) -> None:
        """Returns when the tokenizer is there; it is loaded beside the event loop."""
        if "tokenizer" not in vars(self):
            await asyncio.to_thread(lambda: self.tokenizer)


def read_config(settings: EngineSettings) -> Any:
    """The config of `settings.model_path`; raises ModelError with everything that is not served."""
    from transformers import AutoConfig  # noqa: PLC0415 - see the module

    folder = settings.model_path
    if not (folder / "config.json").is_file():
        raise ModelError(Fault("model_path", str(folder), "has no config.json"))
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as fault:
        raise ModelError(Fault("model_path", str(folder), f"config.json: {fault}")) from fault
    faults = list(_faults(config))
    if faults:
        raise ModelError(faults)
    return config


def load_model(settings: EngineSettings) -> LoadedModel:
    """Reads config, weights and tokenizer of `settings.model_path`; raises ModelError with every fault."""
    folder = settings.model_path
    config: Any = None if settings.runner == "module" else plain_config(folder)
    if config is None or llama.refusal(config, settings) is not None:
        config = read_config(settings)
    module = None if _fused(config, settings) else _module(folder, config, settings)
    if not has_tokenizer(folder):
        log.info("%s has no tokenizer: text prompts and stop strings are refused", folder.name)
    return LoadedModel(config, module, shape_of(config, settings), folder)


def _fused(config: Any, settings: EngineSettings) -> bool:
    """Whether the C path for Llama-like models is taken; what decides it is logged once."""
    if settings.runner == "module":
        return False
    reason = llama.refusal(config, settings)
    if reason is None:
        log.info("runner: fused (%s)", llama.kernel())
    elif settings.runner == "fused":
        raise ModelError(Fault("runner", "fused", f"cannot run this model: {reason}", "use auto or module"))
    else:
        log.info("runner: the module of transformers; the fused one cannot run this model: %s", reason)
    return reason is None


def _module(folder: Path, config: Any, settings: EngineSettings) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - see the module
    from transformers.utils import logging as hf_logging  # noqa: PLC0415

    hf_logging.disable_progress_bar()
    attention.register()
    linear.register()
    extra = {"experts_implementation": linear.EXPERTS} if config.model_type.endswith("_moe") else {}
    try:
        module = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[settings.dtype],
            attn_implementation=attention.NAME,
            local_files_only=True,
            **extra,
        )
    except (OSError, ValueError, RuntimeError) as fault:
        raise ModelError(
            Fault("model_path", str(folder), f"the weights cannot be loaded: {fault}")
        ) from fault
    module.eval().requires_grad_(False)
    linear.convert(module, settings.row_block)
    if settings.quantization != UNQUANTISED:
        quantised.convert(module, settings.quantization)
    return module


def _faults(config: Any) -> list[Fault]:
    faults = []
    if config.model_type not in SERVED:
        faults.append(
            Fault("model_type", str(config.model_type), f"is not served; known: {', '.join(SERVED)}")
        )
    sliding = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
    windowed = getattr(config, "sliding_window", None) is not None and not hasattr(config, "layer_types")
    if sliding or windowed:
        faults.append(Fault("sliding_window", str(getattr(config, "sliding_window", None)), "is not served"))
    rope = getattr(config, "rope_parameters", None) or {}
    kind, rotated = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1)
    if kind in ("dynamic", "longrope"):
        faults.append(Fault("rope_type", kind, "depends on the longest sequence of a batch; not served"))
    if rotated not in (None, 1):
        faults.append(
            Fault("partial_rotary_factor", str(rotated), "only models that rotate whole heads are served")
        )
    if getattr(config, "quantization_config", None) is not None:
        faults.append(Fault("quantization_config", "set", "quantised checkpoints are not served"))
    return faults


def shape_of(config: Any, settings: EngineSettings) -> ModelShape:
    """Raises ModelError where a longer context is asked for than the model has."""
    head_dim = getattr(config, "head_dim", None)
    own = int(config.max_position_embeddings)
    asked = settings.context_length
    if asked is not None and asked > own:
        raise ModelError(Fault("context_length", str(asked), f"the model's own is {own}"))
    return ModelShape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim if head_dim is not None else config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        context_length=min(own if asked is None else asked, settings.pages * settings.page_tokens),
        eos_ids=_eos_ids(settings.model_path, config),
    )


def _eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Those of generation_config.json where it is there, else config.json's."""
    ids, path = None, folder / "generation_config.json"
    if path.is_file():
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as fault:
            raise ModelError(Fault("model_path", str(path), f"is not JSON: {fault}")) from fault
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
