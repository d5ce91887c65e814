"""Full versions: publishing against writing the same bytes raw, loading against copying them in memory.

    python -m benchmarks.full --json FILE [--rounds N] [--threads N]

SmolLM2-135M in bf16. `publish` is WeightStore.publish: files, digests, checksums, manifest, all synced. `raw`
writes the same bytes from memory to one file and syncs file and folder. `load` is what an engine does while it
serves: files in the page cache are checked (names, shapes, finite values), packed into fresh buffers and digested
there; `copy` is a copy of the files' pages into fresh memory. All in turns, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from turnout.engine.core import EngineCore
from turnout.engine.settings import EngineSettings
from turnout.placement.real import DiskStore
from turnout.train.model_zoo import fetch
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor

CHUNK = 8 << 20


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_raw(folder: Path, tensors: list[HostTensor]) -> None:
    with (folder / "raw").open("wb", buffering=0) as file:
        for tensor in tensors:
            data = memoryview(tensor.bits.view(np.uint8).data)
            for at in range(0, len(data), CHUNK):
                file.write(data[at : at + CHUNK])
        os.fsync(file.fileno())
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def copy_pages(folder: Path, pool: ThreadPoolExecutor) -> None:
    list(pool.map(lambda tensor: tensor.bits.copy(), read_checkpoint(folder)))


def measure(rounds: int, threads: int) -> dict[str, Any]:
    model = fetch()
    tensors = [HostTensor(t.name, t.dtype, t.shape, t.bits.copy()) for t in read_checkpoint(model)]
    total = sum(tensor.nbytes for tensor in tensors)
    torch.set_num_threads(threads)
    core = EngineCore.build(EngineSettings(model, threads=threads, max_total_tokens=2048), lambda _: None)
    names = ("publish", "raw", "load", "copy")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch, ThreadPoolExecutor(threads) as pool:
        store = WeightStore(Path(scratch) / "store", DiskStore(), model, 512 << 20)
        store.open("benchmark", 0, "0" * 32)
        for at in range(rounds + 1):
            found = {"raw": timed(lambda: write_raw(Path(scratch), tensors))}
            found["publish"] = timed(lambda: store.publish(tensors, 0))
            newest = store.root / store.versions()[-1].version.directory
            found["copy"] = timed(partial(copy_pages, newest, pool))
            found["load"] = timed(partial(core.weights.stage_folder, newest))
            for folder in store.root.glob("weight_v*"):
                shutil.rmtree(folder)
            if at:  # the first round is a warm-up
                for name in names:
                    seconds[name].append(found[name])
    middle = {name: median(values) for name, values in seconds.items()}
    return {
        "bytes": total,
        "threads": threads,
        "rounds": rounds,
        "seconds": {name: round(value, 4) for name, value in middle.items()},
        "all_seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "gb_per_s": {name: round(total / value / 1e9, 3) for name, value in middle.items()},
        "ratio_publish_to_raw": round(middle["raw"] / middle["publish"], 3),
        "ratio_load_to_copy": round(middle["copy"] / middle["load"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=machine.cpus())
    asked = parser.parse_args()
    found = {"machine": machine.describe(), **measure(asked.rounds, asked.threads)}
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("seconds", "gb_per_s")}))
    for name in ("ratio_publish_to_raw", "ratio_load_to_copy"):
        print(f"{name} {found[name]}")


if __name__ == "__main__":
    main()
