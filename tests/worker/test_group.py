"""Averaging among all-reduce peers, each a thread of its own: equal to one process with the union batch."""

import contextlib
import copy
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paramserver.common.errors import UsageError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.worker.strategies import buckets
from paramserver.worker.strategies.collectives import backends
from paramserver.worker.strategies.collectives.backends import (
    OTHER,
    UNKNOWN,
    Broken,
    Generation,
    OutOfReach,
    Rendezvous,
    store_of,
    who_leaves,
)
from paramserver.worker.strategies.collectives.store import listening
from paramserver.worker.strategies.group import Group
from paramserver.worker.strategies.peer_state import UndoableStep

from .queued import tell_of_gpus


def meet(rendezvous, size=2):
    """All members of a generation, each made by a thread of its own."""
    generation = Generation(1, tuple(range(size)), rendezvous.address)
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda rank: Group(generation, rank, rendezvous), generation.members))


NUM_STEPS = 18
NET = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def trained(average):
    """What a member makes of NUM_STEPS, where `average` gives it the mean of each step's gradients."""
    net = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for parameter, mean in zip(net.parameters(), average(net, step), strict=True):
            parameter.grad = mean
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def gradients(rank, net, step):
    """With how many samples they are of, and whether the first has changed since it was computed."""
    num_samples = 3 + 2 * rank + (step in (7, 8))  # others than all have said of the step before
    x = torch.linspace(-1, 1 + rank + step / 10, 5 * num_samples, dtype=torch.float64).reshape(num_samples, 5)
    torch.nn.functional.mse_loss(net(x), x.sin().sum(1, keepdim=True)).backward()
    has_changed = rank == 0 and step % 6 == 4
    if has_changed:
        net[0].weight.grad.mul_(0.5)
    return [parameter.grad for parameter in net.parameters()], num_samples, has_changed


@pytest.mark.parametrize("way", ["small", "apart", "collectives"])
def test_the_group_equals_one_process_with_the_union_batch(monkeypatch, way):
    """Of some members the gradients leave during backward, in several buckets, and some are changed after that."""
    for name in ("_FIRST_BYTES", "_BUCKET_BYTES"):
        monkeypatch.setattr(buckets, name, 100)
    if way == "apart":
        tell_of_gpus(monkeypatch.setattr)
    if way == "collectives":
        monkeypatch.setattr(backends, "MAX_SMALL_BYTES", -1)

    def member(rank, group):
        def average(net, step):
            if not step:
                group.like = list(net.parameters())
                group.order = range(len(group.like) - 1, -1, -1)
                for index, parameter in enumerate(group.like if rank != 1 else ()):
                    parameter.register_post_accumulate_grad_hook(lambda p, index=index: group.ready(index, p.grad))
            found, num_samples, has_changed = gradients(rank, net, step)
            return group.average(found, num_samples, is_right=not has_changed)

        return trained(average)

    def of_all(net, step):
        found, total = [], 0
        for rank in range(3):
            net.zero_grad()
            own, num_samples, _ = gradients(rank, net, step)
            found.append([gradient * num_samples for gradient in own])
            total += num_samples
        return [sum(parts) / total for parts in zip(*found, strict=True)]

    groups = meet(Rendezvous("127.0.0.1"), 3)
    with ThreadPoolExecutor() as threads:
        weights = list(threads.map(member, range(3), groups))
    for group, found in zip(groups, weights, strict=True):
        torch.testing.assert_close(found, trained(of_all), rtol=0, atol=1e-9)
        group.close()


def test_nccl_is_for_a_gpu_each():
    assert backends.backend_of(["a/cuda/GPU-1", "a/cuda/GPU-2"]) == "nccl"
    assert backends.backend_of(["a/cuda/GPU-1", "b/cuda/GPU-2"]) == "nccl"
    assert backends.backend_of(["a/cuda/GPU-1", "a/cuda/GPU-1"]) == "gloo"
    assert backends.backend_of(["a/cuda/GPU-1", "b/cuda"]) == "gloo"  # whose torch is without NCCL
    assert backends.backend_of(["a/cuda/GPU-1", "a/cpu"]) == "gloo"
    assert backends.backend_of([backends.device_name(torch.device("cpu"))] * 2) == "gloo"


def test_why_gpus_do_not_average_over_nccl_is_said():
    assert backends.why_not_nccl(["a/cuda/GPU-1", "a/cuda/GPU-2"]) == ""
    assert backends.why_not_nccl(["a/cpu", "b/cpu"]) == "", "nobody expects NCCL without a GPU"
    message = "2 processes share 1 GPU, and NCCL takes one process for each GPU"
    assert backends.why_not_nccl(["a/cuda/GPU-1", "a/cuda/GPU-1"]) == message
    message = "1 of 2 processes have no GPU, or a torch without NCCL"
    assert backends.why_not_nccl(["a/cuda/GPU-1", "a/cpu"]) == message


