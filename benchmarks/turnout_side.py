"""The Turnout half of `benchmarks.e2e`: `turnout train` as a user runs it, read from its run directory.

Promises: the run is a process of its own; its steps come from metrics.jsonl, with the seconds of a step split as
the TRL half splits them: generation (the rollout with its rewards), training, other (publish, update, the rest).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.e2e_workloads import GROUP_SIZE, LEARNING_RATE, PROMPTS_PER_STEP, Prompts, Workload

REWARD = Path(__file__).with_name("hash_reward.py")
PHASES = ("publish", "prepare", "activate")


def turnout_side(
    workload: Workload, prompts: Prompts, model: Path, folder: Path, deadline_s: float
) -> dict[str, Any]:
    """One run of `len(prompts.steps)` steps in `folder`; its steps, settings and summary.

    A run that fails comes back with `error` set to the last lines it wrote."""
    folder.mkdir(parents=True)
    rows = [json.dumps({"prompt": text}) for step in prompts.steps for text in step]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    settings = settings_of(workload, len(prompts.steps), model, folder)
    (folder / "e2e.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    run_dir = folder / "run"
    command = [
        str(Path(sys.executable).with_name("turnout")),
        "train",
        str(folder / "e2e.yaml"),
        "--run-dir",
        str(run_dir),
    ]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=deadline_s, check=False)
    if done.returncode != 0:
        tail = (folder / "log").read_text().strip().splitlines()[-5:]
        return {"error": f"exit status {done.returncode}: " + " | ".join(tail), "settings": settings}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [step_of(row) for row in rows if "seconds/step" in row]
    return {
        "error": None,
        "steps": steps,
        "optimizer_steps": int(sum(step["optimizer_steps"] for step in steps)),
        "samples_per_step": workload.samples_per_step,
        "settings": settings,
        "summary": json.loads((run_dir / "summary.json").read_text()),
    }


def settings_of(workload: Workload, steps: int, model: Path, folder: Path) -> dict[str, Any]:
    """The run's YAML. bf16 compute, fp32 master weights and optimizer states, threads as Turnout chooses."""
    return {
        "hf_checkpoint": str(model),
        "prompt_data": str(folder / "prompts.jsonl"),
        "input_key": "prompt",
        "custom_rm_path": f"{REWARD}:reward",
        "num_rollout": steps,
        "rollout_shuffle": False,
        "rollout_batch_size": PROMPTS_PER_STEP,
        "n_samples_per_prompt": GROUP_SIZE,
        "rollout_max_response_len": workload.new_tokens,
        "rollout_min_response_len": workload.new_tokens,
        "lr": LEARNING_RATE,
        "max_tokens_per_gpu": workload.turnout_pack,
        "panel": "off",
        "tensorboard": False,
        "plots": False,
    }


def step_of(row: dict[str, Any]) -> dict[str, Any]:
    """One row of metrics.jsonl in the names of `trl_side`."""
    total, generation, training = (float(row[f"seconds/{name}"]) for name in ("step", "rollout", "train"))
    step: dict[str, Any] = {
        "total": total,
        "generation": generation,
        "training": training,
        "other": total - generation - training,
        "response_tokens": int(row["tokens/response"]),
        "prompt_tokens": int(row["tokens/prompt"]) * GROUP_SIZE,  # Turnout counts a group's prompt once
        "optimizer_steps": int(row["optimizer_steps"]),
    }
    return step | {name: float(row[f"seconds/{name}"]) for name in PHASES}
