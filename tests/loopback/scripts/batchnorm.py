"""BatchNorm on data whose mean is twice the rank; learning rate tiny, so that only statistics move."""

import torch

import paramserver

with paramserver.connect() as session:
    torch.manual_seed(session.rank)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4, momentum=0.2), torch.nn.Linear(4, 1))
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    while not session.is_done:
        batch = torch.randn(64, 4) + 2.0 * session.rank
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        session.record(num_samples=64)
        optimizer.step()
    session.finish()
