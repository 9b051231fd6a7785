"""Three nodes of a Ray cluster on this machine: says its address, and lives as long as its input."""

import os
import socket
import sys
import warnings

warnings.simplefilter("ignore")
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_raylet_start_wait_time_s": "120",  # of a busy machine
    "RAY_agent_register_timeout_ms": "120000",
}

from ray.cluster_utils import Cluster  # noqa: E402  (its settings come before)


def ports() -> dict[str, int]:
    """Of a node's agents: for those that they choose themselves it waits 15 s, which a busy machine does not keep."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    found = {}
    for name in names:
        with socket.create_server(("", 0)) as listener:
            found[name] = listener.getsockname()[1]
    return found


resources = {"num_cpus": 4, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=resources | ports() | {"include_dashboard": False})
for _ in range(2):
    cluster.add_node(**resources, **ports())
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
