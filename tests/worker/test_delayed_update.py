"""Computing while an exchange is in flight: what the exchange sees, what the model sees, and when.

The server is a stand-in inside the exchange: the test says when a reply lands and what it holds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paramserver.common.errors import UnreachableError
from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import Outcome
from paramserver.worker.conversation import threads
from paramserver.worker.conversation.messages import Final, Outgoing
from paramserver.worker.conversation.threads import Helper, Stopped
from paramserver.worker.session import Progress
from paramserver.worker.strategies import delayed_update as pipeline
from paramserver.worker.strategies.choice import make_server_strategy
from paramserver.worker.tensors.staged import make_transfer
from paramserver.worker.tensors.transfer import ModelTensors

from ..records import contribution_of, reply_of

WORK = Outgoing(contribution_of(1, 0, 4, loss=0.5, compute_s=0.1))
DEADLINE_S = 10.0


class Net(nn.Module):
    """One parameter, one buffer, one frozen tensor, each a single float."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))


class FakeExchange:
    """An exchange whose flights land when the test lets them, each with weights of a version, or an error."""

    def __init__(self, kind: ContributionKind, steps: int = 100, local_steps: int = 1, overlap_steps: int = 0) -> None:
        self.settings = SimpleNamespace(
            kind=kind, steps=steps, delayed_update=True, fragments=1, overlap_steps=overlap_steps
        )
        self.zero = 0
        self.progress = Progress(total_steps=steps)
        self.sent: list[tuple[float, float, int]] = []  # (parameter or gradient, buffer, base version)
        self.without: list[tuple[int, ...]] = []  # positions of the parameters without a gradient
        self.threads: set[str] = set()
        self.may_land = threading.Semaphore(0)
        self.landings: list[Any] = []  # of each flight: outcome, or an exception
        self.left: list[str] = []
        self.measured: list[dict[str, Any]] = []
        self._local_steps = local_steps
        self.applied = 0

    def start(self, model: ModelTensors, optimizer: Any) -> None:
        self.model = model
        self._reply("START", 0)

    def contribute(self, outgoing: Outgoing) -> Any:
        self.threads.add(threading.current_thread().name)
        while not self.may_land.acquire(timeout=0.01):
            with threads.uninterrupted:
                pass  # what a waiting worker hears from its server
        w, _, seen = self.model.sources(self.settings.kind)
        self.sent.append((w.item(), seen.item(), self.progress.version))
        self.without.append(outgoing.contribution.payload.without_gradient)
        landing = self.landings.pop(0) if self.landings else "APPLIED"
        if isinstance(landing, BaseException):
            raise landing
        self.applied += landing == "APPLIED"
        return self._reply(landing, self.applied)

    def _reply(self, outcome: str, version: int) -> Any:
        with torch.no_grad():
            for tensor, value in zip(self.model.tensors, (100.0, 200.0, 300.0, 400.0), strict=True):
                tensor.fill_(value + version)
        left = self.settings.steps - self.applied * self._local_steps
        done = min(self.settings.steps, self.applied * self._local_steps)
        local_steps = max(0, min(self._local_steps, left))
        reply = reply_of(self.applied, version, local_steps, outcome=Outcome[outcome], training_steps=done)
        self.progress.replied(reply)
        return reply

    def finish(self) -> Final:
        self._reply("APPLIED", 50)
        return Final(version=50, is_asked=True)

    def leave(self, metrics: dict[str, float]) -> None:
        self.left.append("leave")

    def drop(self) -> None:
        self.left.append("drop")