def test_sums_that_would_never_end_do_when_another_thread_cuts_them(monkeypatch):
    """As NCCL's do where a member has gone that said its words: nothing but the server tells the others."""
    tell_of_gpus(monkeypatch.setattr)
    rendezvous = Rendezvous("127.0.0.1")
    waiting, silent = meet(rendezvous)
    silent._begin_sum = lambda _: None
    kept = waiting._data  # Gloo would end with it, and what it has under way does not
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(waiting.average, [torch.zeros(3)], 1)
        silent.average([torch.zeros(3)], 1)  # it has the other's words
        waiting.cut("rank 1 is gone")
        with pytest.raises(Broken, match="generation 1: rank 1 is gone"):
            waits.result(timeout=20)
    assert waiting.__dict__.keys().isdisjoint({"_metadata", "_data"})
    silent.close()
    del kept


def test_what_is_given_is_what_the_giver_has_in_memory_of_its_own():
    rendezvous = Rendezvous("127.0.0.1")
    first, second = meet(rendezvous)
    large = torch.arange(100_000, dtype=torch.float64)
    values = {
        "weights": [large, torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 3), large[1:3]],
        "state": {"0": {"step": 3, "is_on": torch.tensor([True, False]), "none": None}, "lr": 0.1},
    }
    with ThreadPoolExecutor() as threads:
        mine = threads.submit(first.broadcast_values, values, 0)
        theirs = threads.submit(second.broadcast_values, None, 0).result()
    assert mine.result()["weights"][0].data_ptr() == large.data_ptr()
    for weight, other in zip(values["weights"], theirs["weights"], strict=True):
        assert torch.equal(weight, other) and weight.dtype == other.dtype and weight.shape == other.shape
    assert theirs["state"]["0"].pop("is_on").tolist() == [True, False]
    assert theirs["state"] == {"0": {"step": 3, "none": None}, "lr": 0.1}
    assert first.num_broadcast == second.num_broadcast > large.nbytes
    for weight in (first, second):
        weight.close()


def test_a_store_that_cannot_be_reached_is_named():
    rendezvous = Rendezvous("127.0.0.1")
    host, port = rendezvous.address
    rendezvous.close()
    with pytest.raises(OutOfReach, match=f"rank 1 cannot reach rank 0 at {host}:{port}, to average with it"):
        Group(Generation(1, (0, 1), (host, port)), 1, Rendezvous("127.0.0.1"), meet_s=0.2)


def test_a_member_that_does_not_come_is_named():
    rendezvous = Rendezvous("127.0.0.1")
    with pytest.raises(Broken, match="rank 1, 2 did not come"):
        Group(Generation(1, (0, 1, 2), rendezvous.address), 0, rendezvous, meet_s=0.2)


@pytest.mark.parametrize(
    ("is_there", "lost", "expected", "message", "attempts"),
    [
        (True, "-", Broken, "generation 1: ", UNKNOWN),  # it does not speak
        (False, "-", OutOfReach, "rank 0 cannot reach rank 1 at {address}, to average with it", OTHER),
        (True, "0", Broken, "rank 1 cannot reach rank 0, to average with it", OTHER),
    ],
)
def test_a_member_that_comes_to_the_store_and_cannot_be_connected_to_is_named_with_its_address(
    is_there, lost, expected, message, attempts
):
    rendezvous, other = Rendezvous("127.0.0.1"), socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*other.getsockname())
    if not is_there:
        other.close()
    generation = Generation(1, (0, 1), rendezvous.address)
    rendezvous.admit(generation.full_name, generation.secret)
    here = store_of(generation, 1, 5)
    here.set("here/1", f"h/cpu {address} {address}")  # and no more
    here.set("lost/1", lost)
    with pytest.raises(expected, match=message.format(address=address)) as raised:
        Group(generation, 0, rendezvous, meet_s=0.2)
    assert raised.value.attempts == attempts
    other.close()


@pytest.mark.parametrize(
    ("lost", "goes"),
    [
        ({0: set(), 1: set()}, None),
        ({0: {1}, 1: {0}}, 1),  # of two the higher
        ({0: {1}, 1: set()}, 1),
        ({0: set(), 1: {0}}, 1),
        ({0: {1}, 1: set(), 2: {1}, 3: {1}}, 1),  # whom nobody reaches, and who reaches all
        ({0: set(), 1: {0, 2, 3}, 2: set(), 3: set()}, 1),  # who reaches nobody
        ({0: set(), 1: {3}, 2: {3}, 3: {1, 2}}, 3),
        ({0: {1, 2}, 1: {0}, 2: {0}}, 0),
    ],
)
def test_the_one_goes_without_which_most_others_can_meet(lost, goes):
    assert who_leaves(lost) == goes


