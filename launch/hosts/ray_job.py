"""A Ray job that reserves bundles for a run and starts agents there: python -m paramserver.launch.hosts.ray_job OPTIONS

It is the only driver of a run, a child of the launcher. It reserves a placement group with a bundle for each process,
and prints one JSON line with their addresses, or an error. Then each connection to its socket (PASS, a command of
the launcher) names a bundle, and becomes the standard input and output of an agent (`agent.py`) that an actor in that
bundle starts. So Ray counts the resources, and shows the agent only its own GPUs.

At the end of standard input everything ends: actors, bundles, and with them the agents. The same happens when this
process is killed, because Ray ends what a driver has started.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

# As `python -c`: from the standard streams to the socket argv[1], bundle argv[2].
PASS = """
import os, socket, sys, threading
there = socket.socket(socket.AF_UNIX)
there.connect(sys.argv[1])
there.sendall(sys.argv[2].encode() + b"\\n")
def down():
    while data := there.recv(1 << 20):
        at = memoryview(data)
        while at:
            at = at[os.write(1, at):]
    os._exit(0)
threading.Thread(target=down).start()
while data := os.read(0, 1 << 20):
    there.sendall(data)
there.shutdown(socket.SHUT_WR)
"""
_PIECE = 1 << 20
_REACH_S = 5.0


class Host:
    """The actor of an agent."""

    def __init__(self, command: list[str], folder: str) -> None:
        self._agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, bufsize=0, start_new_session=True
        )

    def write(self, data: bytes) -> None:
        """Write to the agent; empty data closes its input."""
        assert self._agent.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            if not data:
                self._agent.stdin.close()
            at = memoryview(data)
            while at:
                at = at[self._agent.stdin.write(at) :]

    def read(self) -> bytes:
        """Read from the agent; empty data: it has ended."""
        assert self._agent.stdout is not None
        return os.read(self._agent.stdout.fileno(), _PIECE)


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    import ray

    address = options["address"]
    try:
        # Ray itself would retry an unreachable address for half a minute.
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "//" not in address:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (OSError, ConnectionError, RuntimeError, ValueError) as error:
        _reply(error=f"no Ray cluster at {address}: {' '.join(str(error).split())[:200]}",
               fix="ray start --head there, or name another: launch.ray_address")  # fmt: skip
        return
    group = _reserved(ray, options)
    if group is None:
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(options["socket"])
    listener.listen()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    where = ray.util.placement_group_table(group)["bundles_to_node_id"]
    _reply(addresses=[nodes[where[index]] for index in range(len(options["bundles"]))])
    threading.Thread(target=_serve, args=(ray, listener, group, options), daemon=True).start()
    while os.read(0, 1 << 16):
        pass
    with suppress(Exception):
        ray.util.remove_placement_group(group)
    ray.shutdown()


def _reply(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _reserved(ray: Any, options: dict[str, Any]) -> Any:
    """Returns the placement group; None after an error reply."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    address, bundles = options["address"], options["bundles"]
    for name, bundle in zip(options["names"], bundles, strict=True):
        if not any(all(node.get(key, 0) >= value for key, value in bundle.items()) for node in nodes):
            most = ", ".join(f"{key} {max(node.get(key, 0) for node in nodes):g}" for key in bundle)
            _reply(
                error=f"{name} asks for {_text(bundle)}, and no node of the Ray cluster at {address} has that: the "
                f"most of each is {most}",
                fix="ask for less (launch.ray_worker, launch.ray_server), or add such a node",
            )
            return None
    group = ray.util.placement_group(bundles, strategy=options["strategy"])
    if not group.wait(options["wait_s"]):
        kinds = sorted({key for bundle in bundles for key in bundle})
        free = {key: ray.available_resources().get(key, 0) for key in kinds}
        wanted = {key: sum(bundle.get(key, 0) for bundle in bundles) for key in kinds}
        _reply(
            error=f"the Ray cluster at {address} has no room for {len(bundles)} processes, {options['strategy']}, "
            f"within {options['wait_s']:g} s (launch.ray_wait_s): asked for are {_text(wanted)}, free {_text(free)}",
            fix="wait for others' jobs to end, ask for less, or add nodes",
        )
        return None
    return group


def _text(resources: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in resources.items()) or "nothing"


def _serve(ray: Any, listener: socket.socket, group: Any, options: dict[str, Any]) -> None:
    while True:
        item, _ = listener.accept()
        threading.Thread(target=_pass, args=(ray, item, group, options), daemon=True).start()


def _pass(ray: Any, item: socket.socket, group: Any, options: dict[str, Any]) -> None:
    """Start an agent, and pass on its output until it ends."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    number = b""
    while not number.endswith(b"\n"):
        number += item.recv(1)
    bundle = options["bundles"][int(number)]
    resources = {key: value for key, value in bundle.items() if key not in ("CPU", "GPU")}
    actor = (
        ray.remote(Host)
        .options(
            num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), resources=resources, max_concurrency=3,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, int(number)),
        )
        .remote(options["command"], options["folder"])
    )  # fmt: skip
    threading.Thread(target=_pass_up, args=(ray, item, actor), daemon=True).start()
    with suppress(Exception):
        while data := ray.get(actor.read.remote()):
            item.sendall(data)
    with suppress(OSError):
        item.shutdown(socket.SHUT_RDWR)
    with suppress(Exception):
        ray.kill(actor)


def _pass_up(ray: Any, item: socket.socket, actor: Any) -> None:
    with suppress(Exception):
        while data := item.recv(_PIECE):
            ray.get(actor.write.remote(data))
        ray.get(actor.write.remote(b""))


if __name__ == "__main__":
    main()
