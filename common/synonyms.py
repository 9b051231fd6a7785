"""Words that other tools use, and names of earlier versions, each with the sentence that names ours. Pure.

They are looked up only when a word is unknown here, so a word of ours is never taken from its program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

_LAUNCH, _SERVER, _WORKER, _SERVE = "ps-launch", "ps-server", "ps-worker", "ps-serve"
_ELSE = ""  # every other program

_RESUME = "--checkpoint-dir DIR continues from its newest snapshot; --resume names another: latest, never or PATH"

Sentence = str | Mapping[str, str]  # the same for every program, or for each


def _by_word(table: Mapping[str, T]) -> dict[str, T]:
    """Returns the table with an entry for each word of its keys."""
    return {word: sentence for words, sentence in table.items() for word in words.split()}


FLAGS: dict[str, Sentence] = _by_word({
    "nproc-per-node np nproc num-workers num-processes nprocs world-size num-nodes nnodes procs processes replicas "
    "n-workers": {
        _WORKER: "a ps-worker is one worker, with its --rank R; ps-launch -n N starts N of them",
        _ELSE: "-n N is the number of workers",
    },
    "gpus gpu gpu-ids num-gpus gpus-per-node devices accelerator cuda": {
        _LAUNCH: "-n N is the number of workers; each takes its own GPU, or the one that --device names",
        _ELSE: "ps-worker --device cuda:I names the GPU of a worker",
    },
    "dashboard ui monitor web-ui": {
        _LAUNCH: "--web serves the dashboard and prints its address",
        _SERVER: "--web HOST:PORT serves the dashboard",
        _ELSE: "ps-launch --web serves the dashboard of a run, and ps-runs ui that of all runs",
    },
    "metrics prometheus metrics-port": {
        _LAUNCH: "--set server.metrics=127.0.0.1:9090 lets Prometheus read metrics there",
        _ELSE: "ps-server --metrics HOST:PORT lets Prometheus read metrics there",
    },
    "port host address addr bind master-addr master-port rdzv-endpoint server-address": {
        _SERVER: "--listen HOST:PORT is the address of the server",
        _WORKER: "--server HOST:PORT is the address of the server",
        _LAUNCH: "--port P is the server's port here; --hosts FILE.yaml names other machines",
        _ELSE: "--listen HOST:PORT is the address",
    },
    "config config-file cfg conf": {_LAUNCH: "the file needs no flag: ps-launch FILE.yaml"},
    "module file entrypoint program": "ps-launch -n N train.py runs a script with its own arguments",
    "model dataset data data-dir":
        "--task NAME or --task FILE.py:NAME is model and data together; a script has its own: ps-launch train.py",
    "wandb tensorboard mlflow tracker report-to logger use-wandb":
        "--track NAME,... names trackers: tensorboard, wandb, mlflow",
    "checkpoint checkpoints ckpt ckpt-dir snapshot-dir output-dir save-dir save-every output":
        "--checkpoint-dir DIR is the folder of snapshots; --save FILE.safetensors is for the final weights",
    "resume-from resume-from-checkpoint continue restore load resume": _RESUME,
    "verbose debug quiet log-level loglevel": {
        _LAUNCH: "--log-format json is for programs; --set log.level=debug shows more",
        _ELSE: "--set log.level=debug shows more",
    },
    "learning-rate rate": "--lr RATE is the learning rate",
    "batch bs per-device-batch-size train-batch-size": "--batch-size N is of each worker",
    "iterations iters max-steps num-steps": "--steps N is the length of the run",
    "num-epochs max-epochs num-train-epochs": "--epochs N is the length of the run",
    "hostfile machinefile nodes machines": "--hosts FILE.yaml names the machines",
    "strategy algorithm sync-mode ddp sync async":
        "--mode MODE is how workers synchronise: sync, async, ssp, localsgd, diloco, allreduce, ...",
    "fp16 bf16 amp mixed-precision": "--precision bf16 or fp16 is of autocast",
    "compression codec quantize compress":
        "--set worker.codec=q4 (or int8, fp16, ...) is the codec of gradients; ps-launch doctor names one",
    "max-retries retries": "--max-restarts N is the number of restarts of each process",
    "gradient-accumulation-steps accum accumulation": "--accumulate N is batches of a step",
})  # fmt: skip

COMMANDS: dict[str, dict[str, str]] = {
    _LAUNCH: _by_word({
        "status top ps list ls": "ps-runs list shows the runs, and ps-runs ui a page",
        "serve server": "ps-launch FILE.yaml --serve replies to requests beside a run; ps-serve and ps-server are "
                        "programs of their own",
        "run train start exec submit": "ps-launch needs no command: ps-launch -n 4 train.py, or ps-launch FILE.yaml",
        "ui web dashboard": "ps-runs ui serves the dashboard of all runs, and ps-launch FILE.yaml --web that of one",
        "stop kill cancel": "Ctrl-C, or SIGTERM to ps-launch, ends a run in good order",
        "resume continue": _RESUME,
        "logs log show compare": "ps-runs show last shows a run; ps-runs compare, several",
        "sim simulate": "ps-sim simulates a run",
        "bench benchmark": "ps-bench measures",
        "certs cert": "ps-certs init makes certificates and a token",
        "help": "ps-launch --help",
    }),
    "ps-runs": _by_word({
        "rm remove del prune": "ps-runs delete RUN",
        "serve web dashboard server": "ps-runs ui serves the dashboard with all runs",
        "ls status runs ps": "ps-runs list",
        "info describe cat view get": "ps-runs show RUN",
        "diff": "ps-runs compare RUN RUN",
        "graph chart": "ps-runs plot RUN",
        "rename name label": "ps-runs tag RUN NAME",
        "dump csv download": "ps-runs export RUN",
    }),
    _SERVE: _by_word({"infer start run": "ps-serve needs no command: ps-serve --run last"}),
}  # fmt: skip

# Names of a family, by its noun.
NAMES: dict[str, dict[str, str]] = {
    "mode": _by_word({
        "ddp allgather ring horovod nccl gloo all-reduce all_reduce":
            "--mode allreduce averages gradients among workers, as DDP does; --mode sync by the server",
        "fsdp zero deepspeed": "--mode allreduce --zero 1 shards the optimizer among workers; --group G --zero 3 "
                               "shards the model within a worker",
        "hogwild downpour": "--mode async",
        "fedavg local_sgd local-sgd postlocal federated": "--mode localsgd",
        "bounded stale": "--mode ssp",
        "pipeline pp": "--pipeline --group G, with a mode for the workers",
        "ps parameter-server": "--mode sync or async",
    }),
    "codec": _by_word({
        "none fp32 float32 off": "the codec raw sends what is there",
        "4bit int4": "q4", "8bit": "int8", "2bit int2": "q2", "float16 half": "fp16",
    }),
}  # fmt: skip
RUNS = _by_word({"latest newest -1 recent": "`last` is the newest run"})

# Names of earlier versions: of a family, by its noun, and of settings.
DROPPED_NAMES = {
    "codec": {"auto": "`ps-launch doctor` measures the link and names a codec; on a slow link q4 is the first to try"}
}
_COMPENSATION = "late gradients are taken as they come; policy.late_scale and late_cut act against lateness"
_MERGE = "leave it out: the steps taken meanwhile are always added to the new weights, as by the rule shift"
DROPPED_SETTINGS = {
    "policy.late_compensation": _COMPENSATION, "policy.late_lambda": _COMPENSATION, "policy.merge": _MERGE,
    "policy.merge_alpha": _MERGE, "upstream.merge": _MERGE, "upstream.merge_alpha": _MERGE,
}  # fmt: skip

_SETTING = re.compile(r"(--)?([a-z_]+\.[a-z_.]+)=(.*)", re.DOTALL)
_HOST_PORT = re.compile(r"[\w.\[\]:-]*:\d+|\d+")


def of_flag(program: str, flag: str) -> str:
    """Returns the sentence for an unknown flag of a program, or a flag that lacks its value; "" for none."""
    if (found := _SETTING.fullmatch(flag)) is not None or "." in flag.lstrip("-"):
        return f"--set {found[2]}={found[3]}" if found else f"--set {flag.lstrip('-')}=VALUE"
    sentence = RUNS.get(flag) or FLAGS.get(flag.lstrip("-").replace("_", "-").lower(), "")
    return sentence if isinstance(sentence, str) else sentence.get(program, sentence.get(_ELSE, ""))


def of_dropped_flag(flag: str) -> str:
    """Returns the sentence for a flag of an earlier version, such as `--merge`; "" for none."""
    return DROPPED_SETTINGS.get(f"policy.{flag.removeprefix('--').replace('-', '_')}", "")


def of_word(program: str, word: str, before: str = "") -> str:
    """Returns the sentence for a word that is no command and no file; "" for none. `before`: the argument before it."""
    if _SETTING.fullmatch(word):
        return of_flag(program, word)
    if before == "--web" and _HOST_PORT.fullmatch(word):
        return f"--web takes no value; --set server.web={word if ':' in word else f'127.0.0.1:{word}'} is its address"
    if before.startswith("-") and not before.startswith("--") and len(before) > 2:  # -np 4 is not -n p
        return of_flag(program, before)
    return COMMANDS.get(program, {}).get(word.lower(), "")
