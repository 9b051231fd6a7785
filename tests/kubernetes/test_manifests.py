"""docker/kubernetes/*.yaml: valid for the API, and what their containers run trains to the end.

No cluster is here. The schemas are those of Kubernetes itself (the package kubernetes-validate holds them); the
commands and variables of the containers are run as plain processes over loopback, with what a kubelet would
fill in (`Pod`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from paramserver.common.config.schema import Config
from paramserver.launch.plan.hosts import Child
from paramserver.launch.supervise.restarts import can_mend
from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.ports import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "kubernetes"
REGION = FOLDER / "regions" / "region-a.yaml"
MANIFESTS = [
    (path.name, manifest)
    for path in [*sorted(FOLDER.glob("*.yaml")), *sorted(FOLDER.glob("regions/*.yaml"))]
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
# The oldest with everything that is used, one between, the newest the package knows.
VERSIONS = ["1.29", "1.31", ".".join(kubernetes_validate.latest_version().split(".")[:2])]
NO_RETRY = {2, 11, 12, 14, 16}

Manifest = dict[str, Any]


def manifest(kind: str, is_of_region: bool = False) -> Manifest:
    regions = {"region-a.yaml"} if is_of_region else {path.name for path in FOLDER.glob("*.yaml")}
    found, *_ = (each for name, each in MANIFESTS if each["kind"] == kind and name in regions)
    return found


SERVER, JOB = manifest("StatefulSet"), manifest("Job")
RELAY, REGION_JOB = [each for name, each in MANIFESTS if name == REGION.name and each["kind"] == "Job"]
PODS = {
    role: found["spec"]["template"]["spec"]
    for role, found in (("server", SERVER), ("worker", JOB), ("relay", RELAY), ("region worker", REGION_JOB))
}
NUM_SHARDS, NUM_WORKERS = SERVER["spec"]["replicas"], JOB["spec"]["completions"]


def container(role: str) -> Manifest:
    (only,) = PODS[role]["containers"]
    return only


def variables(role: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(role)["env"] if "value" in each}


# ---- the schema --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "document"), MANIFESTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_manifest_is_valid(name: str, document: Manifest, version: str) -> None:
    assert kubernetes_validate.validate(document, version, strict=True) == version


# ---- what fits together ------------------------------------------------------------------------------


def test_names_meet() -> None:
    """Selectors find pods, the headless service gives them names, what is mounted exists."""
    service, labels = manifest("Service"), SERVER["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= labels.items()
    assert SERVER["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert SERVER["spec"]["serviceName"] == service["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in container("server")["ports"]}
    assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    relay = manifest("Service", True)
    assert relay["spec"]["selector"] == RELAY["spec"]["template"]["metadata"]["labels"]
    assert PODS["relay"]["subdomain"] == RELAY["metadata"]["name"] == relay["metadata"]["name"]
    assert {manifest["metadata"]["name"] for name, manifest in MANIFESTS if name == "config.yaml"} == {"ps-run"}
    assert manifest("ConfigMap")["metadata"]["name"] == PODS["server"]["volumes"][0]["configMap"]["name"]
    for role, pod in PODS.items():
        claims = SERVER["spec"]["volumeClaimTemplates"] if role == "server" else []
        given = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in claims}
        assert {mount["name"] for mount in container(role)["volumeMounts"]} == given


def test_the_numbers_agree() -> None:
    address = variables("worker")["PS_SERVER"]
    assert variables("server")["PS_SERVER__SHARDS"] == str(NUM_SHARDS)
    assert variables("worker")["PS_RUN__WORKERS"] == str(NUM_WORKERS) == str(JOB["spec"]["parallelism"])
    assert yaml.safe_load(manifest("ConfigMap")["data"]["run.yaml"])["run"]["workers"] == NUM_WORKERS
    assert address == variables("server")["PS_SERVER__COORDINATOR"] == "ps-server-0.ps-server:50051"
    assert variables("relay")["PS_UPSTREAM__SERVER"] == address
    assert variables("region worker")["PS_SERVER"] == "ps-relay-a-0.ps-relay-a:50051"
    spec = REGION_JOB["spec"]
    assert variables("relay")["PS_RUN__WORKERS"] == variables("region worker")["PS_RUN__WORKERS"]
    assert variables("relay")["PS_RUN__WORKERS"] == str(spec["completions"]) == str(spec["parallelism"])


def test_stopping_has_the_time_it_takes() -> None:
    """server.drain_s for the workers, then the last snapshot."""
    assert PODS["server"]["terminationGracePeriodSeconds"] > 2 * Config().server.drain_s


def test_a_failure_that_another_try_cannot_mend_ends_the_job() -> None:
    """The exit codes of podFailurePolicy, against what our own launcher restarts."""
    policy = JOB["spec"]["podFailurePolicy"]
    assert REGION_JOB["spec"]["podFailurePolicy"] == policy
    assert RELAY["spec"]["podFailurePolicy"] == json.loads(json.dumps(policy).replace('"worker"', '"relay"'))
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    (codes,) = (rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob")
    assert set(codes["values"]) == NO_RETRY
    assert not any(can_mend(Child("worker", 0), code, has_listened=False) for code in NO_RETRY)
    assert codes["containerName"] == container("worker")["name"]
    assert JOB["spec"]["completionMode"] == "Indexed" and JOB["spec"]["backoffLimitPerIndex"] > 0
    assert PODS["worker"]["restartPolicy"] == "Never"  # the API demands it with a podFailurePolicy


@pytest.mark.parametrize("role", PODS)
def test_a_container_has_no_privileges(role: str) -> None:
    pod, security = PODS[role], container(role)["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not security["allowPrivilegeEscalation"] and security["readOnlyRootFilesystem"]
    assert not pod["automountServiceAccountToken"]
    assert "--uid 10001 " in (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert pod["securityContext"]["runAsUser"] == 10001


def test_secrets_come_as_files() -> None:
    for role in PODS:
        values = variables(role)
        assert "PS_TOKEN" not in values and "secretKeyRef" not in json.dumps(container(role))
        for name in ("PS_SECURITY__CA", "PS_SECURITY__TOKEN_FILE"):
            assert any(values[name].startswith(mount["mountPath"]) for mount in container(role)["volumeMounts"])
    worker_tls = next(volume for volume in PODS["worker"]["volumes"] if volume["name"] == "tls")
    assert [item["key"] for item in worker_tls["secret"]["items"]] == ["ca.crt"]  # not the server's key


# ---- as processes ------------------------------------------------------------------------------------


class Pods(Cluster):
    """What a kubelet does with a container, as far as a process notices:

    - paths below /etc/paramserver, /data and /tmp become folders of the test;
    - the DNS name of a shard, and the 0.0.0.0 at which it listens, become 127.0.0.1 with a port of its own;
    - fieldRef variables and $(NAME) are filled in, JOB_COMPLETION_INDEX is given to the Job's pods;
    - the secret is what `ps-certs init` makes, as the comment in server.yaml says, and 127.0.0.1 is in it anyway.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder)
        self._env.pop("PS_SERVER__ABSENT_S")
        self.steps = steps
        self._ports: dict[tuple[str, str], int] = defaultdict(free_port)  # by pod and number
        etc = folder / "etc"
        hosts = [word for shard in range(NUM_SHARDS) for word in ("--host", f"ps-server-{shard}.ps-server")]
        made = self.command("launch.certs", "init", str(folder / "certs"), *hosts)
        assert made.returncode == 0, made.stderr
        (etc / "tls").mkdir(parents=True)
        (etc / "token").mkdir()
        for name in ("ca.crt", "server.crt", "server.key"):
            shutil.copy(folder / "certs" / name, etc / "tls" / name)
        shutil.copy(folder / "certs" / "token", etc / "token" / "token")
        (etc / "run.yaml").write_text(manifest("ConfigMap")["data"]["run.yaml"])

    def shard(self, index: int) -> Process:
        pod = f"ps-server-{index}"
        filled = {"metadata.name": pod, "metadata.labels['apps.kubernetes.io/pod-index']": str(index)}
        env = self.variables(container("server"), filled, pod)
        argv = self._here(container("server")["args"], pod)
        self.data(pod).mkdir(parents=True, exist_ok=True)
        return self._start(pod, argv, env | {"PS_RUN__STEPS": str(self.steps)})

    def worker(self, index: int, **env: str) -> Process:  # type: ignore[override]
        return self.pod(container("worker"), f"ps-worker-{index}", **{"JOB_COMPLETION_INDEX": str(index), **env})

    def pod(self, container: Manifest, name: str, **env: str) -> Process:
        variables = self.variables(container, {}, name)
        return self._start(name, self._here(container["args"], name), variables | env)

    def probe(self, index: int) -> subprocess.CompletedProcess[str]:
        """The readiness probe, in the container's environment."""
        command = container("server")["readinessProbe"]["exec"]["command"]
        assert command[0] == "python"
        pod = f"ps-server-{index}"
        env = self._env | self.variables(container("server"), {"metadata.name": pod}, pod)
        port = self._ports[pod, "50051"]  # in its own network
        return subprocess.run(
            [sys.executable, *command[1:], f"127.0.0.1:{port}"], env=env, capture_output=True, text=True, timeout=30,
            check=False,
        )  # fmt: skip

    def data(self, pod: str) -> Path:
        return self.folder / "data" / pod

    def _start(self, name: str, argv: list[str], env: dict[str, str]) -> Process:
        program = Path(sys.executable).with_name(argv[0])
        process = Process(f"{name}-{len(self.processes)}", [str(program), *argv[1:]], self._env | env, self.folder)
        self.processes.append(process)
        return process

    def variables(self, container: Manifest, filled: dict[str, str], pod: str) -> dict[str, str]:
        values: dict[str, str] = {}
        for each in container["env"]:
            if "valueFrom" in each:
                text = filled.get(each["valueFrom"]["fieldRef"]["fieldPath"], "")
            else:
                text = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], each["value"])
            values[each["name"]] = text
        return dict(zip(values, self._here(list(values.values()), pod), strict=True))

    def _here(self, texts: list[str], pod: str) -> list[str]:
        def address(found: re.Match[str]) -> str:
            return f"127.0.0.1:{self._ports[found[1] or pod, found[2]]}"

        texts = [re.sub(r"(?:0\.0\.0\.0|([a-z0-9-]+)\.ps-[a-z-]+):(\d+)", address, text) for text in texts]
        texts = [text.replace("/etc/paramserver", str(self.folder / "etc")) for text in texts]
        return [re.sub(r"^/data", str(self.data(pod)), text) for text in texts]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, steps=40)
    yield pods
    pods.stop()


