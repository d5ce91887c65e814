"""Starts two engines as somebody else would, the second one late. They know nothing of any run.

    python examples/external/engines.py            # in one terminal; ends with Ctrl-C
    turnout train examples/external/run.yaml       # in another one

An SGLang takes the place of one of them just as well:

    python -m sglang.launch_server --model-path MODEL --dtype bfloat16 --port 31002
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time


def serve(port: int, root: str) -> subprocess.Popen[bytes]:
    """`root`: the folder that the run and its engines share; an engine reads weights from nowhere else."""
    words = ("--model-path", "tiny:llama", "--port", str(port), "--threads", "1", "--allowed-root", root)
    return subprocess.Popen([sys.executable, "-m", "turnout.cli.main", "serve", *words])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", type=int, nargs=2, default=(31001, 31002))
    parser.add_argument("--late", type=float, default=20.0, help="seconds between the two starts")
    parser.add_argument("--root", default="runs/external-weights")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engines = [serve(asked.ports[0], asked.root)]
    try:
        time.sleep(asked.late)
        engines.append(serve(asked.ports[1], asked.root))
        for engine in engines:
            engine.wait()
    except KeyboardInterrupt:
        pass
    finally:
        for engine in engines:
            engine.terminate()
        for engine in engines:
            engine.wait()


if __name__ == "__main__":
    main()
