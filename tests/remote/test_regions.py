"""`ps-launch doctor --regions`: over a real sshd, and between network namespaces that a delay parts into regions."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from paramserver.benchmarks.rig.relay import tap
from paramserver.launch.hosts.agent import listen, ping
from paramserver.tests.faults import network
from paramserver.tests.faults.network import Network
from paramserver.tests.remote.sshd import Sshd, hosts_yaml, need_sshd

DEADLINE_S = 120.0


# ---- one connect ------------------------------------------------------------------------------------


def test_a_ping_is_one_round_trip_and_the_reason_where_nothing_listens() -> None:
    port = listen(0)
    assert 0 < ping(f"127.0.0.1:{port}", 3, 5.0) < 5.0
    assert 0 < ping(f"localhost:{port}", 3, 5.0) < 5.0
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    assert ping(f"127.0.0.1:{closed}", 3, 5.0) == "Connection refused"
    assert isinstance(ping("no-such-host.invalid:1", 3, 5.0), str)


def test_a_peer_that_does_not_answer_costs_one_time_limit() -> None:
    with socket.socket() as full, socket.socket() as client:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        client.connect(full.getsockname())  # fills the queue; the next SYN gets no answer
        address, began = f"127.0.0.1:{full.getsockname()[1]}", time.monotonic()
        assert ping(address, 50, 0.2) == "no answer within 0.2 s"
        assert time.monotonic() - began < 5.0, "not once for each of the 50 connects"


# ---- over sshd ----------------------------------------------------------------------------------------


def doctor(remote, *argv: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "paramserver.launch", "doctor", "--hosts", "hosts.yaml", "--regions", *argv)
    process = remote.marked.start(*command, PS_LAUNCH__SSH=remote.sshd.ssh)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert remote.left() == []
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.slow
def test_hosts_that_are_close_are_one_region_unless_a_number_is_given(remote) -> None:
    path = remote.folder / "hosts.yaml"
    hosts_yaml(path, "node1", "{host: node2, slots: 2}  # with two", "{host: node3, region: eu}")
    before = path.read_text()
    run = doctor(remote)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert re.fullmatch(r"1 region: node1, node2, node3; round trips: [\d.]+( to [\d.]+)? ms within", lines[4])
    assert lines[5].startswith("The round trips do not jump by a factor of 3 or more, to 2 ms or more: relays")
    assert lines[6] == "hosts.yaml has other regions: node3 (eu), and none for node1, node2. --write replaces them."
    assert path.read_text() == before
    run = doctor(remote, "--num-regions", "3", "--write", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [region["hosts"] for region in found["regions"]] == [["node1"], ["node2"], ["node3"]]
    assert all(0 < found["round_trips_s"][a][b] < 1 for a in range(3) for b in range(3) if a != b)
    assert found["sentences"][-1] == "hosts.yaml: the regions of 3 hosts are written."
    text = path.read_text()
    assert text.splitlines()[3] == "  - {host: node2, region: node2, slots: 2}  # with two"
    run = doctor(remote, "--num-regions", "3", "--write")
    assert run.stdout.splitlines()[-1] == "hosts.yaml has these regions." and path.read_text() == text


def test_ctrl_c_leaves_nothing_on_the_hosts(remote, wait_until) -> None:
    with socket.create_server(("127.0.0.3", 0)) as silent:  # the doctor waits for this host
        port = silent.getsockname()[1]
        hosts_yaml(remote.folder / "hosts.yaml", "node2", f"{{host: 127.0.0.3, port: {port}, address: 127.0.0.3}}")
        command = ("-m", "paramserver.launch", "doctor", "--hosts", "hosts.yaml", "--regions")
        process = remote.marked.start(*command, PS_LAUNCH__SSH=remote.sshd.ssh)
        wait_until(lambda: remote.sshd.running() != [])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert remote.left() == []


def test_mistakes_of_the_command_line(remote) -> None:
    hosts_yaml(remote.folder / "hosts.yaml", "node1", "{host: node2, port: 1}")
    for argv, code, text in [
        (("--num-regions", "3"), 2, "--num-regions 3: hosts.yaml names 2 hosts"),
        ((), 15, "node2: does not answer"),
    ]:
        run = doctor(remote, *argv)
        assert (run.returncode, text in run.stderr, "Traceback" in run.stderr) == (code, True, False), run.stderr


# ---- between namespaces ---------------------------------------------------------------------------------


class Delayed(Network):
    """Regions of workers: each but the first is behind a delay in user space (this kernel has no netem)."""

    def __init__(self, sizes: list[int], delays_s: list[float]) -> None:
        super().__init__(sum(sizes))
        self._sizes, self._delays_s = sizes, delays_s
        self._ends: list[int] = []
        self._relays: list[subprocess.Popen[bytes]] = []

    def set_up(self) -> None:
        super().set_up()
        server, rank = self.namespace(network.SERVER), self._sizes[0]
        for number, (size, delay_s) in enumerate(zip(self._sizes[1:], self._delays_s, strict=True), 1):
            self._run("ip", "-n", server, "link", "add", f"br{number}", "type", "bridge")
            self._run("ip", "-n", server, "link", "set", f"br{number}", "up")
            for bridge, side in ((0, "a"), (number, "b")):
                device = f"rg{os.getpid()}{side}"
                self._ends.append(tap(device))
                self._run("ip", "link", "set", device, "netns", server)
                self._run("ip", "-n", server, "link", "set", device, "name", f"t{number}{side}", "up")
                self._run("ip", "-n", server, "link", "set", f"t{number}{side}", "master", f"br{bridge}")
            ends = self._ends[-2:]
            relay = [sys.executable, "-m", "paramserver.benchmarks.rig.relay", str(delay_s), *map(str, ends)]
            self._relays.append(subprocess.Popen(relay, pass_fds=ends))
            for _ in range(size):
                self._run("ip", "-n", server, "link", "set", f"p{rank}", "master", f"br{number}")
                rank += 1

    def tear_down(self) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for end in self._ends:
            os.close(end)
        super().tear_down()

    def namespace(self, host: str | int) -> str:
        return self.at(host)[-1]

    @staticmethod
    def _run(*argv: str) -> None:
        subprocess.run(argv, capture_output=True, timeout=30, check=True)


@pytest.fixture
def three_regions(tmp_path: Path) -> Iterator[tuple[Delayed, Sshd]]:
    """Eight hosts: three, three behind 20 ms each way, two behind 40 ms each way."""
    need_sshd()
    if network.why_not() is not None or not os.access("/dev/net/tun", os.W_OK):
        pytest.skip(str(network.why_not() or "needs /dev/net/tun"))
    net = Delayed([3, 3, 2], [0.02, 0.04])
    try:
        net.set_up()
        hosts = {f"host{rank}": network.address_of(rank) for rank in range(8)}
        sshd = Sshd(tmp_path, hosts, [net.at(rank) for rank in range(8)])
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        net.tear_down()
        pytest.skip(str(error))
    yield net, sshd
    sshd.close()
    net.tear_down()


@pytest.mark.slow
def test_eight_hosts_in_three_regions(three_regions, marked) -> None:
    net, sshd = three_regions
    net.partition_pair(0, 1)
    path = marked.folder / "hosts.yaml"
    hosts_yaml(path, *(f"{{host: host{rank}, server: {str(rank == 4).lower()}}}" for rank in range(8)))

    def examine(*argv: str) -> list[str]:
        command = [*net.at(network.SERVER), sys.executable, "-m", "paramserver.launch", "doctor", "--hosts", str(path)]
        run = subprocess.run(
            [*command, "--regions", *argv], env={**os.environ, "PS_LAUNCH__SSH": sshd.ssh}, cwd=marked.folder,
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert sshd.left() == []
        return run.stdout.splitlines()

    lines = examine("--write")
    found = re.fullmatch(
        r"3 regions: host0, host1, host2 \| host3, host4, host5 \| host6, host7; "
        r"round trips: (\d+) to (\d+) ms between regions, (?:[\d.]+ to )?([\d.]+) ms within",
        lines[9],
    )
    assert found is not None, lines
    near, far, widest = map(float, found.groups())
    assert 40 <= near < 60 and 120 <= far < 180 and widest < near / 3
    assert f"--regions 3 --border-latency {far:g}ms" in lines.pop(-2)
    assert lines[10:] == [
        "These hosts do not reach each other: host0 and host1.",
        f"The relays belong on host2, {lines[11].split()[-2]} {lines[11].split()[-1]}",
        f"{path}: the regions of 8 hosts are written.",
    ]
    regions = [host["region"] for host in yaml.safe_load(path.read_text())["hosts"]]
    assert regions[:3] == ["host2"] * 3, "host0 and host1 do not reach each other, so neither can have the relay"
    assert [len(set(regions[begin:end])) for begin, end in ((3, 6), (6, 8))] == [1, 1] and len(set(regions)) == 3
    assert examine()[-1] == f"{path} has these regions."
