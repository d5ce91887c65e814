"""The short way to a tokenizer gives what AutoTokenizer gives, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.engine_models import add_tokenizer, config
from turnout.core.errors import ModelError
from turnout.weights.tokenizer import _general, read_tokenizer

CODE = """
import sys
from pathlib import Path
from turnout.weights.tokenizer import read_tokenizer
assert read_tokenizer(Path(sys.argv[1])).decode([68, 69])
print([name for name in ("torch", "transformers.models.auto.tokenization_auto") if name in sys.modules])
"""


def made(folder, kind: str, **changes):
    add_tokenizer(folder)
    config(kind).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "short"),
    [
        *[
            (kind, {"tokenizer_class": "PreTrainedTokenizerFast"}, True)
            for kind in ("llama", "qwen3", "qwen3_moe")
        ],
        ("llama", {"tokenizer_class": "TokenizersBackend"}, True),
        ("llama", {"tokenizer_class": "LlamaTokenizerFast"}, False),
        ("qwen3", {"tokenizer_class": "Qwen2Tokenizer"}, False),
        ("qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}, False),
    ],
)
def test_it_is_the_tokenizer_of_auto_tokenizer(kind, changes, short, tmp_path):
    folder = made(tmp_path, kind, **changes)
    assert _general(folder) is short
    ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (ours.special_tokens_map, ours.init_kwargs) == (theirs.special_tokens_map, theirs.init_kwargs)


def test_code_of_a_checkpoint_is_left_to_transformers(tmp_path):
    assert not _general(made(tmp_path, "llama", auto_map={"AutoTokenizer": ["x.Y", None]}))


def test_the_short_way_needs_no_torch(tmp_path):
    folder = made(tmp_path, "llama", tokenizer_class="PreTrainedTokenizerFast")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_torn_file_is_told(tmp_path):
    folder = made(tmp_path, "llama", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer could be read"):
        read_tokenizer(folder)
