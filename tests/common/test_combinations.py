"""The table of capabilities that exclude each other: what it says, when it says it, and that others ask it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.combinations import CAPABILITIES, REFUSALS, Choices, check, check_values, choices_of, refusal
from paramserver.common.config.schema import Config
from paramserver.common.errors import UsageError
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import AGGREGATIONS, CODECS, MODES
from paramserver.docs.making import combinations as making

GRADIENT, DELTA, WEIGHTS = ContributionKind.GRADIENT, ContributionKind.DELTA, ContributionKind.WEIGHTS
SGD, MOMENTUM, ADAM = ("SGD", {"lr": 0.1, "momentum": 0}), ("SGD", {"momentum": 0.9}), ("AdamW", {"lr": 1e-3})


def chosen(mode: str = "sync", **known: Any) -> Choices:
    policy = MODES.load(mode)
    return Choices(**{"mode": mode, "kind": policy.kind, "has_rounds": policy.has_rounds, "policy": policy, **known})


def text_of(choices: Choices) -> str:
    error = refusal(choices)
    return f"{error.message} | {error.fix}" if error is not None else ""


# What gives a run each capability. A capability without an example here cannot be in the table.
EXAMPLES: dict[str, dict[str, Any]] = {
    "workers average among themselves": {"mode": "allreduce"},
    "workers send to the server": {"mode": "sync"},
    "workers run the optimizer": {"mode": "diloco"},
    "workers send weights": {"mode": "localsgd"},
    "workers need the newest weights": {"mode": "sync"},
    "no step along the mean of all": {"mode": "async"},
    "the server takes no steps": {"mode": "localsgd"},
    "gradients without rounds": {"mode": "async"},
    "policy.aggregation": {"aggregation": "median"},
    "store.clip_norm": {"clip_norm": 1.0},
    "store.max_norm": {"max_norm": 1.0},
    "store.polyak": {"polyak": 0.9},
    "--delayed-update": {"delayed_update": True},
    "--overlap-steps": {"overlap_steps": 2},
    "no --delayed-update": {"delayed_update": False},
    "staleness below that of a delayed update": {"mode": "ssp", "staleness": 0},
    "policy.late_cut 1": {"mode": "async", "late_cut": 1},
    "outstanding means": {"mode": "allreduce", "staleness": 2},
    "--fragments": {"mode": "diloco", "fragments": 2},
    "--shards": {"shards": 2},
    "--regions": {"regions": 2},
    "regions in the mode of the run above": {"regions": 2},
    "a region's server": {"in_region": True},
    "--upstream-every": {"regions": 2, "upstream_every": 4},
    "a run above of peers": {"mode_above": "allreduce", "kind_above": ContributionKind.COMPLETION},
    "a run above of gradients": {"mode_above": "sync", "kind_above": GRADIENT},
    "--checkpoint-dir": {"snapshots": "folder"},
    "--codec": {"codec": "q4"},
    "a codec that sends late": {"codec": "topk"},
    "a codec of signs": {"codec": "q2"},
    "a codec among peers": {"mode": "allreduce", "codec": "q4"},
    "codec onebit_adam": {"codec": "onebit_adam"},
    "reply codec onebit_adam": {"reply_codec": "onebit_adam"},
    "--reply-codec": {"reply_codec": "q4"},
    "a reply codec that rounds": {"reply_codec": "bf16"},
    "--zero 1": {"zero": 1},
    "--zero 3": {"zero": 3},
    "--zero": {"zero": 1},
    "one process": {"is_grouped": False},
    "--group": {"is_grouped": True},
    "--pipeline": {"pipeline": True},
    "an evaluator": {"evaluates": True},
    "precision fp16": {"precision": "fp16"},
    "session.rows": {"has_rows": True},
    "several optimizers": {"num_optimizers": 2},
    "a mode for one optimizer": {"mode": "ssp"},
    "fully_shard": {"sharded": "0.weight"},
    "an adaptive optimizer": {"optimizers": (ADAM,)},
    "an optimizer with momentum": {"optimizers": (MOMENTUM,)},
    "an optimizer other than OneBitAdam": {"optimizers": (SGD,)},
    "no rounds of gradients": {"mode": "ssp"},
    "--mode single": {"is_alone": True},
    "a script": {"script": "train.py"},
    "--serve": {"serve": 0},
    "--web": {"web": True},
}


def test_each_capability_is_seen_where_it_is_and_only_there() -> None:
    assert EXAMPLES.keys() == CAPABILITIES.keys()
    for name, settings in EXAMPLES.items():
        assert CAPABILITIES[name](chosen(**settings)), name
        assert not CAPABILITIES[name](chosen(**_without(name))), name


def _without(name: str) -> dict[str, Any]:
    """Choices of a run without a capability."""
    others = {
        "workers send to the server": {"mode": "allreduce"}, "no --delayed-update": {"delayed_update": True},
        "workers need the newest weights": {"mode": "async"},
    }  # fmt: skip
    return others.get(name, {})


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.first} x {row.second}")
def test_each_pair_is_refused_in_one_sentence_with_a_fix(row: Any) -> None:
    choices = chosen(**{**EXAMPLES[row.first], **EXAMPLES[row.second], **_mode_of(row)})
    error = row.error(choices)
    assert error is not None and error.exit_code == 2
    assert "{" not in error.message + error.fix and "\n" not in error.message + error.fix
    assert error.fix and not error.fix.endswith(".")
    with pytest.raises(UsageError):
        check(choices)
    for able in re.findall(r"that (?:can|has one|sends them): ([\w, ]+)", error.fix):
        for mode in able.split(", "):
            assert row.error(replace(choices, policy=MODES.load(mode), kind=MODES.load(mode).kind, mode=mode)) is None


def _mode_of(row: Any) -> dict[str, Any]:
    """The mode of an example with two."""
    modes = [settings["mode"] for settings in (EXAMPLES[row.first], EXAMPLES[row.second]) if "mode" in settings]
    return {"mode": modes[0]} if modes else {}


def test_no_pair_is_in_the_table_twice() -> None:
    pairs = [frozenset((row.first, row.second)) for row in REFUSALS]
    assert len(set(pairs)) == len(pairs)
    assert {name for pair in pairs for name in pair} == CAPABILITIES.keys()


@pytest.mark.parametrize("mode", MODES.names())
def test_every_mode_goes_with_its_defaults(mode: str) -> None:
    config = Config.model_validate({"run": {"mode": mode, "workers": 2}})
    check(choices_of(config, mode))
    check_values(config, mode)


def test_a_worker_that_knows_nothing_of_its_run_refuses_what_no_run_allows() -> None:
    check(Choices(mode="", kind=None, codec="topk", reply_codec="q4", is_grouped=True))
    assert "evaluator is one process" in text_of(Choices(mode="", kind=None, evaluates=True, is_grouped=True))


# ---- aggregation and norms


@pytest.mark.parametrize("mode", MODES.names())
@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
def test_only_a_round_of_gradients_is_aggregated_in_another_way(mode: str, aggregation: str) -> None:
    text = text_of(chosen(mode, aggregation=aggregation))
    if mode in ("sync", "diloco") or aggregation == "mean":
        assert not text
    else:
        assert f"policy.aggregation is {aggregation}" in text and "diloco, sync" in text


# ---- codecs


@pytest.mark.parametrize("codec", CODECS.names())
def test_a_codec_goes_with_the_optimizers_that_it_suits(codec: str) -> None:
    late, signs = ("powersgd", "q2", "sparse", "topk"), ("q2",)
    if codec == "onebit_adam":
        assert not text_of(chosen(codec=codec, optimizers=(("OneBitAdam", {}),)))
        assert "the optimizer is AdamW" in text_of(chosen(codec=codec, optimizers=(ADAM,)))
        assert "for rounds in which" in text_of(chosen("async", codec=codec))
        return
    assert not text_of(chosen(codec=codec, optimizers=(SGD,)))
    assert bool(text_of(chosen(codec=codec, optimizers=(SGD, ADAM)))) is (codec in late)
    assert bool(text_of(chosen(codec=codec, optimizers=(MOMENTUM,)))) is (codec in signs)
    assert not text_of(chosen("diloco", codec=codec, optimizers=(ADAM, MOMENTUM))), "the workers run it"


def test_weights_are_sent_as_they_are() -> None:
    text = text_of(chosen("localsgd", codec="q4"))
    assert "worker.codec is q4" in text and "--set worker.codec=q4 for ps-server too" in text
    text = text_of(chosen("localsgd", reply_codec="int8"))
    assert "--set worker.reply_codec=int8 for ps-server too" in text and "diloco" in text
    assert not text_of(chosen("localsgd", kind=DELTA, codec="q4", reply_codec="int8"))


@pytest.mark.parametrize("codec", ["int8", "q4", "sparse", "topk", "powersgd", "bf16"])
def test_a_fragment_travels_in_what_encodes_it_by_itself(codec: str) -> None:
    assert not text_of(chosen("diloco", codec=codec, reply_codec="q4", fragments=3))
    assert "encodes only whole replies" in text_of(chosen("diloco", codec=codec, reply_codec="bf16", fragments=3))


# ---- values that limit each other


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"fragments": 4}, r"policy\.fragments is 4, and policy\.local_steps is 30", "--local-steps 32"),
        ({"overlap_steps": 31}, r"overlap_steps is 31.*30 local steps.*local_steps is 30", "--overlap-steps 30"),
        ({"fragments": 5, "overlap_steps": 7}, r"overlap_steps is 7.*6 local steps.*fragments 5", "-steps 6"),
    ],
)
def test_values_that_limit_each_other_are_named(options: dict[str, Any], message: str, fix: str) -> None:
    config = Config.model_validate(
        {"run": {"mode": "diloco"}, "policy": {"local_steps": 30, "delayed_update": True, **options}}
    )
    with pytest.raises(UsageError, match=message) as refused:
        check_values(config, "diloco")
    assert fix in str(refused.value.fix)


# ---- one table


def test_nobody_else_refuses_a_pair() -> None:
    """A sentence that excludes two settings is in the table, or it is about what one machine or file has."""
    package = Path(__file__).parents[2]
    allowed = {"common/combinations.py", "launch/plan/regions.py", "launch/plan/settings.py", "launch/run.py"}
    found = set()
    for folder in ("common", "ps", "worker", "launch", "relay", "simulate"):
        for path in (package / folder).rglob("*.py"):
            if re.search(r"together with (--|\{|worker\.|policy\.)|leave one of them out", path.read_text()):
                found.add(str(path.relative_to(package)))
    assert found <= allowed, found - allowed


def test_the_page_is_made_from_the_table() -> None:
    assert making.PAGE.read_text() == making.page(), "python -m paramserver.docs.making.combinations"