@pytest.mark.slow
def test_the_containers_train_to_the_end(pods: Pods) -> None:
    """Every shard and every index of the Job; the probe sees the shards serve."""
    workers = [pods.worker(index) for index in range(NUM_WORKERS)]  # nobody orders their start
    shards = [pods.shard(index) for index in range(NUM_SHARDS)]
    for index, shard in enumerate(shards):
        shard.event("listening")
        probed = pods.probe(index)
        assert probed.returncode == 0, probed.stderr
    for worker in workers:
        assert worker.wait() == 0, worker.output
    places = sorted((worker.event("place")["rank"], worker.event("place")["engine"]) for worker in workers)
    assert places == [(rank, "Kubernetes") for rank in range(NUM_WORKERS)]
    for shard in shards:
        assert shard.wait() == 0, shard.output
    summary = shards[0].event("summary")
    assert [worker["training_steps"] for worker in summary["workers"]] == [pods.steps] * NUM_WORKERS
    assert summary["final"]["accuracy"] > 0.5


@pytest.mark.slow
def test_pods_that_die_come_back(pods: Pods) -> None:
    """What a StatefulSet and an indexed Job do: the same index again, with the volume it had."""
    pods.steps = 300
    shards = [pods.shard(index) for index in range(NUM_SHARDS)]
    workers = [pods.worker(index, PS_SLOWDOWN__BASE_S="0.02") for index in range(NUM_WORKERS)]
    last = NUM_SHARDS - 1
    for shard in shards:
        shard.until(lambda shard=shard: any(event["version"] for event in shard.events("snapshot")), "a snapshot")
    for pod in (shards[last], workers[2]):
        pod.kill()
    shards[last] = pods.shard(last)
    workers[2] = pods.worker(2)
    for worker in workers:
        assert worker.wait() == 0, worker.output
    for shard in shards:
        assert shard.wait() == 0, shard.output
    summary = shards[0].event("summary")
    assert [worker["training_steps"] for worker in summary["workers"]] == [pods.steps] * NUM_WORKERS


