"""The tokenizer of a checkpoint folder, as AutoTokenizer of transformers makes it.

Promises: nothing is imported before it is asked for; nothing reaches for a hub. AutoTokenizer imports torch and
most of transformers (three seconds of CPU time) to find the class; where the folder names the general one, and
transformers 5.24 has no other opinion for its kind of model, that is taken without asking.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnout.core.errors import Fault, ModelError

GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")  # two names of one class
TAKEN_AT_THEIR_WORD = ("llama", "qwen3", "qwen3_moe")  # of qwen2 and mistral, transformers knows better


def read_tokenizer(folder: Path) -> Any:
    """Raises ModelError for a folder without a tokenizer."""
    try:
        if _general(folder):
            from transformers import PreTrainedTokenizerFast as Kind  # noqa: PLC0415 - see the module
        else:
            from transformers import AutoTokenizer as Kind  # noqa: PLC0415

        return Kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as fault:
        reason = f"no tokenizer could be read: {str(fault).splitlines()[0] if str(fault) else repr(fault)}"
        remedy = "the checkpoint folder must hold tokenizer.json and tokenizer_config.json"
        raise ModelError(Fault("tokenizer", str(folder), reason, remedy)) from fault


def _general(folder: Path) -> bool:
    try:
        model, named = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("config.json", "tokenizer_config.json")
        )
        return (
            model["model_type"] in TAKEN_AT_THEIR_WORD
            and named["tokenizer_class"] in GENERAL
            and "auto_map" not in named
            and (folder / "tokenizer.json").is_file()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
