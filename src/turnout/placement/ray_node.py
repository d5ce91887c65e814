"""A Ray cluster of one node, on loopback, for one run: `python -m turnout.placement.ray_node --temporary FOLDER
--cpus N`, under turnout.placement.guard, which ends and removes all of it with the run.

Promises: FOLDER/address holds the address once the cluster answers; it reports nothing to anybody; who wants to use
it needs the token that this process was given (RAY_AUTH_TOKEN). It stays until it is killed.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

ADDRESS = "address"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="turnout.placement.ray_node")
    parser.add_argument("--temporary", type=Path, required=True)
    parser.add_argument("--cpus", type=int, required=True)
    given = parser.parse_args(words)
    context = importlib.import_module("ray").init(
        num_cpus=given.cpus,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(given.temporary / "ray"),
        _node_ip_address="127.0.0.1",
    )
    staged = given.temporary / f".{ADDRESS}"
    staged.write_text(context.address_info["gcs_address"])
    staged.rename(given.temporary / ADDRESS)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