@pytest.mark.slow
def test_two_regions_train_to_the_end(pods: Pods) -> None:
    """The server of server.yaml in two shards, and two regions: b is made of a by the command in its file."""
    config = yaml.safe_load((FOLDER / "regions" / "config.yaml").read_text())["data"]["run.yaml"]
    (pods.folder / "etc" / "run.yaml").write_text(config)
    pods.steps = 64
    (script,) = re.findall(r"sed '(.+?)'", REGION.read_text())
    other = subprocess.run(["sed", script, str(REGION)], capture_output=True, text=True, check=True).stdout
    regions = [list(yaml.safe_load_all(text)) for text in (REGION.read_text(), other)]
    shards = [pods.shard(index) for index in range(NUM_SHARDS)]
    relays, workers = [], []
    for _, relay, job in regions:
        name = relay["metadata"]["name"]
        (container,) = relay["spec"]["template"]["spec"]["containers"]
        relays.append(pods.pod(container, f"{name}-0", JOB_COMPLETION_INDEX="0"))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        for index in range(job["spec"]["completions"]):
            pod = f"{job['metadata']['name']}-{index}"
            workers.append(pods.pod(container, pod, JOB_COMPLETION_INDEX=str(index)))
    for process in (*workers, *relays, *shards):
        assert process.wait() == 0, process.output
    found = shards[0].event("summary")["workers"]
    assert [(worker["region"], worker["training_steps"]) for worker in found] == [("region-a", 64), ("region-b", 64)]