class Bench:
    """A delayed_update worker on the fake exchange."""

    def __init__(self, kind: ContributionKind = ContributionKind.GRADIENT, **options: Any) -> None:
        self.net = Net()
        self.exchange = FakeExchange(kind, **options)
        self.delayed_update: Any = make_server_strategy(self.exchange)
        self.delayed_update.start(ModelTensors(self.net), None)

    def step(self, gradient: float = 0.0) -> None:
        """Compute: the gradient is put where the last one was; the buffer counts."""
        if self.net.w.grad is None:
            self.net.w.grad = torch.zeros(1)
        self.net.w.grad.fill_(gradient)
        self.net.seen += 1
        self.delayed_update.progress.took_step()
        self.delayed_update.contribute(WORK)

    @property
    def flight(self) -> Any:
        return self.delayed_update._flight

    def land(self) -> None:
        """Let the flight under way land, and wait until it has."""
        self.exchange.may_land.release()
        flight = self.flight
        deadline = time.monotonic() + DEADLINE_S
        while not flight.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)


# ---- gradients --------------------------------------------------------------------------------------


def test_the_exchange_sees_the_snapshot_and_the_model_gets_weights_at_the_next_step() -> None:
    bench = Bench()
    assert (bench.net.w.item(), bench.net.seen.item(), bench.net.frozen.item()) == (100.0, 300.0, 400.0)
    bench.step(1.0)
    bench.net.w.grad.fill_(99.0)  # the next backward, while the exchange has not looked yet
    bench.land()
    assert bench.exchange.sent == [(1.0, 301.0, 0)]
    assert bench.net.w.item() == 100.0, "the weights that came are taken at the next step"
    bench.step(2.0)
    assert bench.net.w.item() == 101.0
    assert bench.net.seen.item() == 301.0
    bench.land()
    bench.step(3.0)
    bench.land()
    # Step 2 was computed on version 0, step 3 on version 1; buffers as they were when each was done.
    assert bench.exchange.sent == [(1.0, 301.0, 0), (2.0, 302.0, 0), (3.0, 302.0, 1)]
    assert bench.exchange.threads == {"exchange"}


def test_memory_is_kept_and_a_missing_gradient_is_zero() -> None:
    bench = Bench()
    places = set()
    for step in range(4):
        bench.step(float(step))
        model = bench.exchange.model
        places.add(tuple(t.data_ptr() for t in [*model.sources(ContributionKind.GRADIENT), *model.tensors]))
        assert bench.exchange.model.sources(ContributionKind.GRADIENT)[1].item() == 0.0
        bench.land()
    assert bench.exchange.without == [(1,)] * 4, "so that the server does not decay it"
    assert len(places) == 1
    pointers = {tensor.data_ptr() for tensor in (bench.net.w, bench.net.seen, bench.net.w.grad)}
    assert not pointers & set(next(iter(places)))


def test_progress_counts_the_contribution_in_flight_and_the_last_one_is_waited_for() -> None:
    bench = Bench(steps=2)
    progress = bench.delayed_update.progress
    bench.step()
    assert (progress.row.seq, progress.row.steps, progress.steps_left, progress.is_done) == (1, 1, 1, False)
    bench.exchange.may_land.release(2)
    bench.step()
    assert bench.flight is None
    assert (progress.row.seq, progress.row.steps, progress.is_done) == (2, 2, True)
    assert bench.delayed_update.progress is progress, "whoever holds it sees it change"
    bench.delayed_update.finish()
    assert bench.net.w.item() == 150.0


def test_a_rejected_gradient_does_not_take_the_next_one_with_it() -> None:
    bench = Bench()
    bench.exchange.landings = ["REJECTED"]
    bench.step(float("nan"))
    bench.land()
    bench.step(2.0)
    assert bench.delayed_update.progress.row.seq == 1
    bench.land()
    assert bench.exchange.sent[1][0] == 2.0


# ---- weights ----------------------------------------------------------------------------------------


