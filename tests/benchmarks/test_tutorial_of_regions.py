"""The tutorial of docs/regions.md: three network namespaces, flat and with relays, on a short run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from paramserver.benchmarks.rig.links import check_links
from paramserver.common.errors import UsageError


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_regions_carry_a_part_of_the_bytes_of_a_flat_run() -> None:
    try:
        check_links()
    except UsageError as error:
        pytest.skip(str(error))
    flags = ("--workers", "2", "--steps", "8", "--rate", "100", "--latency", "4")
    argv = [sys.executable, "-m", "paramserver.benchmarks.regions", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = dict(re.findall(r"^(\S.*?) {2,}[\d.]+ [\d.]+ +1/([\d.]+)", done.stdout, re.MULTILINE))
    assert 1.8 <= float(parts["regions, sync"]) <= 2.2, done.stdout
    assert float(parts["regions, diloco 32 q4"]) > 8, done.stdout
    left = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout
    named = re.findall(r"ip netns exec (\w+)", done.stdout)
    assert named and not any(name in left for name in named)
