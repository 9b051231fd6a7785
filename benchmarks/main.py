"""Measure exchanges, rounds, latency, scale, steps and memory: the real programs, over loopback.

Examples

  ps-bench exchange                     100 MB up, optimizer, 100 MB down
  ps-bench exchange --baselines torch-rpc,gloo,ray,unary,iperf
  ps-bench exchange --transport direct --tls
  ps-bench exchange --sweep --max-mb 300 --plot sweep.png
  ps-bench round --workers 2 --baselines gloo,ddp
  ps-bench allreduce --sweep            among workers: by size, and in a training step
  ps-bench latency --json latency.json  a small exchange, and a bare ping-pong
  ps-bench latency --store --dashboard  also with servers that record the run, or have a dashboard
  ps-bench scale --workers 1,8,64       exchanges per second, and the server's CPU
  ps-bench dashboard                    cost of the run store, the dashboard and viewers
  ps-bench step --task digits           compute, transfer, wait and apply
  ps-bench memory --workers 1,4 --mode sync,async
  ps-bench zero                         what each worker holds, by stage of ZeRO
  ps-bench serve                        tokens, swaps of versions, and what following costs
  ps-bench pipeline                     stages beside one process and bare torch
  ps-bench shards --mb 400              a server of 1, 2 and 4 processes
  ps-bench codecs --codec int8,q4       encoding and decoding on one core
  ps-bench policies --workers 64,10000  what deciding costs, by mode
  ps-bench xor --baselines ray              worker-steps per second of a small task
  sudo ps-bench race --plot race.svg    held-out loss on a slow link, beside DDP

Tables go to standard output; --keep writes the metrics to benchmarks/results
under their date and machine. PS_... in the environment is left out: what a
benchmark measures is what its flags say.
"""

# Benchmarks are imported once the flags are checked.
from __future__ import annotations

import os
import signal
from typing import Annotated

from ..common.config.cli import Drained, make_app, run_app
from ..common.errors import UsageError, did_you_mean
from .options import (
    BaselinesOption,
    DeviceOption,
    JsonOption,
    KeepOption,
    MbOption,
    ModeOption,
    OptimizerOption,
    TransportOption,
    check_baselines,
    check_bench_device,
    check_range,
    check_task,
    check_transport,
    checked,
    fractions,
    numbers,
    of_output,
    of_run,
    of_size,
    prepare,
    quantity,
    show,
)

RunsOption = Annotated[int, of_run("--runs", min=1, help="Turns measured, after 3 to warm up.")]
FloatsOption = Annotated[int, of_size("--floats", min=1, help="Parameters of the model.")]

StoreOption = Annotated[bool, of_run("--store", help="Also with servers that record the run.")]
DashboardOption = Annotated[bool, of_run("--dashboard", help="Also with servers that have a dashboard.")]


def variants(store: bool, dashboard: bool) -> tuple[str, ...]:
    """Returns the additional variants of a server."""
    return ("store",) * store + ("dashboard",) * dashboard


app = make_app(__doc__)


@app.callback(help=__doc__)
def bench() -> None:
    pass


