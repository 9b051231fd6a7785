"""Words that other tools use, each with the sentence that names ours. Pure.

They are looked up only when a word is unknown here, so a word of ours is never taken from its program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAUNCH, _SERVER, _WORKER, _SERVE, _SIM = "ps-launch", "ps-server", "ps-worker", "ps-serve", "ps-sim"
_ELSE = ""  # every other program

_NUM_WORKERS = {
    _WORKER: "a ps-worker is one worker, with its --rank R; ps-launch -n N starts N of them",
    _ELSE: "-n N is the number of workers",
}
_ON_DEVICES = {
    _LAUNCH: "-n N is the number of workers; each takes its own GPU, or the one that --device names",
    _ELSE: "ps-worker --device cuda:I names the GPU of a worker",
}
_DASHBOARD = {
    _LAUNCH: "--web serves the dashboard and prints its address",
    _SERVER: "--web HOST:PORT serves the dashboard",
    _ELSE: "ps-launch --web serves the dashboard of a run, and ps-runs ui that of all runs",
}
_METRICS = {
    _LAUNCH: "--set server.metrics=127.0.0.1:9090 lets Prometheus read metrics there",
    _ELSE: "ps-server --metrics HOST:PORT lets Prometheus read metrics there",
}
_ADDRESS = {
    _SERVER: "--listen HOST:PORT is the address of the server",
    _WORKER: "--server HOST:PORT is the address of the server",
    _LAUNCH: "--port P is the server's port here; --hosts FILE.yaml names other machines",
    _ELSE: "--listen HOST:PORT is the address",
}
_CONFIG = {_LAUNCH: "the file needs no flag: ps-launch FILE.yaml"}
_SCRIPT = "ps-launch -n N train.py runs a script with its own arguments"
_TASK = "--task NAME or --task FILE.py:NAME is model and data together; a script has its own: ps-launch train.py"
_TRACKER = "--track NAME,... names trackers: tensorboard, wandb, mlflow"
_SNAPSHOTS = "--checkpoint-dir DIR is the folder of snapshots; --save FILE.safetensors is for the final weights"
_RESUME = "--checkpoint-dir DIR continues from its newest snapshot; --resume names another: latest, never or PATH"
_LOG = {_LAUNCH: "--log-format json is for programs; --set log.level=debug shows more",
        _ELSE: "--set log.level=debug shows more"}  # fmt: skip

Sentence = str | Mapping[str, str]  # the same for every program, or for each

FLAGS: dict[str, Sentence] = {
    **dict.fromkeys(("nproc-per-node", "np", "nproc", "num-workers", "num-processes", "nprocs", "world-size",
                     "num-nodes", "nnodes", "procs", "processes", "replicas", "n-workers"), _NUM_WORKERS),
    **dict.fromkeys(("gpus", "gpu", "gpu-ids", "num-gpus", "gpus-per-node", "devices", "accelerator", "cuda"),
                    _ON_DEVICES),
    **dict.fromkeys(("dashboard", "ui", "monitor", "web-ui"), _DASHBOARD),
    **dict.fromkeys(("metrics", "prometheus", "metrics-port"), _METRICS),
    **dict.fromkeys(("port", "host", "address", "addr", "bind", "master-addr", "master-port", "rdzv-endpoint",
                     "server-address"), _ADDRESS),
    **dict.fromkeys(("config", "config-file", "cfg", "conf"), _CONFIG),
    **dict.fromkeys(("module", "file", "entrypoint", "program"), _SCRIPT),
    **dict.fromkeys(("model", "dataset", "data", "data-dir"), _TASK),
    **dict.fromkeys(("wandb", "tensorboard", "mlflow", "tracker", "report-to", "logger", "use-wandb"), _TRACKER),
    **dict.fromkeys(("checkpoint", "checkpoints", "ckpt", "ckpt-dir", "snapshot-dir", "output-dir", "save-dir",
                     "save-every", "output"), _SNAPSHOTS),
    **dict.fromkeys(("resume-from", "resume-from-checkpoint", "continue", "restore", "load", "resume"), _RESUME),
    **dict.fromkeys(("verbose", "debug", "quiet", "log-level", "loglevel"), _LOG),
    **dict.fromkeys(("learning-rate", "rate"), "--lr RATE is the learning rate"),
    **dict.fromkeys(("batch", "bs", "per-device-batch-size", "train-batch-size"), "--batch-size N is of each worker"),
    **dict.fromkeys(("iterations", "iters", "max-steps", "num-steps"), "--steps N is the length of the run"),
    **dict.fromkeys(("num-epochs", "max-epochs", "num-train-epochs"), "--epochs N is the length of the run"),
    **dict.fromkeys(("hostfile", "machinefile", "nodes", "machines"), "--hosts FILE.yaml names the machines"),
    **dict.fromkeys(("strategy", "algorithm", "sync-mode", "ddp", "sync", "async"), "--mode MODE is how workers "
                    "synchronise: sync, async, ssp, localsgd, diloco, allreduce, ..."),
    **dict.fromkeys(("fp16", "bf16", "amp", "mixed-precision"), "--precision bf16 or fp16 is of autocast"),
    **dict.fromkeys(("compression", "codec", "quantize", "compress"), "--set worker.codec=q4 (or int8, fp16, ...) "
                    "is the codec of gradients; ps-launch doctor names one"),
    **dict.fromkeys(("max-retries", "retries"), "--max-restarts N is the number of restarts of each process"),
    **dict.fromkeys(("gradient-accumulation-steps", "accum", "accumulation"), "--accumulate N is batches of a step"),
}  # fmt: skip

COMMANDS: dict[str, dict[str, str]] = {
    _LAUNCH: {
        **dict.fromkeys(("status", "top", "ps", "list", "ls"), "ps-runs list shows the runs, and ps-runs ui a page"),
        **dict.fromkeys(("serve", "server"), "ps-launch FILE.yaml --serve replies to requests beside a run; "
                        "ps-serve and ps-server are programs of their own"),
        **dict.fromkeys(("run", "train", "start", "exec", "submit"), "ps-launch needs no command: ps-launch -n 4 "
                        "train.py, or ps-launch FILE.yaml"),
        **dict.fromkeys(("ui", "web", "dashboard"), "ps-runs ui serves the dashboard of all runs, and ps-launch "
                        "FILE.yaml --web that of one"),
        **dict.fromkeys(("stop", "kill", "cancel"), "Ctrl-C, or SIGTERM to ps-launch, ends a run in good order"),
        **dict.fromkeys(("resume", "continue"), _RESUME),
        **dict.fromkeys(("logs", "log", "show", "compare"), "ps-runs show last shows a run; ps-runs compare, several"),
        **dict.fromkeys(("sim", "simulate"), "ps-sim simulates a run"),
        **dict.fromkeys(("bench", "benchmark"), "ps-bench measures"),
        **dict.fromkeys(("certs", "cert"), "ps-certs init makes certificates and a token"),
        **dict.fromkeys(("help",), "ps-launch --help"),
    },
    "ps-runs": {
        **dict.fromkeys(("rm", "remove", "del", "prune"), "ps-runs delete RUN"),
        **dict.fromkeys(("serve", "web", "dashboard", "server"), "ps-runs ui serves the dashboard with all runs"),
        **dict.fromkeys(("ls", "status", "runs", "ps"), "ps-runs list"),
        **dict.fromkeys(("info", "describe", "cat", "view", "get"), "ps-runs show RUN"),
        **dict.fromkeys(("diff",), "ps-runs compare RUN RUN"),
        **dict.fromkeys(("graph", "chart"), "ps-runs plot RUN"),
        **dict.fromkeys(("rename", "name", "label"), "ps-runs tag RUN NAME"),
        **dict.fromkeys(("dump", "csv", "download"), "ps-runs export RUN"),
    },
    _SERVE: {**dict.fromkeys(("infer", "start", "run"), "ps-serve needs no command: ps-serve --run last")},
}  # fmt: skip

# Names of a family, by its noun.
NAMES: dict[str, dict[str, str]] = {
    "mode": {
        **dict.fromkeys(("ddp", "allgather", "ring", "horovod", "nccl", "gloo", "all-reduce", "all_reduce"),
                        "--mode allreduce averages gradients among workers, as DDP does; --mode sync by the server"),
        **dict.fromkeys(("fsdp", "zero", "deepspeed"), "--mode allreduce --zero 1 shards the optimizer among workers; "
                        "--group G --zero 3 shards the model within a worker"),
        **dict.fromkeys(("hogwild", "downpour"), "--mode async"),
        **dict.fromkeys(("fedavg", "local_sgd", "local-sgd", "postlocal", "federated"), "--mode localsgd"),
        **dict.fromkeys(("bounded", "stale"), "--mode ssp"),
        **dict.fromkeys(("pipeline", "pp"), "--pipeline --group G, with a mode for the workers"),
        **dict.fromkeys(("ps", "parameter-server"), "--mode sync or async"),
    },
    "codec": {
        **dict.fromkeys(("none", "fp32", "float32", "off"), "the codec raw sends what is there"),
        **dict.fromkeys(("4bit", "int4"), "q4"), **dict.fromkeys(("8bit",), "int8"),
        **dict.fromkeys(("2bit", "int2"), "q2"), **dict.fromkeys(("float16", "half"), "fp16"),
    },
}  # fmt: skip
RUNS = dict.fromkeys(("latest", "newest", "-1", "recent"), "`last` is the newest run")

_SETTING = re.compile(r"(--)?([a-z_]+\.[a-z_.]+)=(.*)", re.DOTALL)
_HOST_PORT = re.compile(r"[\w.\[\]:-]*:\d+|\d+")


def of_flag(program: str, flag: str) -> str:
    """Returns the sentence for an unknown flag of a program, or a flag that lacks its value; "" for none."""
    if (found := _SETTING.fullmatch(flag)) is not None or "." in flag.lstrip("-"):
        return f"--set {found[2]}={found[3]}" if found else f"--set {flag.lstrip('-')}=VALUE"
    sentence = RUNS.get(flag) or FLAGS.get(flag.lstrip("-").replace("_", "-").lower(), "")
    return sentence if isinstance(sentence, str) else sentence.get(program, sentence.get(_ELSE, ""))


def of_word(program: str, word: str, before: str = "") -> str:
    """Returns the sentence for a word that is no command and no file; "" for none. `before`: the argument before it."""
    if _SETTING.fullmatch(word):
        return of_flag(program, word)
    if before == "--web" and _HOST_PORT.fullmatch(word):
        return f"--web takes no value; --set server.web={word if ':' in word else f'127.0.0.1:{word}'} is its address"
    if before.startswith("-") and not before.startswith("--") and len(before) > 2:  # -np 4 is not -n p
        return of_flag(program, before)
    return COMMANDS.get(program, {}).get(word.lower(), "")
