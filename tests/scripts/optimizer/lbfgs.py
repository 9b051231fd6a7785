"""LBFGS on logistic regression in double precision, wrapped as DataParallel wraps; every rank has data of its own."""

import sys

import torch
import torch.nn.functional as F

import paramserver

LOCAL_STEPS, ROUNDS, WORKERS = 3, 4, 2


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def optimizer_of(module):
    return torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def data(rank):
    generator = torch.Generator().manual_seed(rank + 1)
    inputs = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(1) > rank).long()


def step(module, optimizer, inputs, labels):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs), labels)
        loss.backward()
        return loss

    return optimizer.step(closure)


def plain():
    """What localsgd is, in one process: the models of all ranks, averaged after each round."""
    models = [model() for _ in range(WORKERS)]
    optimizers = [optimizer_of(module) for module in models]
    for _ in range(ROUNDS):
        for rank, (module, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for _ in range(LOCAL_STEPS):
                step(module, optimizer, *data(rank))
        with torch.no_grad():
            for together in zip(*(module.parameters() for module in models), strict=True):
                mean = sum(together) / WORKERS
                for parameter in together:
                    parameter.copy_(mean)
    return models[0].state_dict()


if __name__ == "__main__":
    bare = model()
    wrapped = torch.nn.DataParallel(bare)
    with paramserver.connect() as session:
        optimizer = session.optimizer(wrapped, optimizer_of(bare))
        while not session.is_done:
            loss = step(wrapped, optimizer, *data(session.rank))
            session.record(loss=float(loss), num_samples=40)
        session.finish()
    sys.exit(0)
