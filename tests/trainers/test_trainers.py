"""Every trainer in every mode, through the same cases; in sync each ends in the weights of one plain process."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
import torch

from ..forks import Forked, Programs
from .programs.problem import CASES, SAMPLES, WORKERS, Model, loss_of, reference

TRAINERS = ("plain", "on_lightning", "on_huggingface", "on_accelerate")
COUNTING = ("on_lightning", "on_huggingface")  # these count steps themselves, and another worker's too
MODES = {"sync": (), "async": (), "ssp": (), "localsgd": ("--local-steps", "2")}
ALONE = [case for case in CASES if not {"first", "again", "back"} & set(case.split("-"))]
ALL = [
    (trainer, mode, case)
    for trainer in TRAINERS
    for mode in MODES
    for case in ALONE
    if case != "mid" or trainer == "on_huggingface"  # only this trainer goes on in the middle of an epoch
]


def is_short(trainer: str, mode: str, case: str) -> bool:
    """In make test-slow too."""
    return trainer != "plain" and (mode == "sync" or (mode, case) == ("localsgd", "plain"))


class Run:
    """A case by two workers and their server."""

    def __init__(self, forks: Programs, folder: Path, trainer: str, mode: str) -> None:
        self._forks, self._folder, self._trainer, self._mode = forks, folder, trainer, mode
        self.address, self.has_rounds = "", mode in ("sync", "localsgd")

    def server(self, name: str, *more: str, listen: str = "127.0.0.1:0") -> Forked:
        case = CASES[name]
        flags = ("--mode", self._mode, "--workers", str(WORKERS), *MODES[self._mode], *more)
        if case.steps:
            flags += ("--steps", str(case.steps))
        if case.clip and self._mode == "sync":
            flags += ("--clip-norm", str(case.clip))
        program = self._forks["paramserver.ps.main"]
        server = program.fork(f"server-{name}", self._folder, "--listen", listen, *flags)
        self.address = server.event("listening")["address"]
        return server

    def worker(self, name: str, rank: int, **environ: str) -> Forked:
        variables = {"PS_SERVER": self.address, "PS_WORKER__RANK": str(rank), **environ}
        argv = (str(self._folder), str(rank), self._mode, name)
        return self._forks[self._trainer].fork(f"{name}-{rank}", self._folder, *argv, **variables)

    def play(self, name: str, *more: str) -> list[dict]:
        """What the workers have in the end."""
        server = self.server(name, *more)
        everyone = [*(self.worker(name, rank) for rank in range(WORKERS)), server]
        return self.ended(everyone, [name] * WORKERS)

    def ended(self, everyone: list[Forked], names: list[str]) -> list[dict]:
        text = ""
        for forked in everyone:  # the server last: it waits for those that have failed
            code = forked.wait()
            lines = [line[:300] for line in forked.output.splitlines() if '"status"' not in line]
            text += f"== {forked.name}: code {code}\n" + "\n".join(lines[-12:]) + "\n"
            assert code == 0, text
            assert forked.name.startswith("server") or "Traceback" not in forked.output, text
        return [torch.load(self._folder / f"{name}.{rank}.pt") for rank, name in enumerate(names)]


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("trainer", "mode", "case"),
    [pytest.param(*item, marks=[pytest.mark.slow] if is_short(*item) else []) for item in ALL],
)
def test_a_trainer(forks: Programs, tmp_path: Path, trainer: str, mode: str, case: str):
    run = Run(forks, tmp_path, trainer, mode)
    more: tuple[str, ...] = ()
    if case in ("resume", "cold", "behind", "mid"):
        if case == "resume":
            more = ("--checkpoint-dir", str(tmp_path / "snapshots"))
        run.play("first-mid" if case == "mid" else "first", *more)
    if CASES[case].dies_before:
        ranks = killed(run, case)
    else:
        ranks = run.play(case, *more)
    check(mode, case, ranks)
    if mode == "sync" and (not CASES[case].dies_before or trainer in COUNTING):
        num_steps = CASES[case].num_steps
        assert [rank["steps"] for rank in ranks] == [num_steps] * WORKERS


@pytest.mark.trainers
@pytest.mark.parametrize("mode", ["sync", "localsgd"])
@pytest.mark.parametrize("trainer", TRAINERS[1:])
def test_a_trainer_whose_server_went_back_ends_and_begins_again_where_the_run_is(
    forks: Programs, tmp_path: Path, trainer: str, mode: str
):
    """It cannot go back, so its next batches would be others than those of the run's steps."""
    run, snapshots = Run(forks, tmp_path, trainer, mode), str(tmp_path / "snapshots")
    flags = ("--checkpoint-dir", snapshots, "--checkpoint-every", "2", "--set", "policy.min_workers=2")
    first = run.server("back", *flags)
    ranks = [run.worker("back", rank) for rank in range(WORKERS)]
    first.until(lambda: (tmp_path / "at").exists(), "rank 1 waits in its sixth batch")
    first.signal(signal.SIGKILL)
    first.wait()
    again = run.server("back-again", *flags, listen=run.address)
    (tmp_path / "back").touch()
    for item in ranks:
        assert item.wait() == 1, item.output
        assert "start this worker again" in item.output and "Traceback" not in item.output
    ranks = [run.worker("back-again", rank) for rank in range(WORKERS)]
    check(mode, "back-again", run.ended([*ranks, again], ["back-again"] * WORKERS))


@pytest.mark.trainers
@pytest.mark.parametrize("trainer", ["on_accelerate", "on_huggingface"])
def test_a_process_group_beside_the_run_is_refused(forks: Programs, tmp_path: Path, trainer: str):
    """As torchrun and `accelerate launch` make one: gradients would be averaged twice, and parameters move."""
    run = Run(forks, tmp_path, trainer, "sync")
    server = run.server("plain")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [run.worker("plain", rank, RANK=str(rank), LOCAL_RANK=str(rank), **group) for rank in range(WORKERS)]
    for item in ranks:
        assert item.wait() == 2, item.output
        assert "a group of 2 processes of its own" in item.output and "Traceback" not in item.output
    server.signal(signal.SIGTERM)


def killed(run: Run, name: str) -> list[dict]:
    """Worker 1 is killed in the middle of a step; another one takes its place."""
    waits = ("policy.min_workers=2",) if run.has_rounds else ("server.absent_s=30",)  # for the one that is to come
    server = run.server(name, "--set", *waits)
    ranks = [run.worker(name, rank) for rank in range(WORKERS)]
    assert ranks[1].wait() == -signal.SIGKILL, ranks[1].output
    return run.ended([ranks[0], run.worker(f"{name}-again", 1), server], [name, f"{name}-again"])


def check(mode: str, name: str, ranks: list[dict]) -> None:
    case, found = CASES[name], ranks[0]["weights"]
    for key in found:
        assert torch.equal(found[key], ranks[1]["weights"][key]), "both have the final weights"
    if case.shuffle:
        assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == list(range(SAMPLES))
        assert ranks[0]["seen"] != sorted(ranks[0]["seen"])
    elif mode == "sync":
        wanted = reference(case)
        for key, tensor in wanted.items():
            near = {"rtol": 0.05, "atol": 2e-3} if case.bf16 else {"rtol": 1e-7, "atol": 1e-9}
            assert torch.allclose(found[key], tensor, **near), (key, (found[key] - tensor).abs().max())
    elif not case.bf16:
        assert loss_of(found) < 0.95 * loss_of(Model(case).state_dict())
