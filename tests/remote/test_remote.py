"""Jobs on several hosts: a real launcher, ssh and sshd; stand-ins for ps-server and ps-worker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 120.0
WORKER = Path(__file__).parents[1] / "launch" / "programs" / "fake_worker.py"
TWO = ("{host: node2, slots: 2}", "{host: node3, slots: 2}")
SOON = ("--set", "launch.backoff_s=0.01")


def test_a_run_on_two_hosts(remote) -> None:
    """Servers and workers where they belong, the summary here, and afterwards nothing there."""
    remote.hosts("{host: node2, slots: 2, devices: [4, 7], env: {LAB: upstairs}}", "node3")
    (remote.folder / "run.yaml").write_text("run: {workers: 3, steps: 7}\noutput: {summary: out.json}\n")
    run = remote.run("run.yaml", "--log-format", "json")
    assert run.returncode == 0, run.stderr
    found_events = [json.loads(line) for line in run.stderr.splitlines() if line.startswith("{")]
    (listening,) = [event for event in found_events if event["event"] == "listening"]
    assert (listening["role"], listening["host"]) == ("server", "node2")
    assert listening["address"].startswith("127.0.0.2:")
    joined = {event["rank"]: event["host"] for event in found_events if event["event"] == "joined"}
    assert joined == {0: "node2", 1: "node2", 2: "node3"}
    assert json.loads((remote.folder / "out.json").read_text())["version"] == 10


def test_each_worker_has_its_device_its_share_of_the_cores_and_the_hosts_variables(remote, tmp_path: Path) -> None:
    names = ["PS_WORKER__RANK", "PS_RUN__WORKERS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LAB", "PS_TOKEN"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "tell.py").write_text(
        f"import os, time\nprint('told', *[os.environ.get(n, '-') for n in {names}], os.getcwd())\ntime.sleep(60)\n"
    )
    remote.hosts(
        "{host: node2, devices: [4, 7], env: {LAB: upstairs}}",
        "{host: node3, env: {OMP_NUM_THREADS: 5}}",
        workdir=tmp_path / "there",
    )
    launcher = remote.launch("-n", "3", "--script", "tell.py", PS_TOKEN="the-secret")
    lines: list[str] = []
    while len(lines) < 3:
        lines += re.findall(r"\] told (.*)", launcher.stderr.readline())
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=DEADLINE_S)
    cores, there = max(1, len(os.sched_getaffinity(0)) // 2), tmp_path / "there"
    assert sorted(lines) == [
        f"0 3 4 {cores} upstairs the-secret {there}",
        f"1 3 7 {cores} upstairs the-secret {there}",
        f"2 3 - 5 - the-secret {there}",
    ]
    assert remote.left() == []


def test_the_secret_is_in_no_command_line(remote, read_until) -> None:
    remote.hosts(*TWO)
    launcher = remote.launch("-n", "2", FAKE_WORKER="hang", PS_TOKEN="the-secret")
    assert launcher.stderr.readline().startswith("ps-launch: sync: a server and 2 workers on 1 host,")
    read_until(launcher.stderr, "[server on node2] listening address=127.0.0.2:")
    read_until(launcher.stderr, "[worker 1 on node2] hanging")
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    remote.until_running(5)
    assert not [line for line in lines if "the-secret" in line]
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert remote.left() == []


@pytest.mark.slow
def test_the_task_file_is_copied_and_nothing_else(remote, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_bytes(WORKER.read_bytes())
    (tmp_path / "code" / "other.py").write_text("")
    (there / "fake_server.py").write_bytes((WORKER.parent / "fake_server.py").read_bytes())
    remote.hosts(*TWO, workdir=there)
    missing = remote.run("-n", "3", "--script", "code/train.py")
    assert missing.returncode == 2
    for host in ("node2", "node3"):
        assert f"{host}: there is no file code/train.py in {there}" in missing.stderr
    assert "--sync-code copies the task file or script" in missing.stderr
    run = remote.run("-n", "3", "--script", "code/train.py", "--sync-code", PYTHONPATH=str(there))
    assert (there / "code" / "train.py").read_bytes() == WORKER.read_bytes()
    assert sorted(path.name for path in (there / "code").iterdir() if path.suffix == ".py") == ["train.py"]
    assert run.returncode == 0, run.stderr


# ---- what is wrong is said before anything starts ---------------------------------------------------


def test_every_host_that_cannot_is_named_with_its_reason(remote, tmp_path: Path) -> None:
    """All hosts are asked at the same time."""
    other = tmp_path / "other" / "paramserver-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: paramserver\nVersion: 9.9.9\n")
    with socket.create_server(("127.0.0.3", 0)) as silent:  # accepts and says nothing
        remote.hosts(
            "{host: node1, workdir: /no/such/dir}",
            "{host: node2, python: /no/such/python}",
            f"{{host: node3, env: {{PYTHONPATH: {other.parent}}}}}",
            "{host: 127.0.0.1, port: 1}",
            f"{{host: 127.0.0.3, port: {silent.getsockname()[1]}, address: 127.0.0.3}}",
            "{host: no-such-host.invalid, address: 127.0.0.1}",
            "{host: 127.0.0.2, user: somebody-else}",
        )
        began = time.monotonic()
        run = remote.run("-n", "7", "--set", "launch.connect_s=1")
    assert time.monotonic() - began < 12
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert "listening" not in run.stderr
    lines = {line.removeprefix("ps-launch:").strip().partition(":")[0]: line for line in run.stderr.splitlines()[1:]}
    for host, words in {
        "node1": "there is no directory /no/such/dir (create it there, or set workdir: to another)",
        "node2": "cannot run /no/such/python",
        "node3": "has paramserver 9.9.9, this machine ",
        "127.0.0.1": "Connection refused",
        "127.0.0.3": "does not answer",
        "no-such-host.invalid": "Could not resolve hostname",
        "127.0.0.2": "does not let us in",
    }.items():
        assert words in lines[host], run.stderr


def test_dry_run_shows_what_ssh_is_told_and_what_runs_there(remote) -> None:
    remote.hosts(*TWO)
    run = remote.run("-n", "3", "--shards", "2", "--dry-run", PS_TOKEN="the-secret", API_KEY="the-secret", LAB="x")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    heads = [line.partition("]")[0] for line in lines]
    assert heads == [
        *("# sync: a server in 2 shards and 3 workers on 2 hosts, 500 steps, batch 32, task digits",),
        *("[node2", "[node3", "[server on node2", "[server shard 1 on node2"),
        *("[worker 0 on node2", "[worker 1 on node2", "[worker 2 on node3"),
    ]
    assert "-oBatchMode=yes" in lines[1] and "-- node2 'exec " in lines[1]
    assert "--server HOST:PORT --rank 2" in lines[-1]
    assert "API_KEY=... LAB=x" in lines[-1]
    assert "the-secret" not in run.stdout


def test_a_host_that_cannot_reach_the_server_is_named(remote) -> None:
    """The server says it listens where nobody can connect, as behind a firewall."""
    remote.hosts("{host: node2, address: 127.0.0.9}", "node3")
    run = remote.run("-n", "2", "--set", "server.listen=0.0.0.0:0", "--insecure", FAKE_ADDRESS="0.0.0.0:1")
    assert run.returncode == 15, run.stderr
    assert "node3: cannot reach the server at 127.0.0.9:1: Connection refused" in run.stderr
    assert "give the server's host an address: that others can reach" in run.stderr
    assert "[worker" not in run.stderr


# ---- nothing stays behind -----------------------------------------------------------------------------


def started(remote, read_until, *argv: str, **env: str):
    remote.hosts(*TWO)
    launcher = remote.launch("-n", "3", *argv, **{"FAKE_WORKER": "family", **env})
    for _ in range(3):
        read_until(launcher.stderr, "hanging")
    remote.until_running(11)  # 2 agents with their guardians, a server, 3 workers with a child each
    return launcher


@pytest.mark.slow
def test_ctrl_c_while_a_host_does_not_reply(remote, wait_until) -> None:
    with socket.create_server(("127.0.0.3", 0)) as silent:
        remote.hosts("node2", f"{{host: 127.0.0.3, port: {silent.getsockname()[1]}, address: 127.0.0.3}}")
        launcher = remote.launch("-n", "2")
        wait_until(lambda: len(ssh_clients(launcher)) == 2 and remote.sshd.running() != [])
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert err.splitlines()[-1] == "ps-launch: interrupted by SIGINT; every process has ended"
    assert remote.left() == []


def ssh_clients(launcher) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher.pid).children() if child.name() == "ssh"]


def test_a_lost_host_is_connected_to_anew(remote) -> None:
    """Its worker is started again, after what was left of it has been ended."""
    remote.hosts(*TWO)
    launcher = remote.launch("-n", "3", *SOON, FAKE_WORKER_2="once hang")
    for line in launcher.stderr:
        if "[worker 2 on node3] hanging" in line:
            break
    (victim,) = [client for client in ssh_clients(launcher) if "node3" in client.cmdline()]
    victim.kill()
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, err
    assert "[worker 2 on node3] node3 was lost: the connection was closed" in err
    assert "worker 2 failed: exit code 255 (its host was lost); started again in 0.01 s (restart 1 of 3)" in err
    assert remote.left() == []


@pytest.mark.slow
def test_a_killed_agent_takes_its_processes_along(remote, read_until, wait_until) -> None:
    launcher = started(remote, read_until, "--max-restarts", "0")
    agents = [process for process in remote.sshd.running() if "exec(sys.stdin" in " ".join(process.cmdline())]
    for process in agents:
        if process.parent() is not None and "sshd" in process.parent().name():
            process.kill()
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 255, err
    wait_until(lambda: remote.left() == [], 5.0)


@pytest.mark.slow
def test_a_connection_that_falls_silent_ends_what_runs_there(remote, read_until, wait_until) -> None:
    """No end of file, no reset, as when a cable is pulled: the ssh client and sshd stand still."""
    launcher = started(remote, read_until, "--set", "launch.lost_after_s=5", "--max-restarts", "0")
    silent = [process for process in remote.sshd.sessions() for process in (process, *process.children())]
    stopped = [process for process in silent if "sshd" in process.name()]
    for process in stopped:
        process.suspend()
    try:
        _, err = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 255, err
        assert "was lost: nothing was heard for 5 s" in err
        wait_until(lambda: [line for line in remote.left() if "sshd" not in line] == [], 8.0)
    finally:
        for process in stopped:
            process.resume()


def agents_on(remote, host: str) -> list[psutil.Process]:
    """The agents, not their guardians, at the other end of the connections to an address."""
    found = []
    for process in remote.sshd.running():
        at = process.environ()["SSH_CONNECTION"].split()[2]
        parent = process.parent()
        if at == host and parent is not None and "sshd" in parent.name():
            found.append(process)
    return found


@pytest.mark.slow
def test_what_a_lost_host_still_runs_is_ended_before_anything_starts_there_anew(remote, read_until, wait_until) -> None:
    """Its agent stands still: it notices nothing, and its processes go on."""
    remote.hosts(*TWO)
    sets = ("--set", "launch.lost_after_s=5", *SOON)
    launcher = remote.launch("-n", "3", *sets, FAKE_WORKER="hang", FAKE_WORKER_2="family")
    output = ""
    while output.count("] hanging") < 3:
        output += launcher.stderr.readline()
    (agent,) = agents_on(remote, "127.0.0.3")
    old = [
        psutil.Process(int(pid))
        for pid in re.findall(r"\[worker 2 on node3\] (?:joined|has_child) .*?pid=(\d+)", output)
    ]
    assert len(old) == 2
    agent.suspend()
    read_until(launcher.stderr, "worker 2 failed: exit code 255 (its host was lost); started again")
    read_until(launcher.stderr, "[worker 2 on node3] joined")
    wait_until(lambda: not any(process.is_running() for process in [agent, *old]))
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert remote.left() == []


@pytest.mark.slow
def test_a_launcher_whose_terminal_stands_still_keeps_its_hosts(remote, read_until) -> None:
    """Nobody reads what it shows for longer than a host may be silent: its loop waits, its heartbeats do not."""
    remote.hosts(*TWO)
    launcher = remote.launch("-n", "3", "--set", "launch.lost_after_s=5", FAKE_WORKER="chatty")
    read_until(launcher.stderr, "[worker 2 on node3] still here")
    time.sleep(8.0)  # the thing itself
    remote.until_running(8)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert "was lost" not in err
    assert remote.left() == []


def test_this_machine_needs_no_ssh(marked) -> None:
    (marked.folder / "hosts.yaml").write_text(f"hosts: [{{host: localhost, slots: 2, python: {sys.executable}}}]\n")
    run = marked.run("--hosts", "hosts.yaml", "-n", "2", PS_LAUNCH__SSH="/no/such/ssh")
    assert run.returncode == 0, run.stderr
    assert "[worker 1 on localhost] joined rank=1" in run.stderr
