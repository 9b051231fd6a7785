"""Processes of test_group.py: python group_member.py FOLDER OPTIMIZERS STEPS KILL_AT ROUNDS WAY MEMBERS...

Each round is with another of the optimizers, which are divided by commas. WAY: sums that are `small`, in `collectives`,
or in a group `apart` from words.

Here the test's files say what the server is to say: who is in the epoch. Dies by SIGKILL in step KILL_AT, between what
it tells of itself and its gradients, where it is the highest rank."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from paramserver.worker.strategies import buckets
from paramserver.worker.strategies.collectives import backends
from paramserver.worker.strategies.collectives.rendezvous import Broken, Generation, Rendezvous
from paramserver.worker.strategies.group import Group

buckets._FIRST_BYTES = buckets._BUCKET_BYTES = 100  # several of them

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


class Queued:
    """Sums by Gloo as NCCL makes them: who begins one waits for nothing, and who waits for all that its thread has
    begun does until they are made or aborted."""

    _begun = threading.local()  # as a stream of a GPU is

    def __init__(self, store, rank, size, _, timeout_s):
        at = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        self._gloo, self._is_aborted = backends.gloo(store, rank, size, at, timeout_s), threading.Event()

    def allreduce(self, tensors):
        begun = self._begun.__dict__.setdefault("sums", [])
        begun.append((self._gloo.allreduce(tensors), self._is_aborted))
        return SimpleNamespace(wait=lambda: None)

    @classmethod
    def computed(cls, _):
        for work, is_aborted in cls._begun.__dict__.pop("sums", []):
            while not (work.is_completed() or is_aborted.wait(0.001)):
                pass

    def abort(self):
        self._is_aborted.set()


def tell_of_gpus(put=setattr):
    """As where each member has a GPU: what is averaged is in a group apart, Gloo in the place of NCCL."""
    put(backends, "device_name", lambda _: f"h/cuda/{os.getpid()}-{threading.get_ident()}")
    put(backends, "nccl", Queued)
    put(backends, "computed", Queued.computed)


def batch(rank: int, step: int):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num_samples = 3 + 2 * rank + (step % 10 in (7, 8))  # others than all have said of the step before
    x = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def wait_for(path: Path) -> str:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.001)
    return path.read_text()


def dying_after(collective):
    def die(tensor):
        collective(tensor)
        os.kill(os.getpid(), signal.SIGKILL)

    return die


def main(rank, folder, optimizer, steps, kill_at, members):
    rendezvous = Rendezvous("127.0.0.1")
    temporary = folder / f"new.{rank}"
    temporary.write_text(str(rendezvous.address[1]))
    temporary.rename(folder / f"port.{rank}")

    def group(number, ranks):
        port = int(wait_for(folder / f"port.{ranks[0]}"))
        made = Group(Generation(number, tuple(ranks), ("127.0.0.1", port)), rank, rendezvous, timeout_s=20)
        made.like = list(net.parameters())
        made.order = range(len(made.like) - 1, -1, -1)
        return made

    net = model()
    inner = OPTIMIZERS[optimizer](net.parameters())
    epoch, stall = group(1, members), 0.0
    for index, parameter in enumerate(net.parameters()):
        if rank != 1:  # whose gradients leave when all are there
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: epoch.ready(index, p.grad))
    for step in range(steps):
        x, y = batch(rank, step)
        inner.zero_grad()
        if step == kill_at and rank == members[-1] and step % 2:
            epoch._begin_sum = dying_after(epoch._begin_sum)  # in the middle of backward
        torch.nn.functional.mse_loss(net(x), y).backward()
        if step == kill_at and rank == members[-1]:
            epoch._begin_sum = dying_after(epoch._begin_sum)
        is_right = rank != 0 or step % 6 != 4
        if not is_right:
            net[0].weight.grad.mul_(0.5)  # after it has left
        gradients, began = [p.grad for p in net.parameters()], time.perf_counter()
        try:
            mean = epoch.average(gradients, len(x), is_right=is_right)
        except Broken:
            members = members[:-1]
            epoch = group(2, members)
            mean = epoch.average(gradients, len(x))
            stall = time.perf_counter() - began
        for p, g in zip(net.parameters(), mean, strict=True):
            p.grad = g
        inner.step()
    settings = {"stall": stall, "weights": [p.tolist() for p in net.parameters()]}
    (folder / f"done.{rank}").write_text(json.dumps(settings))


def members_of(folder, optimizer, steps, kill_at, members):
    """Fork them all: torch is loaded once. Exit codes, in their order; minus the signal of who was killed."""
    pids = []
    for rank in members:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                main(rank, folder, optimizer, steps, kill_at, members)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    torch.set_num_threads(1)
    optimizers = sys.argv[2].split(",")
    OPTIMIZERS[optimizers[0]](model().parameters())  # loads a second's worth of torch: before the fork, once
    steps, kill_at, rounds = map(int, sys.argv[3:6])
    members = [int(text) for text in sys.argv[7:]]
    if sys.argv[6] == "apart":
        tell_of_gpus()
    if sys.argv[6] == "collectives":
        backends.MAX_SMALL_BYTES = -1
    for turn in range(rounds):
        here = Path(sys.argv[1]) / str(turn)
        here.mkdir(parents=True)
        codes = members_of(here, optimizers[turn % len(optimizers)], steps, kill_at, members)
        (here / "codes").write_text(json.dumps(codes))
