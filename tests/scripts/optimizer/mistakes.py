"""What loops get wrong, each caught, and what they may do; says what it was told."""

import json

import torch
from torch.utils.data import TensorDataset

import paramserver
from paramserver.common.errors import UsageError

model, messages = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)), {}


def wrong(name, action):
    try:
        action()
    except UsageError as error:
        messages[name] = f"{error.message}; {error.fix}"


with paramserver.connect() as session:
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1000)
    wrong("record", lambda: session.record(loss=1.0))
    wrong("shard", lambda: next(iter(session.shard(TensorDataset(torch.zeros(8, 4))))))
    wrong("no parameters", lambda: session.optimizer(torch.nn.ReLU(), inner))
    wrong("frozen", lambda: session.optimizer(torch.nn.Linear(4, 3).requires_grad_(False), inner))
    wrong("shared", lambda: session.optimizers(a=(model, inner), b=(model, torch.optim.Adam(model.parameters()))))
    bounded = torch.nn.Sequential(model, torch.nn.Embedding(3, 4, max_norm=1.0))
    wrong("max_norm", lambda: session.optimizer(bounded, torch.optim.Adam(bounded.parameters())))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    wrong("lazy", lambda: session.optimizer(lazy, torch.optim.Adam(lazy.parameters())))
    namesake = type("Adam", (torch.optim.Adam,), {})(model.parameters())
    wrong("namesake", lambda: session.optimizer(model, namesake))
    wrong("list", lambda: session.optimizer([model], inner))
    wrong("class", lambda: session.optimizers(a=(model, torch.optim.Adam)))
    wrong("finish", session.finish)
    wrong("parts", lambda: session.optimizers(a=model))
    optimizer = session.optimizer(model, inner)
    wrong("second", lambda: session.optimizer(model, inner))
    wrong("second of parts", lambda: session.optimizers(head=(model[1], inner)))
    wrong("inner", inner.step)
    wrong("connect", paramserver.connect)
    wrong("batch size", lambda: session.shard(TensorDataset(torch.ones(64, 4)), batch_size=0))
    wrong("option", lambda: session.shard(TensorDataset(torch.ones(64, 4)), workers=2))
    wrong("epochs", lambda: next(session.epochs("3")))
    wrong("config", lambda: session.config(5))
    wrong("norm", lambda: optimizer.clip_grad_norm("a"))
    wrong("loss", lambda: session.record(loss="low"))
    wrong("group", lambda: optimizer.add_param_group({"params": [torch.zeros(1)]}))
    for step, (inputs,) in enumerate(session.shard(TensorDataset(torch.ones(64, 4)), batch_size=8, epochs=None)):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if step == 1:
            model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in before.items()})
            wrong("load", optimizer.step)
            model.load_state_dict(before)
        if step == 2:
            model[0].bias.data.clamp_(-0.001, 0.001)
            wrong("clamp", optimizer.step)
            model.load_state_dict(before)
            wrong("clear", optimizer.state.clear)
        if step == 3:  # there and back, but for a rounding
            with torch.no_grad():
                model[1].weight.add_(0.3).add_(-0.3)
        if step == 4:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved | {"param_groups": [saved["param_groups"][0] | {"lr": 0.025}]})
            optimizer.load_state_dict(saved | {"paramserver": {"run": "another", "steps": 7}})
            optimizer.load_state_dict(saved | {"param_groups": [saved["param_groups"][0] | {"lr": 0.025}]})
            optimizer.load_state_dict(optimizer.state_dict())
            messages["rates"] = [optimizer.param_groups[0]["lr"], inner.param_groups[0]["lr"]]
        optimizer.step()
        scheduler.step()
    wrong("after the end", optimizer.step)
    session.finish()
    wrong("after finish", lambda: session.shard(TensorDataset(torch.ones(64, 4))))
print(json.dumps({"event": "told", **messages}))
