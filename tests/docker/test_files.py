"""docker/: what can be known of its files without an engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
ALERTS = DOCKER / "prometheus" / "alerts.yml"


def instructions() -> str:
    return re.sub(r"(?m)^#.*\n", "", (DOCKER / "Dockerfile").read_text())


# ---- the image ----------------------------------------------------------------------------------


def test_the_classic_builder_can_build_it() -> None:
    text = instructions()
    assert not (DOCKER / "Dockerfile").read_text().startswith("# syntax=")
    for feature in ("--mount", "<<", "--link", "--chmod"):
        assert feature not in text


def test_no_file_says_where_packages_come_from() -> None:
    for path in [DOCKER / "Dockerfile", *COMPOSE, *DOCKER.glob("prometheus/*")]:
        assert not re.search(r"https?://|index-url [^\"$]", path.read_text()), path


def test_torch_is_the_one_of_the_constraints() -> None:
    assert re.search(r"(?m)^torch==[0-9.]+$", (ROOT / "constraints.txt").read_text())
    assert "grep '^torch==' constraints.txt" in instructions()
    assert not re.search(r"torch[=<>~]=?\d", instructions())


def test_every_package_is_installed_and_in_the_build_context() -> None:
    """`pip install -e` finds a package that the list lacks, an image does not."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = {name.removeprefix("paramserver").strip(".").replace(".", "/") for name in setuptools["packages"]}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    taken = {line[1:] for line in ignored if line.startswith("!")}
    found = [path for name in taken for path in (ROOT / name).glob("**/__init__.py")]
    ours = {path.parent.relative_to(ROOT).as_posix() for path in found}
    assert ours == listed - {""}
    assert taken >= {name.split("/")[0] for name in listed - {""}} | {
        "__init__.py",
        "pyproject.toml",
        "constraints.txt",
    }
    assert ignored.index("*") < min(ignored.index(f"!{name}") for name in taken)


def test_it_runs_as_nobody_special_and_is_probed() -> None:
    lines = instructions().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER paramserver"]
    assert any('"-m", "paramserver.ps.health"' in line for line in lines)


# ---- compose ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_both_versions_of_compose_take_it(path: Path) -> None:
    """Version 1.29 knows no `name`, `include` or `develop`; version 2 wants no `version`."""
    top = yaml.safe_load(path.read_text())
    assert {key for key in top if not key.startswith("x-")} <= {"services", "volumes", "networks", "configs", "secrets"}


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.tls.yaml"]], ids=len)
def test_compose_accepts_it(files: list[str]) -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose on this machine: install docker-compose")
    flags = [flag for name in files for flag in ("-f", str(DOCKER / name))]
    profiles = [flag for name in ("monitoring", "grafana", "serve", "regions") for flag in ("--profile", name)]
    done = subprocess.run(["docker-compose", *flags, *profiles, "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    for region in "ab":
        assert services[f"worker-{region}"]["networks"].keys() == {f"region-{region}"}, "it reaches its relay alone"
        assert services[f"relay-{region}"]["networks"].keys() == {"default", f"region-{region}"}
    for name in ("server", "worker", "relay-a", "relay-b", "worker-a", "worker-b"):
        assert services[name]["init"] is True
        assert services[name]["restart"] == "on-failure:10"  # "always" would start a finished run again for ever
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert sorted(published) == [f"127.0.0.1:{port}:{port}/tcp" for port in (3000, 8000, 9090)]


def test_what_the_containers_say_is_what_alloy_reads(tmp_path: Path) -> None:
    """A server with the log of the compose file: the fields that become labels and time, and those of the query."""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    alloy = (DOCKER / "loki" / "config.alloy").read_text()
    (read,) = re.findall(r'regex += "([a-z|]+)"', alloy)
    formats = {services[name]["environment"]["PS_LOG__FORMAT"] for name in read.split("|")}
    assert formats == {"${LOG_FORMAT:-json}"}
    server = subprocess.Popen(
        [sys.executable, "-m", "paramserver.ps", "--listen", "127.0.0.1:0", "--no-store"],
        cwd=tmp_path, env={**os.environ, "PS_LOG__FORMAT": "json"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        output = next(line for line in server.stderr if "listening" in line)
    finally:
        server.kill()
        server.communicate()
    line = json.loads(output)
    (wanted,) = re.findall(r"expressions = \{(.*?)\}", alloy)
    asked = re.findall(r"(\w+) = ", wanted)
    assert {"program", "timestamp"} <= set(asked) <= line.keys()
    assert (line["program"], line["event"]) == ("ps-server", "listening") and 'format = "Unix"' in alloy
    assert abs(float(line["timestamp"]) - time.time()) < 3600
    (label, field) = re.findall(
        r"`\{(\w+)=\"ps-server\"\} \| json \| (\w+)=", (ROOT / "docs/containers.md").read_text()
    )[0]
    assert label in re.findall(r"values = \{(.*?)\}", alloy)[0] and field in line


# ---- prometheus -----------------------------------------------------------------------------------


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool on this machine: install prometheus")
    return found


def test_promtool_accepts_the_configuration(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "config", str(DOCKER / "prometheus" / "prometheus.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 rules found" in done.stdout


def test_alerts_fire_when_they_should_and_not_otherwise(promtool: str, tmp_path: Path) -> None:
    text = (Path(__file__).parent / "alerts_test.yml").read_text()
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        assert text.count(rule["alert"]) == 2, f"{rule['alert']} has no test"
    (tmp_path / "test.yml").write_text(text.replace("ALERTS\n", f"{ALERTS}\n", 1))
    done = subprocess.run([promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
