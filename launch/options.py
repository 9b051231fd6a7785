"""The flags of ps-launch and its help text. Nothing but Typer is imported: --help is at once."""

from __future__ import annotations

from typing import Annotated

import typer

HELP = """\b
Start a server and N workers, watch them, and end them together.

[bold]Examples[/bold]

  ps-launch configs/digits.yaml                    what the file says
  ps-launch configs/digits.yaml -n 4 --mode sync   flags win over the file
  ps-launch configs/digits.yaml --mode single,sync,async,ssp,localsgd
                                                   one after another, compared
  ps-launch -n 4 --script train.py -- --epochs 3   your own script, 4 times
  ps-launch configs/digits.yaml --checkpoint-dir D once more: goes on where it was
  ps-launch configs/digits.yaml --hosts hosts.yaml on the machines of that file
  ps-launch configs/digits.yaml --dry-run          only show the commands

What processes say goes to standard error, results to standard output.
Ctrl-C lets the processes end in good order, a second one kills them.
A worker that crashes or is killed is started again, and so is a server that
keeps snapshots (--checkpoint-dir). The exit code is that of the process whose
failure ended the job; 17 when it had been started again too often, 130 after
Ctrl-C, 143 after SIGTERM.
"""

_RUN, _MODE, _OPT, _OUT, _LAUNCH = "Run", "Synchronisation", "Optimizer", "Output", "Launcher"
_KEEP, _SECURITY, _HOSTS = "Snapshots and restarts", "Security", "Shards and hosts"

ConfigArgument = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.", show_default=False)
]
WorkersOption = Annotated[
    int | None, typer.Option("-n", "--workers", help="Number of workers; default 2.", rich_help_panel=_RUN)
]
TaskOption = Annotated[
    str | None,
    typer.Option("--task", metavar="NAME|FILE.py:NAME", help="Model, data and loss to train.", rich_help_panel=_RUN),
]
ScriptOption = Annotated[
    str | None,
    typer.Option(
        "--script",
        metavar="FILE.py",
        help="Run your own script as each worker; its arguments follow --.",
        rich_help_panel=_RUN,
    ),
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Training steps per worker.", rich_help_panel=_RUN)]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", help="Samples per worker and step.", rich_help_panel=_RUN)
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Initial weights and data order.", rich_help_panel=_RUN)]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="auto|cpu|cuda[:I]", help="Where workers compute.", rich_help_panel=_RUN),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="MODE[,MODE...]",
        help="sync, async, ssp, localsgd; or single: one worker alone on the union batch. "
        "Several run one after another and are compared.",
        rich_help_panel=_MODE,
    ),
]
StalenessOption = Annotated[
    int | None,
    typer.Option(
        "--staleness",
        help="ssp: how far ahead of the slowest a worker may start a step.",
        rich_help_panel=_MODE,
    ),
]
LocalStepsOption = Annotated[
    int | None,
    typer.Option("--local-steps", help="localsgd: steps between two averages.", rich_help_panel=_MODE),
]
PipelinedOption = Annotated[
    bool | None,
    typer.Option(
        "--pipelined",
        help="async, ssp, localsgd: compute the next step while the exchange is in flight.",
        rich_help_panel=_MODE,
    ),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="NAME", help="sgd, adam, adamw, ... of torch.optim.", rich_help_panel=_OPT),
]
LrOption = Annotated[float | None, typer.Option("--lr", help="Learning rate.", rich_help_panel=_OPT)]
CheckpointDirOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-dir",
        metavar="DIR",
        help="Keep snapshots there, and go on from the newest; with several modes DIR-MODE each.",
        rich_help_panel=_KEEP,
    ),
]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        metavar="STEPS",
        help="Steps between two snapshots; default one every 30 s.",
        rich_help_panel=_KEEP,
    ),
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="latest|never|PATH",
        help="latest: there must be a snapshot; never: begin anew; or from this snapshot.",
        rich_help_panel=_KEEP,
    ),
]
MaxRestartsOption = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        metavar="N",
        help="How often each process is started again; default 3. 0: its first failure ends the job.",
        rich_help_panel=_KEEP,
    ),
]
SaveOption = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar="FILE.safetensors",
        help="Final weights; with several modes FILE-MODE.safetensors each.",
        rich_help_panel=_OUT,
    ),
]
SummaryOption = Annotated[
    str | None,
    typer.Option("--summary", metavar="FILE.json", help="Results as JSON.", rich_help_panel=_OUT),
]
HistoryOption = Annotated[
    str | None,
    typer.Option(
        "--history",
        metavar="FILE.jsonl",
        help="What was applied when; with several modes FILE-MODE.jsonl each.",
        rich_help_panel=_OUT,
    ),
]
LogFormatOption = Annotated[
    str | None,
    typer.Option("--log-format", metavar="text|json", help="How lines are shown.", rich_help_panel=_OUT),
]
CaOption = Annotated[
    str | None,
    typer.Option(
        "--ca", metavar="FILE.pem", help="Certificates the other side's must be signed by.", rich_help_panel=_SECURITY
    ),
]
CertOption = Annotated[
    str | None,
    typer.Option("--cert", metavar="FILE.pem", help="The server's certificate: TLS.", rich_help_panel=_SECURITY),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="FILE.pem", help="The key of --cert.", rich_help_panel=_SECURITY)
]
TokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The token all processes share; or PS_TOKEN in the environment.",
        rich_help_panel=_SECURITY,
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option("--port", help="Port of the server; default a free one.", rich_help_panel=_LAUNCH),
]
ShardsOption = Annotated[
    int | None,
    typer.Option("--shards", metavar="S", help="Servers the model is divided among.", rich_help_panel=_HOSTS),
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts", metavar="FILE.yaml", help="Machines to use, over ssh; see docs/remote.md.", rich_help_panel=_HOSTS
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help="local, ssh, slurm; --hosts means ssh.", rich_help_panel=_HOSTS),
]
ColocateOption = Annotated[
    bool | None,
    typer.Option("--colocate", help="Each host with workers carries one server shard.", rich_help_panel=_HOSTS),
]
SyncCodeOption = Annotated[
    bool | None,
    typer.Option("--sync-code", help="Copy the task file or script to the hosts first.", rich_help_panel=_HOSTS),
]
InsecureOption = Annotated[
    bool | None,
    typer.Option(
        "--insecure", help="Servers may listen to other machines without TLS and token.", rich_help_panel=_SECURITY
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set any key; repeatable.", rich_help_panel=_LAUNCH),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be started, then stop.", rich_help_panel=_LAUNCH)
]
PrintConfigOption = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Show every setting and where it comes from, then stop.",
        rich_help_panel=_LAUNCH,
    ),
]
ScriptArgOption = Annotated[list[str] | None, typer.Option("--script-arg", hidden=True)]


def fold_script_arguments(arguments: list[str]) -> list[str]:
    """`--script F -- A B` as `--script F --script-arg=A --script-arg=B`.

    Otherwise the first word after -- would be taken for the CONFIG when that is left out.
    """
    if "--" not in arguments:
        return arguments
    cut = arguments.index("--")
    return arguments[:cut] + [f"--script-arg={argument}" for argument in arguments[cut + 1 :]]
