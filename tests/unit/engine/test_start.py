"""What an engine imports until it has answered a request in token ids: every start and restart pays for it. The
tokenizer waits for a request that has to do with text."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine_models import add_tokenizer, make_model
from turnout.engine.generate_request import needs_text, parse_generate
from turnout.engine.replies import Progress, reply_row
from turnout.native.loader import library, path_taken
from turnout.protocol.sglang import GenerateRequest, SamplingParams

HEAVY = (
    "transformers", "tokenizers", "huggingface_hub", "jinja2", "pydantic", "yaml", "pandas", "scipy", "sympy",
    "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor",
)  # fmt: skip
ANSWER = """
import sys
from pathlib import Path
from turnout.engine import main
from turnout.engine.core import EngineCore
from turnout.engine.request_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.protocol.sglang import SamplingParams

settings = EngineSettings(Path(sys.argv[1]), max_total_tokens=2048)
core = EngineCore.build(settings, lambda request: None)
core.submit(Request("r", [5, 6, 7], SamplingParams(max_new_tokens=2, ignore_eos=True), 1))
while core.step():
    core.check()
print([name for name in sys.argv[2:] if name in sys.modules])
assert core.model.tokenizer.decode([100, 101])  # and text works when it is asked for
"""


@pytest.mark.skipif(library() is None, reason=f"the fused runner needs the C files; {path_taken()}")
def test_an_engine_starts_without_transformers(tmp_path):
    folder = add_tokenizer(make_model(tmp_path, "llama", torch.bfloat16))
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(folder), *HEAVY], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


IDS = GenerateRequest("r", (5, 6), SamplingParams(max_new_tokens=4)).to_json()


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        (IDS, False),
        ({"input_ids": [5], "return_text": False}, False),
        ({"input_ids": [5]}, True),
        (IDS | {"return_text": True}, True),
        (IDS | {"return_text_in_logprobs": True}, True),
        (IDS | {"sampling_params": {"stop": ["x"]}}, True),
        (IDS | {"input_ids": [[5], [6]], "sampling_params": [{}, {"stop": "x"}]}, True),
        ({"text": "a", "return_text": False}, True),
    ],
)
def test_which_calls_have_to_do_with_text(body, needs):
    assert needs_text(body) is needs


class Untold:
    """A model whose tokenizer must not be asked for."""

    config, shape = (
        SimpleNamespace(),
        SimpleNamespace(vocab_size=320, context_length=512, eos_ids=frozenset()),
    )

    @property
    def tokenizer(self) -> Any:
        raise AssertionError("the tokenizer was loaded")


def test_a_call_in_ids_is_answered_without_the_tokenizer():
    model: Any = Untold()
    (prompt,) = parse_generate(IDS, model).prompts
    request = prompt.request
    request.tokens += [7, 8]
    request.logprobs += [-0.5, -0.25]
    request.runs.append((2, "v"))
    assert (row := reply_row(prompt, model))["text"] == "" and row["output_ids"] == [7, 8]
    assert Progress(prompt, model).advance(request.spans) == ([7, 8], [-0.5, -0.25], "")
