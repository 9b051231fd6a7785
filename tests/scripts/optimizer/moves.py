"""What trainers do to a model and an optimizer behind `session.optimizer()`, one thing before each step.

Every step takes 1 from every weight, and the loop looks whether it did.
"""

import torch
from torch.utils.data import TensorDataset

import paramserver

model = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3), torch.nn.BatchNorm2d(64))
torch.nn.init.zeros_(model[0].weight)
torch.nn.init.zeros_(model[0].bias)


def reload(module, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


THINGS = [
    lambda module, optimizer: None,
    reload,  # Accelerate, when it prepares an optimizer
    lambda module, optimizer: module.double().float(),  # new memory, and new buffers
    lambda module, optimizer: module.share_memory(),  # memory that torch takes away from its tensors
    lambda module, optimizer: module.to(memory_format=torch.channels_last),
    lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda module, optimizer: module.to(memory_format=torch.contiguous_format),
    lambda module, optimizer: None,
]

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    steps, is_delayed = session.settings.steps, session.settings.delayed_update
    for step, _ in enumerate(session.shard(TensorDataset(torch.zeros(64, 1)), batch_size=8, epochs=None)):
        THINGS[step % len(THINGS)](model, optimizer)
        optimizer.zero_grad(set_to_none=False)
        sum(parameter.sum() for parameter in model[0].parameters()).backward()
        with torch.no_grad():
            model[1].running_mean += 1
        optimizer.step()
        behind = int(is_delayed and step + 1 < steps)  # the weights of a step come with the next one
        for name, parameter in model[0].named_parameters():
            values = parameter.unique().tolist()
            assert values == [behind - step - 1], f"{name} is {values} after step {step + 1}"
        assert is_delayed or model[1].running_mean.unique().tolist() == [step + 1], model[1].running_mean
    session.finish()
    assert model[0].weight.unique().tolist() == [-steps], model[0].weight
