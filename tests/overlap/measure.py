"""Seconds a step over a slow link, without and with something that overlaps exchange and computation.

    make overlap                                                 policy.delayed_update, in every mode that can
    python tests/overlap/measure.py --mode ssp --rate 1gbit --set run.batch_size=64
    python tests/overlap/measure.py --mode sync --deep --workers 1     gradients and weights that travel meanwhile

The server is at one end of the link, all workers at the other. Computing is mostly a pause
(slowdown.base_s), so that neither the number of cores nor other programs decide the metrics; with --deep it is
a forward and a backward pass through nine layers, and both directions overlap with it or neither (worker.overlap).
Variants take turns; shown is the median of the summaries' wall_s by steps.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from paramserver.tests.hosts import Host, report, run_once


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", help="repeatable; default async, ssp and localsgd")
    parser.add_argument("--rate", default="400mbit", help="of the link, in each direction, as tc writes it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24, help="training steps per worker")
    parser.add_argument("--hidden", type=int, default=4096, help="size of the model: 1 KiB for each")
    parser.add_argument("--compute-s", type=float, default=0.17, help="pause that stands for computing")
    parser.add_argument("--deep", action="store_true", help="real computing: worker.overlap=true beside false")
    parser.add_argument("--samples", type=int, default=2000, help="--deep: of a batch; 2000 take about 0.1 s")
    parser.add_argument("--local-steps", type=int, default=4, help="localsgd: steps that share --compute-s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in both variants")
    parser.add_argument("--plain", action="append", default=[], metavar="KEY=VALUE", help="in the first only")
    parser.add_argument("--changed", action="append", default=[], metavar="KEY=VALUE", help="in the second only")
    parser.add_argument("--json", action="store_true", help="metrics as one JSON object")
    return parser.parse_args()


def settings(options: argparse.Namespace, mode: str) -> list[str]:
    """The settings of every process of a run."""
    local_steps = options.local_steps if mode == "localsgd" else 1
    found = [
        f"run.mode={mode}", f"run.workers={options.workers}", f"run.steps={options.steps}", "run.batch_size=8",
        "task.name=digits", f"task.args={{hidden: {options.hidden}}}", "optimizer.lr=0.01",
        f"policy.local_steps={local_steps}", f"slowdown.base_s={options.compute_s / local_steps}",
    ]  # fmt: skip
    if options.deep:
        task = Path(__file__).with_name("deep.py")
        found += [
            f"task.name={task}:Deep", f"task.args={{samples: {options.samples}}}", f"run.batch_size={options.samples}",
            "slowdown.base_s=0",
        ]  # fmt: skip
    return found + options.set


def measure(options: argparse.Namespace, mode: str, ends: list[Host]) -> dict[str, Any]:
    """Median seconds a step of both variants, and what else tells them apart."""
    way = "worker.overlap" if options.deep else "policy.delayed_update"
    variants = {"plain": [*options.plain, f"{way}=false"], "changed": options.changed or [f"{way}=true"]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(options.repeats):
        for name, extra in variants.items():
            found[name].append(run_once(ends[:1], ends[1:] * options.workers, settings(options, mode) + extra))
    metrics: dict[str, Any] = {"mode": mode, "changed": " ".join(variants["changed"])}
    for name, summaries in found.items():
        steps = [summary["wall_s"] / options.steps for summary in summaries]
        metrics[f"{name}_step_s"] = round(statistics.median(steps), 4)
        metrics[f"{name}_steps_s"] = [round(step, 4) for step in steps]
        rows = summaries[-1]["workers"]
        metrics[f"{name}_staleness_max"] = max(row["staleness_max"] for row in rows)
        metrics[f"{name}_bytes_sent"] = max(row["bytes_sent"] for row in rows)
        metrics[f"{name}_contributions"] = [row["contributions"] for row in rows]
        metrics[f"{name}_samples"] = [row["samples"] for row in rows]
    metrics["ratio"] = round(metrics["changed_step_s"] / metrics["plain_step_s"], 3)
    return metrics


def main() -> None:
    options = arguments()
    modes = options.mode or (["sync"] if options.deep else ["async", "ssp", "localsgd"])
    report(
        options,
        2,
        lambda ends: [measure(options, mode, ends) for mode in modes],
        f"{options.rate}, {options.workers} workers:",
        "{mode:9} plain {plain_step_s} s a step {plain_steps_s}, {changed} {changed_step_s} {changed_steps_s}: "
        "{ratio:.2f} x; staleness at most {plain_staleness_max} and {changed_staleness_max}",
    )


if __name__ == "__main__":
    main()
