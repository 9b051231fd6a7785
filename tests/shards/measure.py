"""Rounds a second of several workers with 1, 2 and 4 shards, every process on a host of its own.

    make shards                                          1 Gbit/s per host, 4 workers, sync
    python tests/shards/measure.py --mode async --rate 500mbit --workers 2 --shards 1,2

The hosts are network namespaces whose links have a rate in each direction. Workers compute next to nothing
(task ledger), so a step is its exchange. The ledger also proves that nothing was lost or applied twice.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from paramserver.tests.hosts import Host, report, run_once


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--rate", default="1gbit", help="of each host, in each direction, as tc writes it")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", default="1,2,4", help="numbers of shards, compared with the first")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mb", type=int, default=32, help="size of the model")
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turns")
    parser.add_argument("--json", action="store_true", help="metrics as one JSON object")
    return parser.parse_args()


def measure(options: argparse.Namespace, numbers: list[int], machines: list[Host]) -> list[dict[str, Any]]:
    """For each number of shards the median of rounds a second, and what each shard held."""
    samples = options.steps * options.workers * 8
    settings = [
        f"run.mode={options.mode}", f"run.workers={options.workers}", f"run.steps={options.steps}", "run.batch_size=8",
        "task.name=ledger", f"task.args={{samples: {samples}, padding_bytes: {options.mb * 1_000_000}}}",
        "optimizer.lr=1", "policy.weighting=equal", "worker.give_up_s=120",
    ]  # fmt: skip
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    for _ in range(options.repeats):
        for number in numbers:
            found[number].append(run_once(machines[:number], machines[max(numbers) :], settings))
    rows = []
    for number, summaries in found.items():
        rates = [options.steps / summary["wall_s"] for summary in summaries]
        rows.append({
            "shards": number,
            "rounds_per_s": round(statistics.median(rates), 3),
            "all": [round(rate, 3) for rate in rates],
            "shard_mb": [round(sum(shard["bytes"].values()) / 1e6, 1) for shard in summaries[-1]["shards"]],
            "missing": summaries[-1]["final"].get("missing"),
            "repeated": summaries[-1]["final"].get("repeated"),
        })  # fmt: skip
    return [row | {"speedup": round(row["rounds_per_s"] / rows[0]["rounds_per_s"], 2)} for row in rows]


def main() -> None:
    options = arguments()
    numbers = [int(text) for text in options.shards.split(",")]
    report(
        options,
        max(numbers) + options.workers,
        lambda machines: measure(options, numbers, machines),
        f"{options.mode}, {options.mb} MB, {options.workers} workers, {options.rate} per host:",
        "{shards} shards: {rounds_per_s:.2f} steps/s {all}, {speedup:.2f} x; MB a shard {shard_mb}, "
        "samples missing {missing}, repeated {repeated}",
    )


if __name__ == "__main__":
    main()
