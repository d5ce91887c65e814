"""The files that `turnout new` writes: run.yaml with a comment at every option, functions to edit, a little data.

Pure. Promises: what an option does is told in the words of its declaration, when to change it by WHEN; the data are
the same at every call, and no held-out task is among those to train on.
"""

from __future__ import annotations

import json
import random
import textwrap
from collections.abc import Iterator

from turnout.config.run_config import specs

WIDTH = 100
TRAIN, HELD_OUT = 256, 64
RUN, REWARD, GENERATE, AGENT = "run.yaml", "reward.py", "generate.py", "agent.py"
TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "heldout.jsonl"

WHEN: dict[str, str] = {
    "hf_checkpoint": "Change it to your model once the reward rises with this one. `tiny:llama` is a random model "
    "that is made in a moment: it learns no task, and shows in seconds whether a run works at all.",
    "loss_type": "Change it to policy_loss for rewards in place of answers: `turnout new --task rl` writes that.",
    "prompt_data": "Change it to your own file, a JSON object a line. Bad rows are told before anything starts.",
    "input_key": "Change it to what your rows call it.",
    "label_key": "Change it to what your rows call it.",
    "apply_chat_template": "Change it to false for a base model, or where prompts are complete as they are.",
    "eval_prompt_data": "Change it with prompt_data: tasks of the same kind that are never trained on.",
    "eval_interval": "Raise it where an evaluation takes long beside so many steps.",
    "custom_rm_path": "Edit the file: what it rewards is what the model learns.",
    "custom_generate_function_path": "Edit the file: a tool, a game, a user; whatever answers the model.",
    "custom_agent_path": "Edit the file, or name your program's function: it needs the endpoint's address and key.",
    "rollout_max_context_len": "Raise it for longer conversations; the trainer needs memory for the longest.",
    "rollout_max_turns": "Raise it where your function needs more; it ends one that goes round for ever.",
    "num_rollout": "Raise it for a longer run. One that ended goes no further: begin another from its weights.",
    "rollout_batch_size": "Raise it for a steadier gradient, lower it for faster steps.",
    "n_samples_per_prompt": "Raise it where most samples of a prompt get the same reward: that teaches nothing.",
    "rollout_max_response_len": "Raise it when answers are cut: the mean length, on the panel, comes near it.",
    "rollout_temperature": "Seldom changed: below 1 samples are alike, and there is less to choose from.",
    "advantage_estimator": "Change it after reading docs/algorithms: most others are small changes of grpo.",
    "lr": "Halve it where the reward jumps about or falls, double it where nothing moves. Large models want less: "
    "1e-6 is usual from a billion parameters on.",
    "lr_warmup_iters": "Raise it where the first steps do harm.",
    "schedule": "Change it to async when engines wait for the trainer, or it for them: the panel shows how long "
    "each phase takes. sync is the easiest to reason about.",
    "max_staleness": "Lower it to 0 where every token has to come from the newest weights.",
    "use_fault_tolerance": "Change it to false where an engine that ends should end the run.",
    "save_interval": "Lower it where steps are dear: an interrupted run goes on from its last checkpoint, when the "
    "same command is given with --run-dir.",
    "seed": "Change it to see how much of a result was luck.",
}

_MODEL = ("The model", {"hf_checkpoint": "smollm2-135m"})
_DATA = {
    "prompt_data": TRAIN_FILE,
    "input_key": "prompt",
    "label_key": "label",
    "apply_chat_template": "true",
}
_EVALUATED = {"eval_prompt_data": HELD_OUT_FILE, "eval_interval": "20"}
_KEEPING = ("What is kept", {"save_interval": "20", "seed": "1234"})
_LEARNING = (
    "How it learns",
    {"advantage_estimator": "grpo", "lr": "2.0e-5", "lr_warmup_iters": "2"},
)
_TRAFFIC = (
    "Who waits for whom",
    {"schedule": "sync", "max_staleness": "2", "use_fault_tolerance": "true"},
)
_SAMPLES = {"num_rollout": "40", "rollout_batch_size": "8", "n_samples_per_prompt": "8"}
_SIZES = ("How much", _SAMPLES | {"rollout_max_response_len": "20", "rollout_temperature": "1.0"})
_AGENT_TURNS = {
    "custom_agent_path": f"{AGENT}:agent",
    "rollout_max_turns": "4",
    "rollout_max_context_len": "512",
}
_TURNS = {"custom_generate_function_path": f"{GENERATE}:generate", "rollout_max_turns": "4"}
_SCORED = {"custom_rm_path": f"{REWARD}:reward"}

SECTIONS: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "rl": (
        _MODEL,
        ("The tasks", _DATA | _EVALUATED),
        ("The reward", _SCORED),
        _SIZES,
        _LEARNING,
        _TRAFFIC,
        _KEEPING,
    ),
    "multi-turn": (
        _MODEL,
        ("The tasks", _DATA | _EVALUATED),
        ("Turns and reward", _TURNS | _SCORED),
        ("How much", _SIZES[1] | {"rollout_max_response_len": "128"}),
        _LEARNING,
        _TRAFFIC,
        _KEEPING,
    ),
    "agent": (
        _MODEL,
        ("The tasks", _DATA | _EVALUATED),
        ("The agent, which gives the reward", _AGENT_TURNS),
        ("How much", _SIZES[1] | {"rollout_max_response_len": "128"}),
        _LEARNING,
        _TRAFFIC,
        _KEEPING,
    ),
    "sft": (
        _MODEL,
        ("The tasks and their answers", {"loss_type": "sft_loss"} | _DATA),
        ("How much", _SAMPLES | {"rollout_batch_size": "32", "n_samples_per_prompt": "1"}),
        ("How it learns", {"lr": "2.0e-5", "lr_warmup_iters": "2"}),
        _KEEPING,
    ),
}

