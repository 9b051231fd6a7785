"""Weights that come while the next step has begun: whoever reads them, however, reads the new ones."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

from paramserver.common.errors import DivergedError, UsageError
from paramserver.common.tensors.layout import as_bytes, new_body
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.client import Lost
from paramserver.worker.session import Progress
from paramserver.worker.strategies import late as module
from paramserver.worker.strategies.late import LateWeights
from paramserver.worker.tensors.arrival import Arrival
from paramserver.worker.tensors.staged import StagedTransfer, make_transfer
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.tensors.watch import Watch

_LIMIT_S = 20.0


class Head(nn.Module):
    """Used by its parent without its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))


class Net(nn.Module):
    """Called in another order than registered; tied; with buffers, a list of parameters, weights read from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.head = Head()
        self.more = nn.ParameterList([nn.Parameter(torch.ones(6))])
        self.cell = nn.LSTM(6, 6)
        self.attend = nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(functional.linear(x, self.first.weight, self.first.bias))) * self.head.scale
        x = self.tied(x) + self.more[0]
        x = self.attend(x, x, x)[0] + self.cell(x[None])[0][0]
        return self.last(x)


class Server:
    """The part of an exchange that receives: an answer with the weights of `twin`, which come only when somebody waits
    for them, and are lost after `breaks_after` bytes."""

    transfer: Any

    def __init__(self, model: ModelTensors, twin: nn.Module) -> None:
        self.progress = Progress(version=1, num_starts=1, local_steps=1, steps_left=1)
        self.is_coming = True
        self.body = new_body(model.layout.total_bytes)
        for view, tensor in zip(model.layout.views(self.body), ModelTensors(twin).tensors, strict=True):
            view[1].copy_(tensor.detach())
        self.waited_for = threading.Event()
        self.breaks_after: int | None = None
        self.error: Exception = Lost("cut")
        self.again = pb.Answer(outcome=pb.Answer.REPEATED, version=1)
        self.started_again = False
        self._model = model

    def expect(self) -> tuple[Arrival, Callable[[], None]]:
        server = self

        class Watched(Arrival):
            def wait(self, index: int) -> bool:
                server.waited_for.set()
                return super().wait(index)

        arrival = Watched(len(self._model.layout.entries))
        part = arrival.part(self.transfer, self._model)

        def receive() -> None:
            assert self.waited_for.wait(_LIMIT_S), "nobody waited"
            source, end = as_bytes(self.body), self._model.layout.exchange_bytes
            for start in range(0, end, 100):
                if self.breaks_after is not None and start >= self.breaks_after:
                    raise self.error
                at = start
                for target in part.targets(start, min(100, end - start)):
                    target[:] = source[at : at + len(target)]
                    at += len(target)

        return arrival, receive

    def fetch_again(self, lost: Lost) -> pb.Answer:
        self.transfer.write(0, as_bytes(self.body)[: self._model.layout.exchange_bytes])
        self.transfer.finish_write(self._model.layout.exchange_bytes)
        return self.again

    def start_again(self, why: str) -> None:
        self.started_again = True


def late(net: nn.Module, twin: nn.Module, staged: bool = False) -> tuple[LateWeights, Server]:
    model = ModelTensors(net)
    server = Server(model, twin)
    weights = LateWeights(server)  # type: ignore[arg-type]
    settle = weights.settle  # waits for all, and for no tensor
    weights.settle = lambda: (server.waited_for.set(), settle())[1]  # type: ignore[method-assign]
    weights.meet(model)
    server.transfer = StagedTransfer(model) if staged else make_transfer(model)
    weights.started(Watch(model))
    return weights, server


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_worth_it", lambda layout: True)


@pytest.fixture
def nets() -> tuple[Net, Net]:
    net, twin = Net(), Net()
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.add_(1)
    return net, twin


def forward(net: Net, held: list[nn.Parameter]) -> Any:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    loss = net(x).square().mean()
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in net.parameters()], net.norm.running_mean.clone()]


def functionally(net: Net, held: list[nn.Parameter]) -> Any:
    x = torch.ones(4, 6)
    return torch.func.functional_call(net, dict(net.named_parameters()), (x,)).detach()


def by_grad_transform(net: Net, held: list[nn.Parameter]) -> Any:
    found = torch.func.grad(lambda params, x: torch.func.functional_call(net.first, params, (x,)).square().sum())(
        dict(net.first.named_parameters()), torch.ones(2, 6)
    )
    return list(found.values())


def saved(net: Net, held: list[nn.Parameter]) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return list(torch.load(file, weights_only=False).state_dict().values())


def copied(net: Net, held: list[nn.Parameter]) -> Any:
    return list(copy.deepcopy(net).state_dict().values())


def another_optimizer(net: Net, held: list[nn.Parameter]) -> Any:
    for parameter in held:
        parameter.grad = torch.full_like(parameter, 2.0)
    torch.optim.SGD(held, lr=0.5).step()
    return [parameter.detach().clone() for parameter in held]


def by_thread(net: Net, held: list[nn.Parameter]) -> Any:
    """As one that logs does, beside the training thread."""
    with ThreadPoolExecutor(2) as pool:
        norms = pool.submit(lambda: [one.norm().item() for one in held])
        return norms.result(_LIMIT_S), pool.submit(forward, net, held).result(_LIMIT_S)


def by_hook(net: Net, held: list[nn.Parameter]) -> Any:
    found: list[torch.Tensor] = []
    net.last.register_forward_pre_hook(lambda module, _: found.append(module.weight.detach().sum()))
    net.first.register_forward_pre_hook(lambda module, _: found.append(net.last.bias.detach().sum()))
    net.tied(torch.ones(1, 6))
    net.last(net.first(torch.ones(1, 6)))
    return found


def accumulated(net: Net, held: list[nn.Parameter]) -> Any:
    for _ in range(3):
        net(torch.ones(4, 6)).sum().backward()
    torch.nn.utils.clip_grad_norm_(held, 1.0)
    return [one.grad for one in held]


def checkpointed(net: Net, held: list[nn.Parameter]) -> Any:
    x = torch.ones(4, 6, requires_grad=True)
    torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum().backward()
    return [one.grad for one in held]


READERS: dict[str, Callable[[Net, list[nn.Parameter]], Any]] = {
    "forward": forward,
    "torch.func.functional_call": functionally,
    "torch.func.grad": by_grad_transform,
    "state_dict": lambda net, held: [one.clone() for one in net.state_dict().values()],
    "parameters": lambda net, held: sum(one.norm() for one in net.parameters()),
    "held": lambda net, held: [one + 0 for one in held],
    "held, by list": lambda net, held: torch.nn.utils.parameters_to_vector(held),
    "foreach": lambda net, held: torch._foreach_norm(held),
    "one weight": lambda net, held: net.last.weight.sum(),
    "data": lambda net, held: net.last.weight.data.clone(),
    "numpy": lambda net, held: net.last.weight.detach().numpy().copy(),
    "tolist": lambda net, held: net.norm.running_var.tolist(),
    "item": lambda net, held: net.last.bias[0].item(),
    "cell alone": lambda net, held: net.cell(torch.ones(1, 2, 6))[0].detach(),
    "text": lambda net, held: repr(net.last.bias),
    "saved": saved,
    "copied": copied,
    "another optimizer": another_optimizer,
    "thread": by_thread,
    "hooks": by_hook,
    "accumulated": accumulated,
    "checkpointed": checkpointed,
    "DataParallel": lambda net, held: nn.DataParallel(net)(torch.ones(4, 6)).detach(),
    "half": lambda net, held: list(net.half().state_dict().values()),
    "moved and back": lambda net, held: [one.detach() for one in net.double().float().parameters()],
    "swapped": lambda net, held: [net.load_state_dict(net.state_dict()), *net.state_dict().values()][1:],
    "EMA": lambda net, held: list(torch.optim.swa_utils.AveragedModel(net).state_dict().values()),
}


@pytest.mark.parametrize("staged", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["direct", "staged"])
@pytest.mark.parametrize(
    "reader",
    # functorch is imported for these: 2 s.
    [pytest.param(read, id=name, marks=[pytest.mark.slow] * ("func" in name)) for name, read in READERS.items()],
)
def test_whoever_reads_waits(nets: tuple[Net, Net], reader: Callable[..., Any], staged: bool) -> None:
    net, twin = nets
    held = list(net.parameters())
    weights, server = late(net, twin, staged)
    assert weights.may_come(), weights._reason
    net.zero_grad()
    weights.begin()
    net.zero_grad()  # asks each parameter for its gradient, and waits for none
    assert not server.waited_for.is_set()
    expected = reader(twin, list(twin.parameters()))
    torch.testing.assert_close(reader(net, held), expected, rtol=0, atol=0) if not isinstance(expected, str) else None
    assert reader(net, held) if isinstance(expected, str) else True
    assert server.waited_for.is_set()
    server.waited_for.set()
    assert weights.land()
    assert {type(one) for one in (*net.parameters(), *net.buffers())} == {nn.Parameter, torch.Tensor}
    weights.end()


def test_modules_that_compute_their_weights_wait_for_them() -> None:
    """Parametrized ones, and hooks that put a weight together before a forward pass."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        nn.utils.parametrizations.weight_norm(net[0])
        nn.utils.parametrizations.spectral_norm(net[1])
        nn.utils.weight_norm(net[2])
        return net

    net, twin = made(), made()
    with torch.no_grad():
        for one in twin.parameters():
            one.add_(1)
    weights, _ = late(net, twin)
    assert weights.may_come(), weights._reason
    weights.begin()
    x = torch.ones(2, 6)
    expected, found = twin(x), net(x)
    assert torch.equal(found, expected)
    expected.sum().backward(), found.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert weights.land()
    weights.end()


