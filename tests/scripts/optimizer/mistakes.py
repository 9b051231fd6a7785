"""What loops get wrong, each caught with the sentence that it gets, and what they may do."""

import pytest
import torch
from torch.utils.data import TensorDataset

import paramserver
from paramserver.common.errors import UsageError

model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
samples = TensorDataset(torch.ones(64, 4))


def wrong(words, action):
    with pytest.raises(UsageError) as raised:
        action()
    assert words in f"{raised.value.message}; {raised.value.fix}"


wrong("got a Sequential; session = paramserver.connect(), then", lambda: paramserver.connect(model))
with paramserver.connect() as session:
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1000)
    wrong("session.record() before session.optimizer()", lambda: session.record(loss=1.0))
    wrong("state() was called before session.optimizer()", lambda: next(iter(session.shard(samples))))
    wrong("the model has no parameters to train: it has none", lambda: session.optimizer(torch.nn.ReLU(), inner))
    wrong(
        "none of its 2 tensors is a parameter with requires_grad",
        lambda: session.optimizer(torch.nn.Linear(4, 3).requires_grad_(False), inner),
    )
    wrong(
        "parameter 'a.0.weight' is in two parameter groups",
        lambda: session.optimizers(a=(model, inner), b=(model, torch.optim.Adam(model.parameters()))),
    )
    bounded = torch.nn.Sequential(model, torch.nn.Embedding(3, 4, max_norm=1.0))
    wrong("embedding '1' has a max_norm", lambda: session.optimizer(bounded, torch.optim.Adam(bounded.parameters())))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    wrong(
        "'0.weight' of a lazy module has no shape yet",
        lambda: session.optimizer(lazy, torch.optim.Adam(lazy.parameters())),
    )
    namesake = type("Adam", (torch.optim.Adam,), {})(model.parameters())
    wrong(
        "optimizer __main__.Adam is not torch.optim.Adam, which the server would step",
        lambda: session.optimizer(model, namesake),
    )
    wrong("the model is a list, not a torch.nn.Module", lambda: session.optimizer([model], inner))
    wrong(
        "<class 'torch.optim.adam.Adam'> is not an optimizer", lambda: session.optimizers(a=(model, torch.optim.Adam))
    )
    wrong("session.finish() before session.optimizer()", session.finish)
    wrong("takes NAME=(model, optimizer) for each part", lambda: session.optimizers(a=model))
    optimizer = session.optimizer(model, inner)
    wrong("change requires_grad and its groups' lr", lambda: session.optimizer(model, inner))
    wrong("session.optimizers(generator=", lambda: session.optimizers(head=(model[1], inner)))
    wrong("step the returned optimizer", inner.step)
    wrong("a second connect() to one server, while this process has an open session", paramserver.connect)
    wrong(
        "session.shard(batch_size=0): a whole number of at least 1 is expected",
        lambda: session.shard(samples, batch_size=0),
    )
    wrong("session.shard(): DataLoader has no option workers", lambda: session.shard(samples, workers=2))
    wrong("session.epochs('3'): a whole number of at least 0 is expected", lambda: next(session.epochs("3")))
    wrong("session.config(5): a dict of names and values is expected", lambda: session.config(5))
    wrong("clip_grad_norm('a'): the norm must be above 0", lambda: optimizer.clip_grad_norm("a"))
    wrong("session.record(loss=...) is a str, and a metric is one number", lambda: session.record(loss="low"))
    wrong("parameter groups are fixed", lambda: optimizer.add_param_group({"params": [torch.zeros(1)]}))
    for step, (inputs,) in enumerate(session.shard(samples, batch_size=8, epochs=None)):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if step == 1:
            model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in before.items()})
            wrong(
                "weights ('0.weight' and 3 more) were changed between two steps, not by this optimizer: in mode async",
                optimizer.step,
            )
            model.load_state_dict(before)
        if step == 2:
            model[0].bias.data.clamp_(-0.001, 0.001)
            wrong("weights ('0.bias') were changed", optimizer.step)
            model.load_state_dict(before)
            wrong("the state of the optimizer was changed", optimizer.state.clear)
        if step == 3:  # there and back, but for a rounding
            with torch.no_grad():
                model[1].weight.add_(0.3).add_(-0.3)
        if step == 4:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved | {"param_groups": [saved["param_groups"][0] | {"lr": 0.025}]})
            optimizer.load_state_dict(saved | {"paramserver": {"run": "another", "steps": 7}})
            optimizer.load_state_dict(saved | {"param_groups": [saved["param_groups"][0] | {"lr": 0.025}]})
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.025
        optimizer.step()
        scheduler.step()
    wrong("step() after the end of the run, which has 8 training steps (run.steps)", optimizer.step)
    session.finish()
    wrong("session.shard(), epochs() or state() after session.finish()", lambda: session.shard(samples))
