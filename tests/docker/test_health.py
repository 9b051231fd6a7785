"""The probe of docker/Dockerfile's HEALTHCHECK, against a real server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paramserver.tests.cluster import Cluster


def test_it_loads_no_torch() -> None:
    code = "import sys, paramserver.ps.health; print([n for n in ('torch', 'numpy', 'pydantic') if n in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


@pytest.mark.slow
def test_a_server_that_serves_with_tls_and_a_token_and_one_that_is_gone(cluster: Cluster) -> None:
    certs = cluster.folder / "certs"
    code = "from paramserver.launch.certs.main import main; main()"
    subprocess.run([sys.executable, "-c", code, "init", str(certs)], check=True, capture_output=True)
    pem = ("--cert", str(certs / "server.crt"), "--key", str(certs / "server.key"))
    server = cluster.server("--mode", "async", "--token-file", str(certs / "token"), *pem)

    ca = str(certs / "ca.crt")
    healthy = cluster.command("ps.health", cluster.address, PS_SECURITY__CA=ca)  # no token needed
    assert (healthy.returncode, healthy.stdout) == (0, f"{cluster.address}: SERVING\n")
    assert cluster.command("ps.health", cluster.address, "--ca", ca).returncode == 0
    assert cluster.command("ps.health", cluster.address, "--timeout", "2").returncode == 15  # in the clear
    missing = cluster.command("ps.health", cluster.address, "--ca", "nowhere.crt")
    assert missing.returncode == 11
    assert "cannot read nowhere.crt" in missing.stderr

    server.popen.kill()
    server.wait()
    gone = cluster.command("ps.health", cluster.address, "--ca", ca, "--timeout", "2")
    assert gone.returncode == 15
    assert gone.stderr.startswith(f"health: {cluster.address}: ")
    assert "Traceback" not in gone.stderr
