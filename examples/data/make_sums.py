"""Makes sums_train.jsonl, sums_heldout.jsonl and sums_heldout_one_shot.jsonl: sums of two two-digit numbers,
byte for byte the same each time.

    python examples/data/make_sums.py [FOLDER]

The pairs of operands, without their order, are split first: 256 go to the held-out file, one order each; the
training file takes rows from the others, in either order. So no held-out sum, and no sum with its operands
swapped, is in the training file. The one-shot file holds the same questions after one worked example: what the
untrained model reaches by prompting alone.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 20240607
TRAIN_ROWS = 2000
HELDOUT_ROWS = 256
LOW, HIGH = 10, 99
SYSTEM = "Reply with just the sum."
EXAMPLE = [{"role": "user", "content": "47 + 85 ="}, {"role": "assistant", "content": "132"}]


def row(left: int, right: int, example: bool = False) -> dict[str, object]:
    question = {"role": "user", "content": f"{left} + {right} ="}
    prompt = [{"role": "system", "content": SYSTEM}, *(EXAMPLE if example else ()), question]
    return {"prompt": prompt, "label": str(left + right), "metadata": {"left": left, "right": right}}


def make(folder: Path) -> None:
    chance = random.Random(SEED)
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(a, HIGH + 1)]
    chance.shuffle(pairs)
    heldout = [pair if chance.random() < 0.5 else pair[::-1] for pair in pairs[:HELDOUT_ROWS]]
    ordered = sorted({order for pair in pairs[HELDOUT_ROWS:] for order in (pair, pair[::-1])})
    train = chance.sample(ordered, TRAIN_ROWS)
    files = {
        "sums_train": (train, False),
        "sums_heldout": (heldout, False),
        "sums_heldout_one_shot": (heldout, True),
    }
    for name, (chosen, example) in files.items():
        lines = "".join(json.dumps(row(left, right, example)) + "\n" for left, right in chosen)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
