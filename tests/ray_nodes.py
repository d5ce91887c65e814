"""A Ray cluster of several nodes on this machine: `python -m tests.ray_nodes CPUS...`, a number for each node.

Prints its address on a line. Then each line of stdin is done and answered with a line: `remove N` kills all
processes of a node at once, `add CPUS` makes one. The end of stdin ends the cluster. The first node is the head.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO


class RayNodes:
    """A cluster with so many CPUs on each node, in a process of its own. Call `end` in every case."""

    def __init__(self, *cpus: int, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes", *map(str, cpus)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._line()

    def do(self, line: str) -> None:
        into = _pipe(self._process.stdin)
        into.write(line + "\n")
        into.flush()
        assert self._line() == line

    def end(self) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()

    def _line(self) -> str:
        return _pipe(self._process.stdout).readline().strip()


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def main(cpus: list[int]) -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False}
    )
    nodes = [cluster.head_node, *(cluster.add_node(num_cpus=count) for count in cpus[1:])]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, value = line.split()
        if word == "remove":
            cluster.remove_node(nodes[int(value)], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=int(value)))
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