def test_a_torch_without_the_backend_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(UsageError, match=r"its torch .* is without Gloo"):
        Rendezvous("127.0.0.1")


@pytest.mark.parametrize("local", [None, torch.full((3,), 2.0)])
def test_a_step_leaves_a_member_the_gradient_that_it_had(local):
    """It is averaged from there, and once more where that came to nothing."""
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (3,))])
    weights, stepped = torch.nn.Parameter(torch.zeros(3)), []
    weights.grad = local
    model = SimpleNamespace(tensors=[weights], layout=layout)
    step: UndoableStep = UndoableStep(model, None, lambda: stepped.append(weights.grad.clone()))
    step.apply([torch.ones(3)])
    assert torch.equal(stepped[0], torch.ones(3))
    assert weights.grad is local


def test_another_listener_that_opens_meanwhile_is_not_taken_for_the_devices():
    """As another thread may open one at any moment: with no port known, a member that stands still held the others up
    for the whole timeout of a collective."""
    with contextlib.ExitStack() as stack:
        others = []

        def make():
            if len(others) < 3:
                others.append(stack.enter_context(socket.create_server(("127.0.0.1", 0))))
            return stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        made, port = listening(make)
        assert port == made.getsockname()[1]
        assert len(others) == 3


@pytest.mark.parametrize("bug", [AttributeError("'NoneType' has no attribute 'x'"), IndexError("5"), KeyError("x")])
def test_a_bug_of_ours_is_no_broken_group(monkeypatch, bug):
    """It took nine groups, and then a sentence about the network."""
    rendezvous = Rendezvous("127.0.0.1")
    groups = meet(rendezvous)

    def is_small(*_):
        raise bug

    monkeypatch.setattr(backends, "is_small", is_small)
    with pytest.raises(type(bug)):
        groups[0].average([torch.zeros(3)], 1)
    monkeypatch.undo()
    for group in groups:
        group.close()
    rendezvous.close()


@pytest.mark.parametrize("way", ["average", "told"])
def test_a_group_that_another_thread_closed_is_broken(way):
    rendezvous = Rendezvous("127.0.0.1")
    groups = meet(rendezvous)
    for group in groups:
        group.close()
        with pytest.raises(Broken, match="generation 1: it was closed by another thread"):
            group.average([torch.zeros(3)], 1) if way == "average" else group.gather_numbers(1)
    rendezvous.close()


_changes: list[tuple[str, str]] = []  # thread and variable


def test_no_helper_thread_changes_the_environment(monkeypatch):
    """It belongs to the whole process: another thread would start a process, or a group of its own, with it."""
    if not _changes:
        sys.addaudithook(
            lambda name, variables: (
                _changes.append((threading.current_thread().name, os.fsdecode(variables[0])))
                if name in ("os.putenv", "os.unsetenv")
                else None
            )
        )
        os.environ["NOTHING"] = "1"
        assert _changes.pop() == (threading.current_thread().name, "NOTHING")
    nccl = SimpleNamespace(eager_connect_single_device=lambda _: None)
    fake = type("Fake", (), {"Options": SimpleNamespace, "__new__": lambda *_: nccl})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    with ThreadPoolExecutor(1, thread_name_prefix="helper") as threads:
        made = threads.submit(backends.nccl, dist.HashStore(), 0, 1, torch.device("cpu"), 1.0)
        assert made.result() is nccl
    assert [change for change in _changes if change[0].startswith("helper")] == []


def test_groups_of_nccl_are_made_without_torchs_watchdog(monkeypatch):
    for before in (None, "3"):
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        undo = backends.without_watchdog()
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        undo()
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before


def test_an_unsound_tensor_is_found_within_its_bucket():
    tensors = {0: torch.ones(3), 1: torch.tensor([1.0, float("nan")]), 2: torch.ones(2)}
    plan = buckets.Plan(tensors, 0.5, True, {}, torch.device("cpu"))
    for number in range(len(plan.buckets)):
        plan.gather(number, tensors)
    assert plan.unsound(tensors) == 1
    assert plan.unsound(tensors) is None, "of the buckets since the last call"


def test_a_tensor_that_another_member_gives_is_not_unsound_here():
    """The bucket's sum overflows, so its tensors are looked at, but not those that this member leaves out."""
    tensors = {0: torch.full((4,), 3e38), 1: torch.tensor([float("nan")])}
    plan = buckets.Plan(tensors, 1.0, False, {}, torch.device("cpu"), of_lowest={1})
    plan.gather(0, tensors)
    assert plan.unsound(tensors) is None
