"""Cost and gain of local steps: a task in sync and in diloco with several H, over real processes.

    python -m paramserver.benchmarks.claims.diloco [--task digits|gpt] [--steps N] [--seeds 0,1,2] [--set KEY=VALUE]...

Four workers, whose payloads go over sockets; bytes are all that they sent and received, messages included. `gpt` is a
byte-level transformer of 0.13 million parameters, AdamW with a cosine schedule; the loss is of held-out text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ...common.reporting.summary import Summary

COMMON = ("run.workers=4", "worker.transports=direct,grpc", "worker.threads=1", "optimizer.name=adamw")
TASKS = {
    "digits": ("task.name=digits", "run.batch_size=32", "optimizer.lr=2e-3", "run.steps=500"),
    "gpt": (
        "task.name=gpt",
        "task.args={context: 48, num_layers: 2, width: 64}",
        "run.batch_size=16",
        "optimizer.lr=3e-3",
        "train.lr_schedule=cosine",
        "run.steps=600",
    ),
}
WAYS = {
    "sync": ("run.mode=sync",),
    **{f"diloco {h}": ("run.mode=diloco", f"policy.local_steps={h}") for h in (10, 25, 100)},
}


def run(settings: list[str]) -> Summary:
    """One job of ps-launch to its end."""
    with tempfile.TemporaryDirectory(prefix="claim-") as folder:
        summary = Path(folder) / "summary.json"
        sets = [part for setting in (*settings, f"output.summary={summary}") for part in ("--set", setting)]
        argv = [sys.executable, "-m", "paramserver.launch", *sets]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"ps-launch ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        return Summary.model_validate(json.loads(summary.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of: " + ", ".join(WAYS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all, as of ps-launch")
    asked = parser.parse_args()
    length = [f"run.steps={asked.steps}"] if asked.steps else []
    whole: float | None = None
    print(f"{'way':<12}{'loss':>9}{'spread':>9}{'bytes':>16}{'of first':>10}{'cosine':>9}{'rounds':>8}")
    for way in asked.ways.split(","):
        found = [
            run([*COMMON, *TASKS[asked.task], *length, *WAYS[way], f"run.seed={seed}", *asked.set])
            for seed in map(int, asked.seeds.split(","))
        ]
        losses = [item.final["loss"] for item in found]
        num_bytes = statistics.mean(item.num_bytes for item in found)
        whole = whole or num_bytes
        cosines = [item.cosine for item in found if item.cosine is not None]
        cosine = f"{statistics.mean(cosines):.2f}" if cosines else "-"
        spread = f"{max(losses) - min(losses):.4f}"
        ratio = f"1/{whole / num_bytes:.1f}"
        print(
            f"{way:<12}{statistics.mean(losses):>9.4f}{spread:>9}{num_bytes:>16,.0f}{ratio:>10}{cosine:>9}"
            f"{found[0].version:>8}",
            flush=True,
        )


if __name__ == "__main__":
    main()
