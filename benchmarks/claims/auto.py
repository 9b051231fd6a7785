"""Whether `worker.codec=auto` chooses what is fastest: a worker's steps/s on slower and slower links (N22).

    python -m paramserver.benchmarks.claims.auto [--rates 1,10,100] [--ways raw,int8,q4,diloco,auto] [--compute-ms 20]
        [--near "ip netns exec A" --far "ip netns exec B" --host 10.0.0.1]
    sudo python -m paramserver.benchmarks.claims.auto --tbf --rates 100 --replies same --seeds 3
        --ways raw,int8,q4,diloco-raw,diloco,auto

The link is `worker.max_mbit`; with `--tbf` two network namespaces of this machine and a token bucket each way between
them (root, `ip`, `tc`); with `--host` whatever is between the two prefixes, and `--rates` only names it.
A model of 1 MB, weights back in q4, or in the codec of the way up (`--replies same`; of auto still q4), a step that
takes so many ms; the second half of the steps is timed, and of `--seeds` runs the median is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

from ..wan import HOST, limited

LOCAL_STEPS = 25
LOCAL = {"diloco": "q4", "diloco-raw": "raw"}  # ways with local steps, and their codec; the others are codecs, in sync
SCRIPT = """
import sys, time, torch, paramserver
compute_s, num = float(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
model = torch.nn.Linear(500, 500)
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(num):
        if step == num // 2:
            began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(4, 500)).pow(2).mean().backward()
        time.sleep(compute_s)
        optimizer.step()
    print("STEPS/S", (num - num // 2) / (time.perf_counter() - began), flush=True)
    session.finish()
"""


def run(way: str, rate: str, asked: argparse.Namespace) -> tuple[float, str]:
    """Steps/s, and what auto said. `diloco`: q4 both ways, every LOCAL_STEPS steps."""
    mode = ["--mode", "diloco" if way in LOCAL else "sync", "--set", f"policy.local_steps={LOCAL_STEPS}"]
    num_steps = max(asked.steps, 4 * LOCAL_STEPS) if way in LOCAL else asked.steps
    with tempfile.TemporaryDirectory(prefix="claim-") as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        here = [sys.executable, "-m", "paramserver.ps", *mode, "--workers", "1", "--steps", str(num_steps)]
        here += ["--listen", f"{asked.host or '127.0.0.1'}:0", "--set", "server.insecure=true"]
        server = subprocess.Popen(
            [*shlex.split(asked.near), *here], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert server.stdout is not None
            seen = ""
            while not (found := re.search(r"listening.*?address=(\S+)", seen)):
                line = server.stdout.readline()
                if not line:
                    raise SystemExit(seen)
                seen += line
            codec = LOCAL.get(way, way)
            back = "q4" if asked.replies == "q4" or codec == "auto" else codec
            env = {
                **os.environ, "PS_WORKER__SERVER": found[1], "PS_WORKER__CODEC": codec,
                **({} if rate == "shared" else {"PS_WORKER__REPLY_CODEC": back,
                                                "PS_WORKER__TRANSPORTS": "direct,grpc"}),
            }  # fmt: skip
            if not asked.host and rate != "shared":
                env["PS_WORKER__MAX_MBIT"] = rate
            worker = [sys.executable, str(script), str(asked.compute_ms / 1e3), str(num_steps)]
            result = subprocess.run(
                [*shlex.split(asked.far), *worker], env=env, capture_output=True, text=True, timeout=300, check=False
            )
            steps = re.search(r"STEPS/S (\S+)", result.stdout)
            if steps is None:
                raise SystemExit(result.stdout + result.stderr)
            chosen = re.search(r"auto_codec (.*)", result.stdout + result.stderr)
            return float(steps[1]), chosen[1] if chosen else ""
        finally:
            server.terminate()
            server.wait()


def link_of(asked: argparse.Namespace, rate: str) -> AbstractContextManager[tuple[list[str], list[str]] | None]:
    """The prefixes of its ends; None where what there is is taken."""
    return limited(float(rate)) if asked.tbf and rate != "shared" else nullcontext()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1,10,100,1000,shared", help="Mbit/s; `shared` is shared memory")
    parser.add_argument("--ways", default="raw,int8,q4,diloco,auto")
    parser.add_argument("--compute-ms", type=float, default=20)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each")
    parser.add_argument("--replies", default="q4", choices=("q4", "same"), help="codec of the weights back")
    parser.add_argument("--tbf", action="store_true", help="a link between two network namespaces, made for each rate")
    parser.add_argument("--near", default="", help="what the server is started with")
    parser.add_argument("--far", default="", help="what the worker is started with")
    parser.add_argument("--host", default="", help="the server's address there")
    return parser


def main() -> None:
    asked = arguments().parse_args()
    for rate in asked.rates.split(","):
        with link_of(asked, rate) as ends:
            if ends is not None:
                (asked.near, asked.far), asked.host = map(shlex.join, ends), HOST
            for way in asked.ways.split(","):
                if rate == "shared" and way not in ("raw", "auto"):
                    continue
                found = [run(way, rate, asked) for _ in range(asked.seeds)]
                result = [item for item, _ in found]
                spread = f" ({min(result):.2f} to {max(result):.2f})" if len(result) > 1 else ""
                print(f"{rate:>7} Mbit/s {way:<11}{median(result):9.2f} steps/s{spread}  {found[-1][1]}", flush=True)


if __name__ == "__main__":
    main()
