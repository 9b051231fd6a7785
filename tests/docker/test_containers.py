"""docs/containers.md, done: the image and docker/compose.yaml on a real engine (`make docker-test`)."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable

import pytest

from .conftest import Project, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

Up = Callable[..., Project]

# Steps that leave the cores to those who look; a run that goes on until it is stopped.
CALM = {"worker": {"environment": {"PS_SLOWDOWN__BASE_S": "0.05"}}}
FOR_EVER = "1000000"


def run_rm(image: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", "run", "--rm", "--network=none", image, *argv],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


# ---- the image ----------------------------------------------------------------------------------


def test_the_image_is_small_and_its_user_nobody(image: str) -> None:
    facts = json.loads(docker("image", "inspect", image))[0]
    base = json.loads(docker("image", "inspect", "python:3.11-slim", check=False).partition("\nError")[0] or "[]")
    size = facts["Size"] - (base[0]["Size"] if base else 0)
    if "+cpu" in run_rm(image, "python", "-c", "import torch; print(torch.__version__)").stdout:
        assert size < 1.5e9  # 1.2 GB: torch is 0.9 of it
    assert run_rm(image, "id", "-u").stdout.strip() == "10001"
    assert run_rm(image, "sh", "-c", "ls -A /src; touch /opt/x /usr/bin/x || echo refused").stdout == "refused\n"


def test_the_image_has_every_program_and_every_module(image: str) -> None:
    code = (
        "import importlib, pkgutil, paramserver as p, subprocess;"  # trainers and trackers are extras, and not in it
        "names = [m.name for m in pkgutil.walk_packages(p.__path__, 'paramserver.')"
        " if not any(one in m.name for one in ('.benchmarks', '.integrations.', '.trackers.', '.tracing'))];"
        "[importlib.import_module(n) for n in names if not n.endswith('__main__')];"
        "[subprocess.run([c, '--help'], check=True, capture_output=True)"
        " for c in ('ps-server', 'ps-worker', 'ps-launch', 'ps-certs', 'ps-serve')];"
        "print(len(names))"
    )
    done = run_rm(image, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


def test_the_image_by_itself_refuses_an_open_address(image: str) -> None:
    done = run_rm(image)
    assert done.returncode == 11
    assert "neither encrypted nor authenticated" in done.stderr
    assert "Traceback" not in done.stderr


# ---- compose --------------------------------------------------------------------------------------


def test_a_run_trains_to_its_end_and_stays_ended(up: Up) -> None:
    project = up("compose.yaml", STEPS="300")
    project.until_all_exited("server", "worker")
    assert project.exit_codes("server", "worker") == [0, 0, 0]
    summary = json.loads(project.read("/data/run.json"))
    assert summary["final"]["accuracy"] > 0.9  # ssp: what is late depends on who is busy
    assert len(summary["workers"]) == 2
    assert len(project.read("/data/weights.safetensors")) > 200_000
    assert "insecure" in project.logs()  # said, not hidden

    # The same command again finds it done; nobody was restarted for having finished.
    project("up", "-d", "--no-build")
    project.until_all_exited("server", "worker")
    assert project.exit_codes("server", "worker") == [0, 0, 0]
    assert [state["RestartCount"] for state in project.states("server") + project.states("worker")] == [0, 0, 0]
    assert json.loads(project.read("/data/run.json"))["version"] == summary["version"]


def test_whatever_dies_is_back_and_the_run_ends_well(up: Up) -> None:
    # Nobody trains without the other, so that the run cannot be over before who died is back.
    both = {"server": {"environment": {"PS_POLICY__MIN_WORKERS": "2"}}}
    project = up("compose.yaml", extra=both, STEPS="800", MODE="sync")
    project.until(lambda: project.metrics().get("paramserver_step", 0) > 200, "200 steps")
    project.kill(project.ids("worker")[0])
    project.until(lambda: project.metrics().get("paramserver_joins_totalagain", 0) == 1, "worker back")
    project.until(lambda: project.metrics().get("paramserver_live_workers", 0) == 2, "worker training")
    durable = project.metrics()["paramserver_durable_version"]
    assert durable > 100

    project.kill(project.ids("server")[0])
    project.until(lambda: project.metrics().get("paramserver_incarnation", 0) == 2, "server back")
    assert project.metrics()["paramserver_version"] >= durable
    project.until(lambda: project.metrics().get("paramserver_live_workers", 0) == 2, "both workers back")

    project.until_all_exited("server", "worker")
    assert project.exit_codes("server", "worker") == [0, 0, 0]
    assert [state["RestartCount"] for state in project.states("server")] == [1]
    assert sorted(state["RestartCount"] for state in project.states("worker")) == [0, 1]
    summary = json.loads(project.read("/data/run.json"))
    assert sorted(worker["rank"] for worker in summary["workers"]) == [0, 1]
    assert summary["final"]["accuracy"] > 0.95


def test_scaled_while_it_runs_and_stopped_within_the_grace(up: Up) -> None:
    project = up("compose.yaml", extra=CALM, STEPS=FOR_EVER, WORKERS="1")
    project.until(lambda: project.metrics().get("paramserver_step", 0) > 20, "twenty steps")
    project("up", "-d", "--no-build", "--scale", "worker=8")
    project.until(lambda: project.metrics().get("paramserver_live_workers", 0) == 8, "eight workers")
    assert len(project.ids("worker")) == 8
    project.until(lambda: project.states("server")[0].get("Health", {}).get("Status") == "healthy", "healthy server")

    project("up", "-d", "--no-build", "--scale", "worker=3")
    project.until(lambda: project.metrics().get("paramserver_live_workers", 0) == 3, "three workers")
    project("stop")
    assert set(project.exit_codes("server", "worker")) == {143}  # 137: killed when its grace was over
    assert "snapshot" in project.logs()

    version = json.loads(project.read("/data/run.json"))["version"]
    project("start")
    project.until(lambda: project.metrics().get("paramserver_version", 0) > version, "the run going on")


def test_with_tls_and_a_token_nobody_else_comes_in(up: Up, image: str) -> None:
    project = up("compose.yaml", "compose.tls.yaml", extra=CALM, STEPS=FOR_EVER)
    project.until(lambda: project.metrics().get("paramserver_live_workers", 0) == 2, "two workers over TLS")
    project.until(lambda: project.states("server")[0].get("Health", {}).get("Status") == "healthy", "healthy server")
    assert "insecure" not in project.logs()
    network = f"{project.name}_default"

    def stranger(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", "run", "--rm", "--network", network, image, *argv],
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    plain = stranger("ps-worker", "--server", "server:50051", "--set", "worker.give_up_s=3")
    assert plain.returncode in (11, 15), plain.stderr
    assert stranger("python", "-m", "paramserver.ps.health", "server:50051").returncode == 15
    assert project.metrics()["paramserver_live_workers"] == 2
    project("up", "-d", "--no-build", "--force-recreate", "certs")  # keeps the certificates that are there
    project.until_all_exited("certs")
    assert project.exit_codes("certs") == [0]
    assert "certificates for" not in project("logs", "--no-color", "certs")


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.tls.yaml"]], ids=["plain", "tls"])
def test_the_weights_reply_to_requests_while_they_train(up: Up, files: list[str]) -> None:
    is_tls = len(files) > 1
    settings = {"STEPS": FOR_EVER, "SERVE_TOKEN": "secret", "SERVE_PORT": "0"}
    project = up(*files, extra=CALM, flags=("--profile", "serve"), **settings)
    token = "$(cat /certs/token)" if is_tls else "secret"
    tensor = {"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}

    def version(token: str = token) -> int:
        """The version that replies; as a status below 0 where the request is refused."""
        code = (
            "import sys, json, ssl, urllib.request as u, urllib.error as e;"
            f"c = ssl.create_default_context(cafile='/certs/ca.crt') if {is_tls} else None;"
            f"r = u.Request('http{'s' if is_tls else ''}://127.0.0.1:8000/v2/models/live/infer',"
            f" json.dumps(dict(inputs=[{tensor}])).encode(), dict(authorization='Bearer ' + sys.argv[1]));"
            "f = lambda: json.load(u.urlopen(r, timeout=20, context=c))['model_version'].rpartition('.')[2];\n"
            "try: print(f())\n"
            "except e.HTTPError as error: print(-error.code)\n"
            "except OSError: print(0)\n"
        )
        command = f'exec python -c {shlex.quote(code)} "{token}"'
        return int(docker("exec", project.ids("serve")[0], "sh", "-c", command))

    project.until(lambda: version() > 0, "version that replies")
    first = version()
    project.until(lambda: version() > first, "newer version")
    assert version("another") == -401
    log = project("logs", "--no-color", "serve")
    assert "secret" not in log and "Traceback" not in log


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.tls.yaml"]], ids=["plain", "tls"])
def test_two_regions_train_to_the_end_though_a_relay_is_killed(up: Up, files: list[str]) -> None:
    calm = dict.fromkeys(("worker-a", "worker-b"), CALM["worker"])
    both = {"server": {"environment": {"PS_POLICY__MIN_WORKERS": "2"}}}
    settings = {"WORKERS": "0", "MODE": "diloco", "STEPS": "320"}
    project = up(*files, extra=calm | both, flags=("--profile", "regions"), **settings)
    project.until(lambda: project.metrics().get("paramserver_step", 0) >= 64, "two exchanges")
    project.kill(project.ids("relay-a")[0])
    project.until(lambda: project.metrics().get("paramserver_joins_totalagain", 0) == 1, "relay back")
    services = ("server", "relay-a", "relay-b", "worker-a", "worker-b")
    project.until_all_exited(*services)
    assert project.exit_codes(*services) == [0] * 7
    assert [state["RestartCount"] for state in project.states("relay-a") + project.states("relay-b")] == [1, 0]
    summary = json.loads(project.read("/data/run.json"))
    found = [(worker["region"], worker["region_workers"], worker["training_steps"]) for worker in summary["workers"]]
    assert found == [("a", 2, 320), ("b", 2, 320)]
    assert summary["final"]["accuracy"] > 0.9


def test_monitoring_sees_the_run_and_its_death(up: Up, prometheus_image: str) -> None:
    flags = ("--profile", "monitoring")
    settings = {"PROMETHEUS_IMAGE": prometheus_image, "PROMETHEUS_PORT": "0", "STEPS": FOR_EVER}
    project = up("compose.yaml", extra=CALM, flags=flags, **settings)

    def ask(path: str) -> dict:
        code = f"import urllib.request as u; print(u.urlopen('http://prometheus:9090/api/v1/{path}').read().decode())"
        text = docker("exec", project.ids("worker")[0], "python", "-c", code, check=False)
        return json.loads(text) if text.startswith("{") else {"data": {"result": []}}

    def value(query: str) -> float:
        result = ask(f"query?query={query}")["data"]["result"]
        return float(result[0]["value"][1]) if result else -1.0

    project.until(lambda: value("up") == 1, "scrape")
    project.until(lambda: value("rate(paramserver_updates_total[30s])") > 1, "rate of updates")
    project.until(lambda: value("paramserver_live_workers") == 2, "both workers")

    def rules() -> list[dict]:
        return [rule for group in ask("rules")["data"]["groups"] for rule in group["rules"]]

    assert len(rules()) >= 9
    assert {rule["health"] for rule in rules()} <= {"ok", "unknown"}
    # A rule that was looked at while workers were still joining is pending until it is looked at again.
    project.until(lambda: {rule["state"] for rule in rules()} == {"inactive"}, "all alerts to be inactive")
    docker("stop", project.ids("server")[0])
    project.until(lambda: value("up") == 0, "death noticed")

    def down() -> str:
        return next(rule["state"] for rule in rules() if rule["name"] == "ParamserverDown")

    project.until(lambda: down() in ("pending", "firing"), "alert")


@pytest.fixture(scope="session")
def prometheus_image(image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of the Prometheus that is installed here: none has to be pulled."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus on this machine: install the package prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(binary, folder / "prometheus")
    (folder / "Dockerfile").write_text(
        f"FROM {image}\n"
        "USER root\n"
        "COPY prometheus /bin/prometheus\n"
        "RUN install -d -o nobody /prometheus\n"
        "USER nobody\n"
        "HEALTHCHECK NONE\n"
        'ENTRYPOINT ["/bin/prometheus"]\n'
    )
    docker("build", "-q", "-t", "paramserver-test-prometheus", str(folder))
    return "paramserver-test-prometheus"
