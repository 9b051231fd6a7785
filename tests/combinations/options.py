"""The options of a row, the command line that they mean, and arrays that cover their pairs."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

from covertable import make

from paramserver.common.combinations import Choices, refusal
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import MODES

Row = dict[str, str]

# The first value of an option is its default, to which a row that fails is reduced.
OPTIONS: dict[str, tuple[str, ...]] = {
    "mode": ("sync", "async", "ssp", "dssp", "buffered", "localsgd", "diloco", "async_diloco", "allreduce"),
    "loop": ("plain", "accumulate", "prefetch", "ahead", "epochs", "steps"),  # ahead: both of those before it
    "fault": ("none", "kill_worker", "kill_server", "stop_worker"),
    "workers": ("1", "2"),
    "transport": ("shared", "direct", "grpc"),
    "codec": ("raw", "bf16", "int8", "q4", "topk"),
    "reply_codec": ("raw", "bf16", "q4"),
    "shards": ("1", "2"),
    "optimizer": ("sgd", "momentum", "adamw", "two", "rows"),
    "model": ("layer_norm", "batch_norm", "float64", "frozen"),
    "feature": ("none", "delayed", "group", "pipeline", "polyak", "fragments", "regions", "regions_apart", "zero",
                "best"),
}  # fmt: skip
DEFAULTS: Row = {name: values[0] for name, values in OPTIONS.items()}
LOCAL_STEPS = 3
_TOGETHER = ("mode", "loop", "fault")  # also every three of these


def command(row: Row, script: Path, folder: Path) -> list[str]:
    """Return the words of ps-launch for a row that writes its files to `folder`."""
    words = ["-n", row["workers"], "--script", str(script), "--mode", row["mode"], "--shards", row["shards"]]
    words += ["--save", f"{folder}/saved.safetensors", "--summary", f"{folder}/summary.json", "--no-store"]
    words += ["--history", f"{folder}/history.jsonl", "--set", "worker.threads=1"]
    words += ["--set", f"worker.codec={row['codec']}", "--set", f"worker.reply_codec={row['reply_codec']}"]
    transports = dict.fromkeys((row["transport"], "grpc"))
    words += ["--set", f"worker.transports={','.join(transports)}"]
    if row["mode"] in ("localsgd", "diloco", "async_diloco"):
        words += ["--local-steps", str(LOCAL_STEPS + (row["feature"] == "fragments"))]
    if row["mode"] == "buffered":
        words += ["--buffer", "2"]
    if row["loop"] == "steps":
        words += ["--steps", "9"]
    if row["fault"] != "none":
        words += ["--set", "slowdown.base_s=0.05"]
    if row["fault"] == "kill_server" or (row["fault"], row["mode"]) == ("kill_worker", "allreduce"):
        words += ["--checkpoint-dir", f"{folder}/snapshots", "--checkpoint-every", "1"]
    if row["fault"] != "none" and MODES.load(row["mode"]).has_rounds:
        words += ["--set", f"policy.min_workers={row['workers']}"]
    words += {
        "none": [],
        "delayed": ["--delayed-update"],
        "group": ["--group", "2"],
        "pipeline": ["--group", "2", "--pipeline", "--set", "worker.microbatches=2"],
        "polyak": ["--set", "store.polyak=0.9"],
        "fragments": ["--fragments", "2"],
        "regions": ["--regions", "2"],
        "regions_apart": ["--regions", "2", "--upstream-every", "4"],
        "zero": ["--zero", "1"],
        "best": ["--best", "loss:min"],
    }[row["feature"]]
    return words


def choices_of(row: Row) -> Choices:
    """Return what the table of combinations is asked for a row."""
    mode, feature = row.get("mode", "sync"), row.get("feature", "none")
    policy = MODES.load(mode)
    codecs = row.get("codec", "raw"), row.get("reply_codec", "raw")
    kind = policy.kind
    if kind is ContributionKind.WEIGHTS and set(codecs) != {"raw"}:
        kind = ContributionKind.DELTA
    regions = 2 if feature.startswith("regions") else 0
    every = 4 if feature == "regions_apart" else None
    classes = {"adamw": ("AdamW", {}), "momentum": ("SGD", {"momentum": 0.9})}
    return Choices(
        mode=mode,
        kind=kind,
        has_rounds=policy.has_rounds,
        policy=policy,
        polyak=0.9 if feature == "polyak" else 0.0,
        delayed_update=feature == "delayed",
        fragments=2 if feature == "fragments" else 1,
        codec=codecs[0],
        reply_codec=codecs[1],
        zero=1 if feature == "zero" else 0,
        shards=int(row.get("shards", 1)),
        regions=regions,
        upstream_every=every,
        mode_above="localsgd" if every else "",
        kind_above=MODES.load("localsgd").kind if every else None,
        is_grouped=feature in ("group", "pipeline"),
        pipeline=feature == "pipeline",
        snapshots="snapshots" if row.get("fault") == "kill_server" else None,
        optimizers=(classes.get(row.get("optimizer", ""), ("SGD", {})),),
        num_optimizers=2 if row.get("optimizer") == "two" else 1,
        has_rows=row.get("optimizer") == "rows",
    )


def is_possible(row: Row) -> bool:
    """Whether the command line has a meaning: fragments are an option of some modes, and regions need two workers."""
    mode, feature = row.get("mode"), row.get("feature", "none")
    options = MODES.load(mode).Options.model_fields if mode else {}
    if mode and feature == "fragments" and "fragments" not in options:
        return False
    return not (feature.startswith("regions") and row.get("workers") == "1")


def is_promised(row: Row) -> bool:
    """Whether neither the table nor the command line excludes a row, or a part of first, in a mode."""
    rows = [row] if "mode" in row else [{**row, "mode": mode} for mode in OPTIONS["mode"]]
    return any(is_possible(each) and refusal(choices_of(each)) is None for each in rows)


def array(seed: int) -> list[Row]:
    """Return rows in which every promised pair of values occurs, and every promised mode x loop x fault."""

    def promised(*names: str) -> dict[str, Any]:
        @functools.cache
        def known(*values: str) -> bool:
            return is_promised(dict(zip(names, values, strict=True)))

        return {"operator": "fn", "requires": names, "evaluate": lambda row: known(*(row[name] for name in names))}

    others = [name for name in OPTIONS if name != "mode"]
    constraints = [promised("mode", first, second) for first, second in itertools.combinations(others, 2)]
    triples = [{"fields": list(_TOGETHER), "strength": 3}]
    factors = {name: list(values) for name, values in OPTIONS.items()}
    return [dict(row) for row in make(factors, salt=str(seed), sub_models=triples, constraints=constraints)]


def refused_pairs() -> list[Row]:
    """Return the rows of two options that the table refuses, each with defaults otherwise."""
    found = []
    names = list(OPTIONS)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            for value in OPTIONS[first]:
                for more in OPTIONS[second]:
                    row = {**DEFAULTS, "workers": "2", first: value, second: more}
                    if is_possible(row) and refusal(choices_of(row)) is not None:
                        found.append(row)
    unique = {tuple(row.items()): row for row in found}
    return list(unique.values())
