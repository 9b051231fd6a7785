"""hosts.yaml, and who runs where: as values, and once as a command line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.config.sources import Resolved, load_config
from paramserver.common.errors import AuthError, UsageError
from paramserver.launch.backends.ssh import SshBackend
from paramserver.launch.hosts.agent import Agent
from paramserver.launch.hosts.remote import check_plan_exposure, check_remote, listen_of
from paramserver.launch.plan.hosts import SERVER, Child, Host, load_hosts, place_processes, text_with_regions
from paramserver.launch.plan.runs import Machine, Plan
from paramserver.tests.launch.plans import hosts_of, plan_of, settings_of

EXAMPLE = Path(__file__).parents[2] / "configs" / "hosts.example.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts:\n  - host: a\n    slotz: 2\n", ["hosts.yaml:3: unknown key 'slotz'", "did you mean 'slots'"]),
        ("hots:\n  - a\n", ["hosts.yaml:1: unknown key 'hots'", "did you mean 'hosts'"]),
        ("defaults:\n  usr: me\nhosts: [a]\n", ["hosts.yaml:2: unknown key 'usr'", "did you mean 'user'"]),
        ("hosts:\n  - host: a\n    slots: many\n", ["hosts.yaml:3: slots:", "'many'"]),
        ("hosts:\n  - host: a\n    slots: yes\n", ["hosts.yaml:3: slots: input should be a valid integer", "'yes'"]),
        ("hosts:\n  - host: a\n    port: 70000\n", ["hosts.yaml:3: port:", "70000"]),
        ("hosts:\n  - host: a\n    env: [X]\n", ["hosts.yaml:3: env:"]),
        ("hosts:\n  - slots: 2\n", ["hosts.yaml:2: host: field required"]),
        ("hosts:\n  - a\n  - a\n", ["hosts.yaml:3: a is there already", "more slots"]),
        ("hosts:\n  - {host: a, python: p, venv: v}\n", ["hosts.yaml:2: python and venv"]),
        ("hosts:\n  - -oProxyCommand=x\n", ["hosts.yaml:2: host: is not the name of a host"]),
        ("hosts:\n  - {host: a, region: -x}\n", ["hosts.yaml:2: region: is not the name of a region: no spaces"]),
        ("hosts:\n  - [a]\n", ["hosts.yaml:2: expected keys such as 'host:'"]),
        ("hosts: []\n", ["names no hosts", "hosts.example.yaml"]),
        ("", ["names no hosts"]),
        ("hosts:\n  - [\n", ["hosts.yaml:3: not valid YAML"]),
    ],
)
def test_a_mistake_in_the_file_is_shown_where_it_is(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        hosts_of(tmp_path, text)
    for word in words:
        assert word in f"{raised.value.message}\n{raised.value.fix}"


def test_variables_and_names_are_texts_as_written(tmp_path: Path) -> None:
    (host,) = hosts_of(
        tmp_path,
        "hosts:\n- {host: 10, region: 1.10, env: {NO: no, OCTAL: 010, CLOCK: 1:30, EMPTY: , HEX: 0x1F, BIG: 1e3, "
        "ID: 1_000, SWITCH: true, NULL: null, QUOTED: '010', TWO: 2}}\n",
    )
    assert (host.host, host.region) == ("10", "1.10")
    assert dict(host.env) == {
        "NO": "no", "OCTAL": "010", "CLOCK": "1:30", "EMPTY": "", "HEX": "0x1F", "BIG": "1e3", "ID": "1_000",
        "SWITCH": "true", "NULL": "null", "QUOTED": "010", "TWO": "2",
    }  # fmt: skip


WITHOUT = """# the lab
defaults: {venv: ~/v}
hosts:
  - host: a      # the first
    env:
      X: 1
    region: old  # stale
  - {slots: 2, host: 'b'}
  - c            # only a name

  - host: d
    slots: 3"""
WITH = """# the lab
defaults: {venv: ~/v}
hosts:
  - host: a      # the first
    env:
      X: 1
    region: b  # stale
  - {slots: 2, host: 'b', region: b}
  - {host: c, region: "1"}            # only a name

  - host: d
    region: "1"
    slots: 3"""


def test_regions_are_written_and_all_else_stays(tmp_path: Path) -> None:
    before = hosts_of(tmp_path, WITHOUT)
    regions = {"a": "b", "b": "b", "c": "1", "d": "1"}
    text = text_with_regions(str(tmp_path / "hosts.yaml"), regions)
    assert text == WITH
    assert hosts_of(tmp_path, text) == tuple(host.model_copy(update={"region": regions[host.host]}) for host in before)
    assert text_with_regions(str(tmp_path / "hosts.yaml"), regions) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a, b]", "[{host: a, region: a}, {host: b, region: a}]"),
        ("hosts: [a, {host: b}]\n", "hosts: [{host: a, region: a}, {host: b, region: a}]\n"),
        ("- host: a\n- host: b", "- host: a\n  region: a\n- host: b\n  region: a"),
    ],
)
def test_regions_are_written_into_other_forms_of_the_file(text: str, expected: str, tmp_path: Path) -> None:
    hosts_of(tmp_path, text)
    assert text_with_regions(str(tmp_path / "hosts.yaml"), {"a": "a", "b": "a"}) == expected


def test_what_an_entry_says_wins_over_the_defaults(tmp_path: Path) -> None:
    text = """