def test_deltas_are_merged_after_so_many_steps_and_an_evaluation_changes_nothing() -> None:
    bench = Bench(ContributionKind.DELTA, local_steps=3, overlap_steps=2)
    bench.net.w.data += 1.0
    for _ in range(2):
        bench.delayed_update.progress.took_step()
    bench.step()
    bench.land()
    assert bench.delayed_update.settle() == 1
    assert (bench.net.w.item(), bench.net.seen.item()) == (101.0, 301.0), "the server's"
    bench.delayed_update.measured(1, {"loss": 0.5})
    assert bench.exchange.measured[0]["version"] == 1
    assert bench.net.w.item() == 101.0
    bench.net.w.data += 4.0
    for wanted in (105.0, 101.0 + 4.0):
        bench.delayed_update.progress.took_step()
        bench.delayed_update.went_on()
        assert bench.net.w.item() == wanted
    bench.net.w.data += 2.0
    bench.step()
    bench.land()
    assert bench.exchange.sent == [(-1.0, 301.0, 0), (101.0 - (105.0 + 2.0), 302.0, 1)]
    bench.net.w.data += 8.0
    assert bench.delayed_update.settle() == 2
    assert bench.net.w.item() == 102.0
    bench.delayed_update.measured(2, {})
    assert bench.net.w.item() == 107.0 + 8.0


@pytest.mark.parametrize("kind", [ContributionKind.WEIGHTS, ContributionKind.DELTA])
@pytest.mark.parametrize(("outcome", "kept"), [("START", 0.0), ("REJECTED", 0.0), ("DROPPED", 5.0)])
def test_weights_begin_again_where_there_is_nothing_to_build_on_and_a_dropped_round_keeps_the_steps_since(
    outcome: str, kept: float, kind: ContributionKind
) -> None:
    bench = Bench(kind)
    bench.exchange.landings = [outcome]
    bench.step()
    bench.net.w.data += 5.0
    bench.land()
    bench.step()
    assert bench.net.w.item() == 100.0 + kept
    assert (bench.flight is None) is not bool(kept)


@pytest.mark.parametrize("kind", [ContributionKind.WEIGHTS, ContributionKind.DELTA])
def test_a_loop_that_ends_in_the_middle_of_a_round_says_so(kind: ContributionKind) -> None:
    bench = Bench(kind, local_steps=5)
    for _ in range(2):
        for _ in range(4):
            bench.delayed_update.progress.took_step()
        bench.step()
        bench.land()
    for _ in range(3):
        bench.delayed_update.progress.took_step()
    assert bench.delayed_update.progress.cut_short()
    assert bench.delayed_update.progress.local_steps == 3
    bench.delayed_update.contribute(WORK)
    bench.land()
    assert bench.delayed_update.progress.position == 13


@pytest.mark.parametrize("kind", [ContributionKind.WEIGHTS, ContributionKind.DELTA])
def test_a_run_that_ended_in_mid_flight_is_over_at_the_next_round(kind: ContributionKind) -> None:
    """The rounds of others count: a straggler may hear that the run is over while it computes another round."""
    bench = Bench(kind, steps=8, local_steps=2)
    bench.step()
    bench.exchange.applied = 3
    bench.land()
    bench.step()
    assert bench.delayed_update.progress.is_done
    assert bench.net.w.item() == 104.0
    assert len(bench.exchange.sent) == 1


# ---- errors, signals, the end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "go_on",
    [
        lambda bench: bench.step(),
        lambda bench: bench.delayed_update.finish(),
        lambda bench: bench.delayed_update.leave({}, is_interrupted=False),
    ],
    ids=["step", "finish", "leave"],
)
def test_an_error_of_the_flight_comes_out_on_the_training_thread(go_on: Callable[[Bench], None]) -> None:
    bench = Bench()
    bench.exchange.landings = [UnreachableError("no server")]
    bench.step()
    bench.exchange.may_land.release()
    with pytest.raises(UnreachableError, match="no server"):
        go_on(bench)
    assert bench.exchange.left == []


