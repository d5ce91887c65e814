"""A Ray cluster of several nodes on this machine: `python -m tests.ray_nodes CPUS...`, a number for each node.

Prints its address on a line. Then each line of stdin is done and answered with a line: `remove N` kills all
processes of a node at once, `add CPUS` makes one. The end of stdin ends the cluster. The first node is the head.
"""

from __future__ import annotations

import importlib
import os
import sys


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
