"""The real ps-server and ps-worker on several hosts, and hosts that are really cut off."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from paramserver.tests.certificates import certs
from paramserver.tests.faults import network
from paramserver.tests.faults.network import Network
from paramserver.tests.remote.sshd import Sshd, hosts_yaml, need_sshd

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
TWO = ("{host: node2, slots: 2}", "{host: node3, slots: 2}")


def launch(remote, *argv: str, hosts: tuple[str, ...] = TWO, **env: str) -> tuple[int, str]:
    """The real programs to the end; nothing of them is left."""
    path = hosts_yaml(remote.folder / "hosts.yaml", *hosts)
    launcher = remote.marked.start(
        *("-m", "paramserver.launch", "--hosts", path, *argv), PS_LAUNCH__SSH=remote.sshd.ssh, **env
    )
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert remote.left() == []
    return launcher.returncode, err


MUTUAL = ("--ca", "certs/ca.crt", "--cert", "certs/server.crt", "--key", "certs/server.key",
          "--set", "security.mutual=true")  # fmt: skip


def test_a_real_run_over_tls_with_a_token_that_only_the_launcher_knows(remote) -> None:
    certs("init", remote.folder / "certs", "--host", "127.0.0.2", "--workers", "3")
    token = (remote.folder / "certs" / "token").read_text().strip()
    (remote.folder / "certs" / "token").unlink()
    argv = ("--task", "xor", "-n", "3", "--steps", "20", "--mode", "async", *MUTUAL)
    code, err = launch(remote, *argv, "--summary", "out.json", "--save", "w.safetensors", PS_TOKEN=token)
    assert code == 0, err
    assert "listening address=127.0.0.2:" in err
    assert "mutual TLS, token" in err
    summary = json.loads((remote.folder / "out.json").read_text())
    assert [worker["training_steps"] for worker in summary["workers"]] == [20, 20, 20]
    assert load_file(remote.folder / "w.safetensors")


def test_two_regions_of_hosts_over_mutual_tls(remote) -> None:
    """The relays join the server above with a worker's certificate. Their histories are on their hosts."""
    certs("init", remote.folder / "certs", "--host", "127.0.0.2", "--host", "127.0.0.3", "--workers", "2")
    argv = ("--task", "xor", "-n", "4", "--steps", "32", "--mode", "sync", *MUTUAL)
    token = ("--set", "security.token_file=certs/token")
    files = ("--history", "h.jsonl", "--summary", "out.json")
    hosts = tuple(entry.replace("slots: 2", f"slots: 2, region: {name}") for entry, name in zip(TWO, "ab", strict=True))
    code, err = launch(remote, *argv, *token, *files, "--upstream-every", "8", hosts=hosts)
    assert code == 0, err
    assert "[relay a on node2] listening" in err and "[relay b on node3] listening" in err
    assert "mutual TLS, token" in err
    found = json.loads((remote.folder / "out.json").read_text())
    assert [(worker["region"], worker["training_steps"]) for worker in found["workers"]] == [("a", 32), ("b", 32)]
    paths = [remote.folder / name for name in ("h.jsonl", "h-relay-a.jsonl", "h-relay-b.jsonl")]
    argv = [sys.executable, "-m", "paramserver.launch", "check", *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "in the run above and in its regions" in done.stdout, done.stdout + done.stderr


def test_a_real_run_with_a_shard_on_each_host(remote) -> None:
    argv = ("-n", "4", "--colocate", "--task", "digits", "--mode", "sync", "--steps", "100")
    code, err = launch(remote, *argv, "--summary", "out.json", "--save", "w.safetensors")
    assert code == 0, err
    assert "[server on node2] listening" in err
    assert "[server shard 1 on node3] listening" in err
    assert json.loads((remote.folder / "out.json").read_text())["version"] == 100
    assert load_file(remote.folder / "w.safetensors")


# ---- network namespaces as hosts ------------------------------------------------------------------------


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[Network, Sshd]]:
    """The launcher in one namespace, two hosts in two others, with a bridge between them."""
    need_sshd()
    if network.why_not() is not None:
        pytest.skip(str(network.why_not()))
    net = Network(2)
    try:
        net.set_up()
    except RuntimeError as error:
        net.tear_down()
        pytest.skip(str(error))
    hosts = {f"host{rank}": network.address_of(rank) for rank in range(2)}
    sshd = Sshd(tmp_path, hosts, [net.at(0), net.at(1)])
    yield net, sshd
    sshd.close()
    net.tear_down()


def start_in(net: Network, sshd: Sshd, marked, *argv: str, **env: str) -> subprocess.Popen[str]:
    hosts = hosts_yaml(marked.folder / "hosts.yaml", "host0", "host1", env=env)
    environ = {"PS_LAUNCH__SSH": sshd.ssh, "PS_TEST_MARK": marked.mark, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*net.at(network.SERVER), sys.executable, *argv, "--hosts", hosts, "--insecure"],
        env={**os.environ, **environ}, cwd=marked.folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_host_that_is_cut_off_ends_what_runs_there_by_itself(lab, marked, read_until, wait_until) -> None:
    net, sshd = lab
    argv = (marked.launcher, "-n", "2", "--max-restarts", "0", "--set", "launch.lost_after_s=6")
    launcher = start_in(net, sshd, marked, *argv, FAKE_WORKER="family")
    for _ in range(2):
        read_until(launcher.stderr, "hanging")
    net.partition(1)
    read_until(launcher.stderr, "host1 was lost:")
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 255, err
    wait_until(lambda: sshd.left() == [], 15.0)  # still cut off
    assert marked.left() == []


def test_a_host_that_cannot_reach_the_server_is_named_and_the_others_are_not(lab, marked) -> None:
    """Its ssh replies, but a firewall between the hosts lets nothing else through."""
    net, sshd = lab
    block = ["iptables", "-w", "10", "-A", "INPUT", "-s", network.address_of(1), "-p", "tcp", "--syn", "-j", "DROP"]
    subprocess.run([*net.at(0), *block], check=True)
    launcher = start_in(net, sshd, marked, marked.launcher, "-n", "2")
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 15, err
    assert re.search(r"host1: cannot reach the server at 10\.214\.0\.10:\d+: no answer within 5.0 s", err)
    assert "host0: cannot" not in err
    assert sshd.left() == []


def test_a_real_run_between_namespaces_goes_over_tcp(lab, marked) -> None:
    net, sshd = lab
    argv = ("-m", "paramserver.launch", "-n", "2", "--task", "digits", "--mode", "sync", "--steps", "40")
    launcher = start_in(net, sshd, marked, *argv, "--set", "worker.transports=direct,grpc", "--summary", "out.json")
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, err
    assert json.loads((marked.folder / "out.json").read_text())["version"] == 40
    assert sshd.left() == []
