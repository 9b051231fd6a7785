"""A network of 1.7 MB on random data, registered the other way round than it is used; saves nothing, prints nothing."""

import torch

import paramserver

with paramserver.connect() as session:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(260, 1), *[torch.nn.Linear(260, 260) for _ in range(6)], torch.nn.BatchNorm1d(260)]
    model = torch.nn.Sequential(*layers)
    optimizer = session.optimizer(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(session.rank)
    while not session.is_done:
        found = torch.randn(16, 260, generator=generator)
        optimizer.zero_grad()
        for layer in reversed(layers):
            found = layer(found)
        found.square().mean().backward()
        session.record(num_samples=16)
        optimizer.step()
    session.finish()