_HEAD = """# {what} (`turnout new --task {task}`). It runs as it is:
#
#   turnout check run.yaml                                           what can be proved before it starts
#   turnout train run.yaml --hf-checkpoint tiny:llama --num-rollout 3   does it run? in half a minute
#   turnout train run.yaml
#
# Paths are relative to the folder in which the command is given. All options: turnout train --help-all
"""
_WHAT = {
    "rl": "Reinforcement learning with a reward of your own",
    "multi-turn": "Reinforcement learning of samples of several turns",
    "agent": "Reinforcement learning of a program, an agent",
    "sft": "Supervised fine-tuning on answers",
}

_REWARD = '''"""The reward of run.yaml: edit it, then `python reward.py` shows what it gives before a run does."""

import re


def reward(prompt, response, label, **metadata):
    """1 where the last number of the response is the label, else 0.

    `prompt` is the text that the model saw, `response` all that it said; `label` and `metadata` stand in the row of
    the data. Any number will do: what counts is how the samples of one prompt differ. It may be `async`, for a tool
    or a judge. A reward that raises, or gives None or NaN, is no 0: the group is dropped, and told.
    """
    numbers = re.findall(r"-?[0-9]+", response)
    return float(bool(numbers) and numbers[-1] == label)


if __name__ == "__main__":
    for said in ("The sum is 42.", "42 or 43", "I don't know"):
        print(f"{reward('20 + 22 =', said, '42'):.1f}  {said}")
'''
_GENERATE = '''"""How one sample of run.yaml is made: turns of the model, and what is said to it in between."""

import re

TURNS, TURN_TOKENS = 2, 20


async def generate(episode):
    """A wrong answer gets a hint and a second chance; a right one ends the sample.

    `episode.prompt` has the row: text, label, metadata. What `append` says carries no loss, and counts for
    rollout_max_response_len. The reward gets all of it as one response.
    """
    for number in range(TURNS):
        turn = await episode.generate(max_new_tokens=TURN_TOKENS)
        numbers = re.findall(r"-?[0-9]+", turn.text)
        if numbers and numbers[-1] == episode.prompt.label:
            return
        if number < TURNS - 1:
            hint = "too small" if numbers and int(numbers[-1]) < int(episode.prompt.label) else "not right"
            episode.append(f"\\nThat is {hint}. Once more, just the sum: ")
'''
_AGENT = '''"""The agent of run.yaml: it asks the model as any program asks OpenAI (pip install openai)."""

import re

from openai import AsyncOpenAI, BadRequestError

TURNS, TURN_TOKENS = 2, 20


async def agent(endpoint, row):
    """A wrong answer gets a hint and a second chance; the reward is 1 at once, 0.5 at the second try, else 0.

    `row` is a line of the data. What the model says through `endpoint` is what trains, to the token; what your
    program says to it carries no loss. An agent that raises is no 0: the group is dropped, and told.
    """
    messages = list(row["prompt"])
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for number in range(TURNS):
            try:
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=TURN_TOKENS
                )
            except BadRequestError as fault:
                if fault.code != "context_length_exceeded":
                    raise
                break  # no tokens are left
            message = answer.choices[0].message
            numbers = re.findall(r"-?[0-9]+", message.content or "")
            if numbers and numbers[-1] == row["label"]:
                return 1.0 / (1 + number)
            messages += [message, {"role": "user", "content": "That is not right. Once more, just the sum."}]
    return 0.0
'''


def files(task: str) -> dict[str, str]:
    """Name -> text of everything that is written for a task of SECTIONS."""
    train, held_out = _sums()
    found = {RUN: run_file(task), TRAIN_FILE: train}
    if task != "sft":
        found[HELD_OUT_FILE] = held_out
    functions = {
        "rl": {REWARD: _REWARD},
        "multi-turn": {REWARD: _REWARD, GENERATE: _GENERATE},
        "agent": {AGENT: _AGENT},
    }
    found |= functions.get(task, {})
    return found


def run_file(task: str) -> str:
    """run.yaml."""
    lines = [_HEAD.format(what=_WHAT[task], task=task)]
    for title, options in SECTIONS[task]:
        lines += [f"# ---- {title} {'-' * (WIDTH - 8 - len(title))}", ""]
        for name, value in options.items():
            lines += [*_comment(name), f"{name}: {value}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _comment(name: str) -> Iterator[str]:
    spec = specs()[name]
    choices = f" One of {', '.join(spec.choices)}." if spec.choices else ""
    for text, first in ((spec.text + choices, "# "), (WHEN[name], "#   ")):
        yield from textwrap.wrap(
            text, WIDTH, initial_indent=first, subsequent_indent=first, break_on_hyphens=False
        )


def _sums() -> tuple[str, str]:
    """Tasks to train on, and to hold out: sums of two numbers of two digits, each pair once."""
    drawn = random.Random(0).sample(range(90 * 90), TRAIN + HELD_OUT)
    rows = [_row(10 + one // 90, 10 + one % 90) for one in drawn]
    return "".join(rows[:TRAIN]), "".join(rows[TRAIN:])


def _row(left: int, right: int) -> str:
    prompt = [
        {"role": "system", "content": "Reply with just the sum."},
        {"role": "user", "content": f"{left} + {right} ="},
    ]
    return json.dumps({"prompt": prompt, "label": str(left + right)}) + "\n"