def test_leaving_waits_for_the_flight() -> None:
    bench = Bench()
    bench.step(1.0)
    bench.exchange.may_land.release()
    bench.delayed_update.leave({}, is_interrupted=False)
    assert len(bench.exchange.sent) == 1
    assert bench.exchange.left == ["leave"]


def test_an_interrupted_worker_does_not_wait_for_its_reply() -> None:
    bench = Bench()
    bench.step()
    bench.delayed_update.leave({}, is_interrupted=True)
    assert bench.exchange.sent == []
    assert bench.exchange.left == ["leave"]
    with pytest.raises(Stopped):
        bench.flight.result(0)


def test_an_interrupted_worker_drops_a_flight_that_reaches_no_safe_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_STOP_S", 0.05)
    bench = Bench()
    stuck = threading.Event()
    monkeypatch.setattr(bench.exchange, "contribute", lambda *_: stuck.wait(DEADLINE_S))
    bench.step()
    bench.delayed_update.leave({}, is_interrupted=True)
    assert bench.exchange.left == ["drop"]
    stuck.set()


def test_a_signal_ends_the_wait_for_a_flight_and_leaves_it_pending() -> None:
    class Ended(BaseException):
        pass

    bench = Bench()
    bench.step()
    before = signal.getsignal(signal.SIGUSR1)
    threads.install({signal.SIGUSR1: Ended})
    timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGUSR1,))
    try:
        timer.start()
        with pytest.raises(Ended):
            bench.step()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert bench.flight is not None
    bench.delayed_update.leave({}, is_interrupted=True)
    assert bench.exchange.left == ["leave"]


# ---- parts --------------------------------------------------------------------------------------------


def test_stop_reaches_only_the_thread_it_is_meant_for() -> None:
    helper = Helper()
    begun, go = threading.Event(), threading.Event()

    def job() -> None:
        with threads.uninterrupted:
            begun.set()
            assert go.wait(DEADLINE_S)

    future = helper.submit(job)
    assert begun.wait(DEADLINE_S)
    helper.stop()
    with threads.uninterrupted:
        pass  # nothing is pending here
    go.set()
    with pytest.raises(Stopped):
        future.result(DEADLINE_S)
    assert helper.submit(lambda: 7).result(DEADLINE_S) == 7


def test_a_shadow_is_a_model_to_a_transfer() -> None:
    """Tied, empty, scalar, bfloat16, channels-last: bytes are those of the model itself."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4))
    net.register_parameter("scalar", nn.Parameter(torch.tensor(3.0)))
    net.register_parameter("empty", nn.Parameter(torch.zeros(0, 2)))
    net.register_parameter("narrow", nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    model = ModelTensors(net)
    shadow = pipeline.Shadow(model)
    for kind in (ContributionKind.GRADIENT, ContributionKind.WEIGHTS):
        shadow.snapshot(kind)
        gathered = b"".join(make_transfer(model).gather(kind)[0].pieces)
        assert b"".join(make_transfer(shadow).gather(kind)[0].pieces) == gathered
    transfer = make_transfer(shadow)
    payload = bytearray(b"".join(transfer.gather(ContributionKind.WEIGHTS)[0].pieces))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for value in net.state_dict().values():
        value.zero_()
    transfer.write(0, memoryview(payload))
    transfer.finish_write(transfer._model.layout.total_bytes)
    assert all(not value.any() for value in net.state_dict().values())
    shadow.take()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_what_was_meant_for_a_thread_that_has_ended_reaches_no_other() -> None:
    """The system gives numbers of threads again."""
    seen = set()
    for _ in range(50):
        helper = Helper()
        seen.add(helper.submit(threading.get_ident).result(DEADLINE_S))
        helper.stop()
        helper.end()
        helper.stop()

        def through_a_safe_place() -> int:
            with threads.uninterrupted:
                return 7

        other = Helper()
        assert other.submit(through_a_safe_place).result(DEADLINE_S) == 7
        other.end()
    assert len(seen) < 50  # or the test has shown nothing