defaults: {user: lab, venv: ~/ps, env: {A: 1, B: 2}, workdir: ~/run}
hosts:
  - plain
  - {host: gpu, python: /opt/python, env: {B: 3}, devices: [0, 1, GPU-7f], port: 2222}
"""
    plain, gpu = hosts_of(tmp_path, text)
    assert (plain.user, plain.slots, plain.interpreter("/here"), plain.env) == (
        *("lab", 1, "~/ps/bin/python"),
        {"A": "1", "B": "2"},
    )
    assert (gpu.slots, gpu.interpreter("/here"), gpu.env, gpu.port) == (3, "/opt/python", {"A": "1", "B": "3"}, 2222)


@pytest.mark.parametrize(
    ("entry", "python", "folder"),
    [
        ("{host: a}", "python3", "/here"),
        ("{host: a, venv: .venv}", "/here/.venv/bin/python", "/here"),
        ("{host: a, venv: .venv, workdir: ~/run}", "~/run/.venv/bin/python", "~/run"),
        ("{host: a, venv: /opt/ps/, workdir: ~/run}", "/opt/ps/bin/python", "~/run"),
        ("{host: a, python: python3.12, workdir: w}", "python3.12", "w"),
    ],
)
def test_where_a_host_keeps_things(entry: str, python: str, folder: str, tmp_path: Path) -> None:
    (host,) = hosts_of(tmp_path, f"hosts: [{entry}]\n")
    assert (host.interpreter("/here"), host.folder("/here")) == (python, folder)


def test_the_example_is_valid() -> None:
    hosts = load_hosts(str(EXAMPLE))
    assert len(hosts) >= 2
    assert place_processes(hosts, 2, 1, colocate=False, folder="/here")[SERVER].host


# ---- who runs where -------------------------------------------------------------------------------

hosts_strategy = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5)


@given(rows=hosts_strategy, num_workers=st.integers(1, 20), num_shards=st.integers(1, 6), colocate=st.booleans())
def test_every_process_has_a_place_and_no_host_more_workers_than_slots(
    rows: list[tuple[int, bool]], num_workers: int, num_shards: int, colocate: bool
) -> None:
    hosts = [Host(host=f"h{i}", slots=slots, server=server) for i, (slots, server) in enumerate(rows)]
    num_slots = sum(slots for slots, _ in rows)
    if num_workers > num_slots:
        match = f"{num_workers} workers need a slot each, but the hosts have {num_slots} slots"
        with pytest.raises(UsageError, match=match):
            place_processes(hosts, num_workers, num_shards, colocate=colocate, folder="/here")
        return
    placement = place_processes(hosts, num_workers, num_shards, colocate=colocate, folder="/here")
    servers = [placement[child].host for child in placement if child.role == "server"]
    names = [placement[child].host for child in placement if child.role == "worker"]
    assert len(names) == num_workers
    assert names == sorted(names)  # slot after slot, in the order of the file
    for host in hosts:
        assert names.count(host.host) <= host.slots
    if colocate:
        assert servers == list(dict.fromkeys(names))
    else:
        assert len(servers) == num_shards
        chosen = {host.host for host in hosts if host.server} or {"h0"}
        assert set(servers) <= chosen
        load = [servers.count(name) for name in chosen]
        assert max(load) - min(load) <= 1


def test_devices_are_dealt_out_in_turn(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, "hosts: [{host: a, devices: [3, 5], slots: 3}, b]\n")
    placement = place_processes(hosts, 4, 1, colocate=False, folder="/here")
    seen = [placement[Child("worker", rank)].env.get("CUDA_VISIBLE_DEVICES") for rank in range(4)]
    assert seen == ["3", "5", "3", None]
    assert "CUDA_VISIBLE_DEVICES" not in placement[SERVER].env


def test_this_machine_must_be_known_to_others_by_an_address(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, "hosts: [localhost, far]\n")
    with pytest.raises(UsageError, match="servers on localhost: far could not find them by that name") as raised:
        place_processes(hosts, 2, 1, colocate=False, folder="/here")
    assert "address:" in raised.value.fix
    assert place_processes(hosts, 1, 1, colocate=False, folder="/here")[SERVER].listen == "127.0.0.1"


# ---- the plan ----------------------------------------------------------------------------------------


def places_of(text: str, tmp_path: Path, num_workers: int, num_shards: int = 1, **options: Any) -> dict[Child, Host]:
    return place_processes(
        hosts_of(tmp_path, text), num_workers, num_shards, **{"colocate": False, "folder": "/here", **options}
    )


def plan_at(resolved: Resolved, places: dict[Child, Host], **request: Any) -> Plan:
    machine = Machine(python="here", spans_hosts=True, places=places, exists=lambda path: True)
    return plan_of(resolved, machine=machine, **request)


TWO = "hosts: [{host: a, address: 10.0.0.1, slots: 2, python: pa}, {host: b, address: 'fe80::2', python: pb}]\n"


def test_processes_elsewhere_are_told_everything_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {steps: 9}\noptimizer: {name: adam, betas: [0.8, 0.9]}\n")
    environ = {"PS_RUN__SEED": "4"}
    path = str(tmp_path / "run.yaml")
    flags = {"run.workers": 3, "output.summary": "s.json", "output.save": "w.safetensors"}
    resolved = load_config(path, flags, [], environ)
    plan = plan_at(resolved, places_of(TWO, tmp_path, 3), config_path=path)
    assert plan.server is not None
    workers = plan.workers("10.0.0.1:4000")
    for spec in (plan.server, *workers):
        assert path not in " ".join(spec.argv)
        config = settings_of(spec.argv)
        assert config.run.steps == 9
        assert config.optimizer.arguments() == {"lr": 0.1, "betas": [0.8, 0.9]}
        assert config.output.summary is None
        assert not [word for word in spec.argv if word.startswith("run.seed")]  # the variable is handed on
    assert plan.summary == "s.json"
    assert plan.server.leaves == ("w.safetensors",)
    assert [(spec.host, spec.argv[0], spec.sharing) for spec in workers] == [
        ("a", "pa", 2),
        ("a", "pa", 2),
        ("b", "pb", 1),
    ]
    assert (plan.server.host, listen_of(plan.server.argv), plan.server.sharing) == ("a", "10.0.0.1:0", 0)
    assert plan.headline().startswith("sync: a server and 3 workers on 2 hosts,")
    (alone,) = plan_at(resolved, places_of(TWO, tmp_path, 3), mode="single").workers(None)
    assert alone.sharing == 1, "the other runs' workers are not there"


def test_shards_listen_where_they_are(tmp_path: Path) -> None:
    resolved = load_config(None, {"run.workers": 3, "launch.port": 7000, "server.direct_port": 7001}, [], {})
    plan = plan_at(resolved, places_of(TWO, tmp_path, 3, colocate=True))
    assert plan.server is not None
    (shard,) = plan.shards("10.0.0.1:7000")
    assert listen_of(plan.server.argv) == "10.0.0.1:7000"
    assert listen_of(shard.argv) == "[fe80::2]:0"
    assert (str(shard.child), shard.host, shard.argv[0]) == ("server shard 1", "b", "pb")
    server = settings_of(shard.argv).server
    assert (server.shard, server.shards, server.coordinator) == (1, 2, "10.0.0.1:7000")
    assert server.direct_port == 0  # the coordinator's may be on the same host
    assert settings_of(plan.server.argv).server.shards == 2


def test_an_address_that_was_set_is_kept(tmp_path: Path) -> None:
    resolved = load_config(None, {"run.workers": 2, "server.listen": "0.0.0.0:7000"}, [], {})
    plan = plan_at(resolved, places_of(TWO, tmp_path, 2, 2))
    assert plan.server is not None
    assert listen_of(plan.server.argv) == "0.0.0.0:7000"
    assert listen_of(plan.shards("x:1")[0].argv) == "0.0.0.0:0"


def test_files_are_looked_for_where_they_are_read(tmp_path: Path) -> None:
    sets = ["security.ca=c/ca.crt", "security.cert=c/server.crt", "security.key=c/server.key", "security.mutual=true"]
    resolved = load_config(None, {"run.workers": 2, "task.name": "my.py:T"}, sets, {})
    plan = plan_at(resolved, places_of(TWO, tmp_path, 2))
    assert plan.server is not None
    assert plan.server.needs == ("c/ca.crt", "c/server.crt", "c/server.key")
    assert plan.workers("x:1")[1].needs == ("my.py", "c/ca.crt", "c/rank-1.crt", "c/rank-1.key")


SECURE = ("security.cert=c", "security.key=k", "security.token_file=t")


@pytest.mark.parametrize(
    ("sets", "environ", "lacks"),
    [
        ([], {}, r"neither encrypted nor authenticated: .*\(--cert, --key\), no token \(--token-file, or PS_TOKEN"),
        ([], {"PS_TOKEN": "t"}, r"not encrypted: .* \(--cert, --key\)$"),
        (["security.cert=c", "security.key=k"], {}, r"not authenticated: no token"),
        (["security.cert=c", "security.key=k"], {"PS_TOKEN": "t"}, None),
        ([*SECURE], {}, None),
        (["server.insecure=true"], {}, None),
        (["server.listen=127.0.0.1:0"], {}, None),
        (["run.mode=allreduce", *SECURE], {}, "workers of mode allreduce would exchange gradients in the clear"),
        (["run.mode=allreduce", *SECURE, "server.insecure=true"], {}, None),
    ],
)
def test_an_open_address_in_the_clear_needs_insecure(
    sets: list[str], environ: dict[str, str], lacks: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PS_TOKEN", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    plan = plan_at(load_config(None, {"run.workers": 2}, sets, {}), places_of(TWO, tmp_path, 2))
    if lacks is None:
        check_plan_exposure(plan)
    else:
        with pytest.raises(AuthError, match=lacks) as raised:
            check_plan_exposure(plan)
        assert "10.0.0.1:0" in raised.value.message
        assert "--insecure" in raised.value.fix


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"launch.sync_code": True}, "task digits is built in"),
        ({"launch.sync_code": True, "task.name": "/x/t.py:T"}, "/x/t.py is not below this directory"),
        ({"launch.sync_code": True, "task.name": "../t.py:T"}, r"\.\./t\.py is not below this directory"),
        ({"launch.sync_code": True, "launch.script": "no.py"}, "no file no.py"),
        ({"launch.ssh": "ssh -F 'x"}, r"""flag --ssh: "ssh -F 'x" is no command"""),
        ({"launch.colocate": True, "server.shards": 3}, "flag --shards: 3 shards, .* each of the 2 hosts"),
    ],
)
def test_settings_that_do_not_go_together(flags: dict[str, Any], words: str, tmp_path: Path) -> None:
    resolved = load_config(None, {"launch.hosts": "hosts.yaml", **flags}, [], {})
    with pytest.raises(UsageError, match=words):
        check_remote(resolved, SshBackend, hosts_of(tmp_path, TWO), 3)


class _Racing(dict[int, Any]):
    """Between a look at it and the next one, another thread has taken the process out, which has ended."""

    def __contains__(self, number: object) -> bool:
        is_there = super().__contains__(number)
        self.pop(number, None)  # type: ignore[arg-type]
        return is_there

    def get(self, number: int, default: Any = None) -> Any:
        return self.pop(number, default)


@pytest.mark.parametrize("text", ["end", "kill"])
def test_an_order_for_a_process_that_ends_just_then_does_not_end_the_agent(text: str) -> None:
    """With it all processes of the host would end."""
    agent = object.__new__(Agent)
    with subprocess.Popen(["true"], start_new_session=True) as ended:
        ended.wait()
    agent._popens = _Racing({1: ended})
    agent._do({"do": text, "id": 1})