@pytest.mark.parametrize("reads", [True, False])
def test_what_never_came_whole_is_not_read(nets: tuple[Net, Net], reads: bool) -> None:
    """The server ends the run in the middle, or the script fails: no model of two versions is left behind."""
    net, twin = nets
    weights, server = late(net, twin)
    index = next(i for i, e in enumerate(server._model.layout.entries) if e.spec.name == "norm.bias")
    server.breaks_after, server.error = server._model.layout.entries[index].end, DivergedError("over")
    assert weights.may_come()
    weights.begin()
    if reads:
        with pytest.raises(DivergedError):
            net(torch.ones(4, 6))
    server.waited_for.set()
    assert weights.abide()
    if not reads:
        weights.end()
    for _ in range(2):
        assert torch.equal(net.last.weight, twin.last.weight)
        for read in (lambda: net.first.weight + 1, net.state_dict, lambda: copy.deepcopy(net)):
            with pytest.raises(UsageError):
                read()
        weights.end()


def test_a_layer_waits_for_its_own_weights_only(nets: tuple[Net, Net]) -> None:
    net, twin = nets
    weights, server = late(net, twin)
    weights.may_come()
    weights.begin()
    index = next(i for i, e in enumerate(server._model.layout.entries) if e.spec.name == "last.bias")
    server.breaks_after = server._model.layout.entries[index].end
    assert torch.equal(net.last(torch.ones(1, 6)), twin.last(torch.ones(1, 6)))
    assert weights.is_coming and index not in weights._awaited and weights._awaited
    weights.end()