@app.command(help="One worker, a large model: time of an exchange, GB/s up and down, the server's time between.")
def exchange(
    mb: MbOption = 100,
    sweep: Annotated[
        bool, of_size("--sweep", help="Sizes from --min-kb to --max-mb, each four times the last.")
    ] = False,
    min_kb: Annotated[int, of_size(min=1, help="Smallest size of a sweep.")] = 4,
    max_mb: Annotated[int, of_size(min=1, help="Largest size of a sweep.")] = 1100,
    runs: RunsOption = 7,
    mode: ModeOption = "sync",
    optimizer: OptimizerOption = "sgd",
    codec: Annotated[str, of_run(help="How contributions are encoded.")] = "raw",
    transport: TransportOption = "all",
    tls: Annotated[bool, of_run("--tls", help="Over the network in TLS too.")] = False,
    store: StoreOption = False,
    dashboard: DashboardOption = False,
    device: DeviceOption = "cpu",
    baselines: BaselinesOption = None,
    plot: Annotated[str | None, of_output(metavar="FILE.png", help="Draw the sweep.")] = None,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    from ..common.registry import CODECS
    from .output.plot import check_plot

    CODECS.check(codec)
    check_transport(transport)
    names = check_baselines(baselines)
    check_plot(plot, sweep)
    check_range(min_kb, max_mb)
    check_bench_device(device)
    mode, optimizer = checked(mode, optimizer, json_path, keep)
    from .measures.exchange import ExchangeOptions, measure_exchange

    options = ExchangeOptions(
        mb, runs, mode, optimizer, codec, transport, tls, sweep, min_kb, max_mb, variants(store, dashboard), device
    )
    show(measure_exchange(options, names), json_path, keep, plot)


@app.command("round", help="Several workers: a synchronous round of a large model, until the slowest has the weights.")
def one_round(
    mb: MbOption = 100,
    workers: Annotated[int, of_run(min=1, max=64, help="Worker processes.")] = 2,
    runs: RunsOption = 7,
    mode: ModeOption = "sync",
    optimizer: OptimizerOption = "sgd",
    transport: TransportOption = "all",
    baselines: BaselinesOption = None,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    check_transport(transport)
    names = check_baselines(baselines)
    mode, optimizer = checked(mode, optimizer, json_path, keep)
    from .measures.rounds import RoundOptions, measure_round

    show(measure_round(RoundOptions(mb, workers, runs, mode, optimizer, transport), names), json_path, keep)


@app.command(
    help="Averaging among workers: by size beside Gloo and a ring's formula; a training step beside DDP's, a server's."
)
def allreduce(
    mb: MbOption = 100,
    sweep: Annotated[
        bool, of_size("--sweep", help="Sizes from --min-kb to --max-mb, each ten times the last.")
    ] = False,
    min_kb: Annotated[int, of_size(min=1, help="Smallest size of a sweep.")] = 1,
    max_mb: Annotated[int, of_size(min=1, help="Largest size of a sweep.")] = 100,
    layers: Annotated[int, of_size(min=1, help="Of the transformer.")] = 8,
    width: Annotated[int, of_size(min=16, help="Of its layers, by 16.")] = 512,
    context: Annotated[int, of_size(min=1, help="Bytes it reads of a sample.")] = 64,
    batch_size: Annotated[int, of_run(min=1, help="Samples per worker and step.")] = 2,
    workers: Annotated[int, of_run(min=2, max=64, help="Worker processes.")] = 2,
    runs: RunsOption = 7,
    baselines: BaselinesOption = "gloo,ddp",
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    names = check_baselines(baselines)
    check_range(min_kb, max_mb)
    if width % 16:
        raise UsageError(f"--width {width} is not a multiple of 16: 8 heads of pairs", fix="e.g. --width 512")
    checked("allreduce", "sgd", json_path, keep)
    from .measures.allreduce import AllreduceOptions, measure_allreduce
    from .rig.reducing import StepSize

    size = StepSize(layers, width, batch_size, context)
    show(measure_allreduce(AllreduceOptions(mb, workers, runs, size, sweep, min_kb, max_mb), names), json_path, keep)


@app.command(help="A small model: microseconds per exchange, beside a bare gRPC ping-pong of the same size.")
def latency(
    floats: FloatsOption = 203,
    exchanges: Annotated[int, of_run(min=10, help="Exchanges measured.")] = 2000,
    mode: ModeOption = "sync",
    optimizer: OptimizerOption = "sgd",
    transport: TransportOption = "all",
    store: StoreOption = False,
    dashboard: DashboardOption = False,
    baselines: BaselinesOption = None,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    check_transport(transport)
    names = check_baselines(baselines)
    mode, optimizer = checked(mode, optimizer, json_path, keep)
    from .measures.latency import LatencyOptions, measure_latency

    options = LatencyOptions(floats, exchanges, mode, optimizer, transport, variants(store, dashboard))
    show(measure_latency(options, names), json_path, keep)


@app.command(help="Many workers at once, played by few processes: exchanges per second, and the server's CPU share.")
def scale(
    workers: Annotated[str, of_run(help="How many, one after another.")] = "1,2,4,8,16,32,64",
    floats: FloatsOption = 203,
    seconds: Annotated[float, of_run(min=0.1, help="Measured for each number.")] = 4.0,
    generators: Annotated[int, of_run(min=1, max=16, help="Processes that play them.")] = 1,
    mode: ModeOption = "async",
    optimizer: OptimizerOption = "sgd",
    transport: TransportOption = "direct",
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    check_transport(transport)
    counts = numbers(workers, "--workers", most=4096)
    mode, optimizer = checked(mode, optimizer, json_path, keep)
    from .measures.scale import ScaleOptions, measure_scale

    show(measure_scale(ScaleOptions(counts, floats, seconds, generators, mode, optimizer, transport)), json_path, keep)


@app.command("dashboard", help="Measure the CPU time of a server for the run store, the dashboard and viewers.")
def watched(
    workers: Annotated[int, of_run(min=1, max=4096, help="Played by one process.")] = 64,
    viewers: Annotated[int, of_run(min=0, max=32, help="Viewers of the dashboard.")] = 4,
    per_s: Annotated[float, of_run(min=1, help="Exchanges, of all workers.")] = 640,
    floats: FloatsOption = 203,
    seconds: Annotated[float, of_run(min=0.1, help="Measured each time.")] = 10.0,
    runs: Annotated[int, of_run(min=1, help="Times, in turns.")] = 5,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    prepare(json_path, keep)
    from .measures.dashboard import DashboardOptions, measure_dashboard

    show(measure_dashboard(DashboardOptions(workers, viewers, per_s, floats, seconds, runs)), json_path, keep)


@app.command(help="A step of a real task: compute, transfer, wait and apply, beside what bandwidth alone predicts.")
def step(
    task: Annotated[str, of_run(help="A built-in task, or FILE.py:NAME.")] = "digits",
    workers: Annotated[int, of_run(min=1, max=64, help="Worker processes.")] = 2,
    steps: Annotated[int, of_run(min=2, help="Steps of each worker.")] = 50,
    batch_size: Annotated[int, of_run(min=1, help="Samples per worker and step.")] = 32,
    mode: ModeOption = "sync",
    optimizer: OptimizerOption = "sgd",
    transport: TransportOption = "direct",
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    check_transport(transport)
    task = check_task(task)
    mode, optimizer = checked(mode, optimizer, json_path, keep)
    from .measures.step import StepOptions, measure_step

    show(measure_step(StepOptions(task, workers, steps, batch_size, mode, optimizer, transport)), json_path, keep)


@app.command(help="ps-serve: tokens/s with and without a cache, versions that change under load, what following costs.")
def serve(
    parts: Annotated[str, of_run(help="speed,swaps,training,equal")] = "speed,swaps,training,equal",
    tokens: Annotated[int, of_size(min=16, max=4096, help="Of a reply.")] = 512,
    clients: Annotated[int, of_run(min=2, max=32, help="At once.")] = 8,
    swaps: Annotated[int, of_run(min=1, help="Versions that are swapped.")] = 100,
    mb: MbOption = 100,
    seconds: Annotated[float, of_run(min=1, help="Of each turn without swaps.")] = 30,
    prompts: Annotated[int, of_run(min=1, help="Compared with and without a cache.")] = 200,
    runs: Annotated[int, of_run(min=1, help="Turns.")] = 5,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    known, chosen = ("speed", "swaps", "training", "equal"), tuple(parts.split(","))
    if unknown := [part for part in chosen if part not in known]:
        raise UsageError(f"--parts: '{unknown[0]}' is no part", fix=f"--parts {','.join(known)}")
    checked("async", "sgd", json_path, keep)
    from .measures.serving import ServingOptions, measure_serving

    show(measure_serving(ServingOptions(chosen, tokens, clients, swaps, mb, seconds, prompts, runs)), json_path, keep)


@app.command(help="A server of one and of several shards: time of a step, and what each shard holds.")
def shards(
    mb: MbOption = 400,
    shards: Annotated[str, of_run(help="Server processes, e.g. 1,2,4.")] = "1,2,4",
    workers: Annotated[str, of_run(help="Worker processes, e.g. 1,2,4.")] = "1,2,4",
    mode: Annotated[str, of_run("--mode", help="e.g. sync,async")] = "sync,async",
    optimizer: OptimizerOption = "sgd",
    transport: Annotated[str, of_run(help="grpc, direct or shared")] = "direct",
    runs: RunsOption = 5,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    check_transport(transport)
    sizes, counts = numbers(shards, "--shards", most=64), numbers(workers, "--workers", most=64)
    modes = [checked(part, optimizer, json_path, keep)[0] for part in mode.split(",")]
    from .measures.shards import ShardOptions, measure_shards

    options = ShardOptions(mb, tuple(sizes), tuple(counts), tuple(modes), optimizer, runs, transport)
    show(measure_shards(options), json_path, keep)


@app.command(help="The server's peak memory beside what it has to hold, and the worker's beside a bare one.")
def memory(
    mb: MbOption = 100,
    workers: Annotated[str, of_run(help="Worker processes, e.g. 1,4,16.")] = "4",
    mode: Annotated[str, of_run("--mode", help="e.g. sync,async,ssp,localsgd")] = "sync",
    optimizer: OptimizerOption = "adam",
    transport: TransportOption = "all",
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    from ..common.registry import canonical_mode

    counts = numbers(workers, "--workers", most=64)
    modes = [canonical_mode(part) for part in mode.split(",")]
    check_transport(transport)
    _, optimizer = checked(modes[0], optimizer, json_path, keep)
    from .measures.memory_use.memory import MemoryOptions, measure_memory

    show(measure_memory(MemoryOptions(mb, counts, modes, optimizer, transport)), json_path, keep)


@app.command(help="What each process holds of a model that Adam trains, by stage of ZeRO, beside 1/N.")
def zero(
    mb: MbOption = 40,
    workers: Annotated[str, of_run(help="Processes, e.g. 1,2,4.")] = "1,2,4",
    stages: Annotated[str, of_run(help="0,1: of allreduce; 3: in one worker.")] = "0,1,3",
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    counts, chosen = numbers(workers, "--workers", most=64), stages.split(",")
    if unknown := sorted({*chosen} - {"0", "1", "3"}):
        raise UsageError(f"--stages: '{unknown[0]}' is no stage", fix="--stages 0,1,3")
    checked("sync", "adam", json_path, keep)
    from .measures.memory_use.zero import ZeroOptions, measure_zero

    show(measure_zero(ZeroOptions(mb, counts, [int(item) for item in chosen])), json_path, keep)


@app.command(help="Stages of a pipeline: a step beside one process and bare torch, and a stage that is killed.")
def pipeline(
    parts: Annotated[str, of_run(help="One or both.")] = "speed,faults",
    width: Annotated[int, of_size(min=1, help="Of a layer, in speed.")] = 1024,
    layers: Annotated[int, of_size(min=2, help="An even number.")] = 8,
    batch_size: Annotated[int, of_size(min=1, help="In speed.")] = 128,
    microbatches: Annotated[int, of_size(min=2, help="That divide the batch.")] = 8,
    schedule: Annotated[str, of_run(help="1F1B or GPipe, in speed.")] = "1F1B",
    runs: RunsOption = 15,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    from .measures.pipeline import PARTS, SCHEDULES, PipelineOptions, measure_pipeline

    chosen = parts.split(",")
    if unknown := sorted({*chosen} - {*PARTS}):
        raise UsageError(f"--parts: this benchmark has no part '{unknown[0]}'", fix=f"--parts {','.join(PARTS)}")
    if batch_size % microbatches or layers % 2:
        raise UsageError(f"{batch_size} samples or {layers} layers are not divided evenly", fix="--layers 8")
    if schedule not in SCHEDULES:
        raise UsageError(
            f"--schedule: this benchmark has no schedule '{schedule}'", fix=f"--schedule {' or '.join(SCHEDULES)}"
        )
    checked("sync", "adam", json_path, keep)
    options = PipelineOptions(chosen, width, layers, batch_size, microbatches, schedule, runs)
    show(measure_pipeline(options), json_path, keep)


@app.command(help="The same training with and without snapshots: by how much they slow it down.")
def checkpoint(
    mb: MbOption = 500,
    every: Annotated[float, of_run(min=0.1, help="Seconds between snapshots.")] = 10.0,
    compute_ms: Annotated[float, of_run(min=0, help="Computing in a step.")] = 200.0,
    steps: Annotated[int, of_run(min=10, help="Steps of a run.")] = 100,
    runs: Annotated[int, of_run(min=1, help="Runs of each, in turns.")] = 2,
    optimizer: OptimizerOption = "sgd",
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    _, optimizer = checked("sync", optimizer, json_path, keep)
    from .measures.checkpoint import CheckpointOptions, measure_checkpoint

    show(measure_checkpoint(CheckpointOptions(mb, every, compute_ms, steps, runs, optimizer)), json_path, keep)


@app.command(help="Codecs alone, on one core: GB/s encoded and decoded, and on links up to which speed that pays.")
def codecs(
    codec: Annotated[str, of_run(help="e.g. int8,q4; all")] = "all",
    mb: MbOption = 100,
    runs: RunsOption = 7,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    from ..common.registry import CODECS

    names = CODECS.names() if codec == "all" else [CODECS.check(part) for part in codec.split(",")]
    prepare(json_path, keep)
    from .measures.in_process.codecs import CodecOptions, measure_codecs

    show(measure_codecs(CodecOptions(names, mb, runs)), json_path, keep)


@app.command(help="Deciding alone: microseconds of the run and the mode's policy for an event, without network.")
def policies(
    workers: Annotated[str, of_run(help="How many, e.g. 1,64,10000.")] = "1,64,1000,10000",
    contributions: Annotated[int, of_run(min=1, help="Measured at least, of all together.")] = 20_000,
    mode: Annotated[str | None, of_run("--mode", help="e.g. sync,async; all")] = None,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    from ..common.registry import MODES, canonical_mode

    counts = numbers(workers, "--workers", most=100_000)
    modes = [canonical_mode(part) for part in mode.split(",")] if mode else MODES.names()
    prepare(json_path, keep)
    from .measures.in_process.policies import PolicyOptions, measure_policies

    show(measure_policies(PolicyOptions(modes, counts, contributions)), json_path, keep)


@app.command(help="A task too small for its arithmetic to matter: worker-steps per second of whole runs.")
def xor(
    workers: Annotated[int, of_run(min=1, max=64, help="Worker processes.")] = 4,
    steps: Annotated[int, of_run(min=2, help="Steps of each worker.")] = 300,
    runs: Annotated[int, of_run(min=1, help="Runs of each, in turns.")] = 3,
    batch_size: Annotated[int, of_run(min=1, help="Samples per worker and step.")] = 32,
    mode: ModeOption = "async",
    optimizer: OptimizerOption = "adam",
    baselines: BaselinesOption = None,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    names = check_baselines(baselines)
    mode, optimizer = checked(mode, optimizer, json_path, keep)
    from .measures.xor import XorOptions, measure_xor

    show(measure_xor(XorOptions(workers, steps, runs, batch_size, mode, optimizer), names), json_path, keep)


@app.command(help="A training on slow links by our modes and by baselines: held-out loss over time and bytes. As root.")
def race(
    bandwidth: Annotated[str, of_run(help="Of each worker's link, each way.")] = "100mbit",
    latency: Annotated[str, of_run(help="From host to host and back.")] = "20ms",
    server_bandwidth: Annotated[
        str | None, of_run(help="The server gets a separate host, with this link; 0: unlimited.")
    ] = None,
    shards: Annotated[int, of_run(min=0, max=16, help="Of a server on the workers' hosts; 0: one on each.")] = 0,
    workers: Annotated[int, of_run(min=2, max=16, help="Worker processes.")] = 2,
    unequal: Annotated[bool, of_run("--unequal", help="The last worker is three times slower.")] = False,
    regions: Annotated[int, of_run(min=0, max=8, help="Hosts that the workers share, each a region.")] = 0,
    seconds: Annotated[float, of_run(min=5, max=86_400, help="Of each run.")] = 120,
    lr: Annotated[str, of_run(help="Tried by every side.")] = "0.001,0.002,0.004",
    seeds: Annotated[int, of_run(min=1, max=100, help="Runs with the best rate.")] = 3,
    quick: Annotated[bool, of_run("--quick", help="The middle rate and one seed.")] = False,
    target: Annotated[float | None, of_run(min=0, help="Held-out loss; none: plain DDP's best.")] = None,
    mode: Annotated[str, of_run("--mode", help="Ours, e.g. sync,diloco-q4.")] = "all",
    peers: BaselinesOption = "ddp,ddp-bf16,ddp-powersgd,ddp-localsgd,torchft,hivemind",
    resume: Annotated[
        str | None, of_run(metavar="FILE", help="Keep each run there; go on with an interrupted race.")
    ] = None,
    plot: Annotated[str | None, of_output(metavar="FILE.svg|png", help="Draw the curves.")] = None,
    json_path: JsonOption = None,
    keep: KeepOption = False,
) -> None:
    from .output.plot import check_plot

    names, rates = check_baselines(peers), fractions(lr, "--lr")
    check_plot(plot, sweep=True, suffixes=(".svg", ".png"))
    mbit = {"mbit": 1.0, "kbit": 1e-3, "gbit": 1e3}
    rate, ping = quantity(bandwidth, "--bandwidth", mbit, "100mbit"), quantity(latency, "--latency", {"ms": 1}, "20ms")
    server_rate = None
    if server_bandwidth is not None:
        server_rate = 0.0
        if server_bandwidth != "0":
            server_rate = quantity(server_bandwidth, "--server-bandwidth", mbit, "1gbit")
    if shards > workers or (shards > 1 and server_rate is not None):
        raise UsageError(
            f"--shards {shards}: at most one on each worker's host", fix=f"--shards {workers}, or leave it out"
        )
    if min(rate, server_rate or 1) < 1:
        raise UsageError("a link below 1 Mbit/s carries not one exchange in these seconds", fix="--bandwidth 10mbit")
    checked("sync", "adamw", json_path, keep)
    from .measures.race import FLAT_BESIDE_REGIONS, OF_REGIONS, OURS, RaceOptions, measure_race
    from .rig.links import check_links

    everything = (*FLAT_BESIDE_REGIONS, *OF_REGIONS) if regions else [name for name in OURS if name not in OF_REGIONS]
    if regions:
        names, server_rate = [], server_rate or 0.0
        if workers % regions:
            raise UsageError(f"--regions {regions} and --workers {workers}: not equal", fix=f"--workers {2 * regions}")
    modes = tuple(everything) if mode == "all" else tuple(dict.fromkeys(part.strip() for part in mode.split(",")))
    for name in modes:
        if name not in OURS:
            raise UsageError(f"--mode: no side of a race is '{name}'", fix=did_you_mean(name, OURS))
    check_links()
    if quick:
        rates, seeds = rates[len(rates) // 2 :][:1], 1
    num_shards = 1 if server_rate is not None else shards or workers
    options = RaceOptions(
        rate, server_rate, ping, workers, seconds, rates, seeds, unequal, target, modes, num_shards, resume, regions
    )
    show(measure_race(options, names), json_path, keep, plot)


def _drain(*_: object) -> None:
    raise Drained  # so that every server is stopped on the way out


def main() -> None:
    """Entry point of `ps-bench`."""
    signal.signal(signal.SIGTERM, _drain)
    os.environ.setdefault("PS_OUTPUT__STORE", "false")  # true: what keeping the runs costs
    run_app(app, "ps-bench")


if __name__ == "__main__":
    main()
