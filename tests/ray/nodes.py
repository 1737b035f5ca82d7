"""A Ray cluster of several nodes on this machine, on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any

import psutil
import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# 5 by default: too few where all is busy.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "120"
#: Ray would put this machine's address in the place of 127.0.0.1.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vmserve[ray]'")

cluster_utils = pytest.importorskip("ray.cluster_utils")

__all__ = ["Nodes"]

_NODE = {
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
    "object_store_memory": 80 << 20,
}


class Nodes:
    """A head without CPUs, and ``size`` nodes with one each. For the commands' own processes."""

    def __init__(self, size: int) -> None:
        self._cluster = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, **_NODE}
        )
        self.address = str(self._cluster.address)
        self.nodes = [self.add() for _ in range(size)]

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, **_NODE)

    def engines(self) -> list[psutil.Process]:
        """Processes that have an engine, of all nodes."""
        return [
            each
            for each in psutil.process_iter(["cmdline"])
            if any("EngineActor" in word for word in each.info["cmdline"] or [])
        ]

    def kill(self, node: Any) -> None:
        """End a node as the loss of its machine does: all its processes at once."""
        [raylet] = [each.process.pid for each in node.all_processes["raylet"]]
        children = psutil.Process(raylet).children(recursive=True)
        for process in [psutil.Process(raylet), *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.nodes.remove(node)

    def node_of(self, engine: psutil.Process) -> Any:
        """The node on which an engine is."""
        for node in self.nodes:
            [raylet] = [each.process.pid for each in node.all_processes["raylet"]]
            if engine.ppid() == raylet:
                return node
        raise LookupError(engine.pid)

    def close(self) -> None:
        ray.shutdown()
        with contextlib.suppress(subprocess.SubprocessError):
            self._cluster.shutdown()