def test_the_order_of_use_is_learnt_in_a_forward_pass(nets: tuple[Net, Net]) -> None:
    """What a script reads before one says nothing. Buffers come first, what is not used last; tied ones are one."""
    net, twin = nets
    net.unused = twin.unused = nn.Linear(6, 6)
    weights, server = late(net, twin)
    for read_first in (True, False):
        assert weights.may_come() and not weights.order
        weights.begin()
        server.waited_for.set()
        if read_first:
            net.state_dict()
        else:
            net(torch.ones(4, 6))
            net(torch.ones(4, 6))
        assert weights.land()
    names = [server._model.layout.entries[index].spec.name for index in weights.order]
    assert len(set(names)) == len(names) == server._model.num_exchanged
    assert names[:3] == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert names[3:10] == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "head.scale",
        "tied.bias",
        "more.0",
    ]
    assert names[-4:] == ["last.weight", "last.bias", "unused.weight", "unused.bias"]
    starts = server._model.starts(weights.order)
    assert len(starts) < len(names) and 0 < starts[0] <= server._model.layout.first_sent
    weights.end()


@pytest.mark.parametrize("name", ["_storage_Use_Count", "_DisableFuncTorch", "DisableTorchFunctionSubclass"])
def test_a_torch_without_what_it_takes_waits_in_step(
    nets: tuple[Net, Net], name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be gone, or be something else."""
    for is_gone in (True, False):
        with monkeypatch.context() as patch:
            patch.delattr(torch._C, name) if is_gone else patch.setattr(torch._C, name, lambda *_: 7)
            weights, _ = late(*nets)
        assert not weights.may_come() and weights.land() and weights.order == ()
        said = capfd.readouterr()
        assert (said.out + said.err).count("overlap_down_off") == 1
        weights.settle()
        weights.end()
        assert type(nets[0].last.weight) is nn.Parameter


def test_what_is_read_unseen_is_waited_for_in_step(nets: tuple[Net, Net]) -> None:
    net, twin = nets
    weights, _ = late(net, twin)
    assert weights.may_come()
    alias = net.last.weight.data
    assert not weights.may_come() and "'last.weight'" in weights._reason
    del alias
    kept = net.state_dict()
    assert not weights.may_come()
    del kept
    assert weights.may_come()
    weights.end()
    assert not weights.may_come()  # it is over

    class Own(nn.Parameter):
        pass

    net.last.weight = Own(net.last.weight.detach().clone())
    weights, _ = late(net, twin)
    assert not weights.may_come() and "is a Own" in weights._reason

    scripted = nn.Sequential(torch.jit.script(nn.Linear(6, 6)))
    weights, _ = late(scripted, copy.deepcopy(scripted))
    assert not weights.may_come() and "scripted" in weights._reason
    compiled = nn.Sequential(nn.Linear(6, 6))
    compiled[0].compile(backend="eager")
    weights, _ = late(compiled, nn.Sequential(nn.Linear(6, 6)))
    assert not weights.may_come() and "compiled" in weights._reason


COMPILES = """
import sys, torch
from paramserver.common.tensors.layout import as_bytes
from tests.worker import test_late as here
here.module.is_worth_it = lambda layout: True
net, twin = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
weights, server = here.late(net, twin)
assert weights.may_come() and "torch._dynamo" not in sys.modules
weights.begin()
server.waited_for.set()
compiled = torch.compile(lambda x: net(x), backend="eager", fullgraph=True)
x = torch.ones(2, 6)
assert torch.equal(compiled(x), twin(x)) and weights.land()
assert not weights.may_come() and "compiled" in weights._reason, weights._reason
weights.end()
again, server = here.late(torch.nn.Linear(6, 6), twin)
assert not again.may_come() and "compiled" in again._reason, again._reason
again.end()
"""


@pytest.mark.slow
def test_what_is_compiled_while_weights_come_waits_for_all(request: pytest.FixtureRequest) -> None:
    """In a process of its own: torch counts what it compiles."""
    done = subprocess.run([sys.executable, "-c", COMPILES], cwd=request.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(net: Net, weights: LateWeights, server: Server) -> list[Any]:
    """A forward pass on weights that break off in the middle."""
    server.breaks_after = server._model.layout.parameter_bytes // 2
    assert weights.may_come()
    weights.begin()
    return list(forward(net, []))


def test_the_rest_comes_with_the_same_answer(nets: tuple[Net, Net]) -> None:
    """Buffers that a forward pass has changed keep the change."""
    net, twin = nets
    weights, server = late(net, twin)
    expected = forward(twin, [])
    torch.testing.assert_close(run(net, weights, server), expected, rtol=0, atol=0)
    assert weights.land() and not server.started_again
    assert torch.equal(net.norm.running_mean, twin.norm.running_mean)
    weights.end()


@pytest.mark.parametrize("outcome", ["REPEATED", "START"])
def test_a_step_on_two_versions_is_not_sent(nets: tuple[Net, Net], outcome: str) -> None:
    net, twin = nets
    weights, server = late(net, twin)
    server.again = pb.Answer(outcome=outcome, version=2)
    run(net, weights, server)
    assert server.started_again == (outcome == "REPEATED")
    progress = server.progress
    progress.steps_left = 0  # step() has counted it
    assert not weights.land()
    assert (progress.steps_left, progress.num_starts) == (1, 2)
    assert torch.equal(net.norm.running_mean, twin.norm.running_mean), "the pass that is not sent has changed it"
    assert weights.land(), "the next one counts"
    weights.end()


def test_nothing_is_wrong_where_nothing_was_read(nets: tuple[Net, Net]) -> None:
    net, twin = nets
    weights, server = late(net, twin)
    server.again, server.breaks_after = pb.Answer(outcome=pb.Answer.REPEATED, version=2), 100
    assert weights.may_come()
    weights.begin()
    server.waited_for.set()
    assert weights.land() and not server.started_again
    assert torch.equal(net.first.weight, twin.first.weight)
    weights.end()


def test_weights_that_a_script_changes_are_noticed_as_ever(nets: tuple[Net, Net]) -> None:
    net, twin = nets
    weights, _ = late(net, twin)
    assert weights.may_come()
    weights.begin()
    with torch.no_grad():
        net.last.weight.mul_(2)
    assert weights.land()
    assert weights._watch is not None and weights._watch.changed() == ["last.weight"]
    weights.end()
