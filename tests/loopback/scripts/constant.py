"""Every element of every gradient is VALUE, and at some steps another. argv: STEPS VALUE [STEP:OTHER ...].

Run with SGD at lr 1 the weights say what was applied.
"""

import sys

import torch

import paramserver


def main() -> None:
    steps, value = int(sys.argv[1]), float(sys.argv[2])
    others = {int(step): float(other) for step, other in (word.split(":") for word in sys.argv[3:])}
    model = torch.nn.Module()
    model.seen = torch.nn.Parameter(torch.zeros(8 * steps))
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
        while not session.is_done:
            model.seen.grad = torch.full_like(model.seen, others.get(optimizer.progress.row.seq + 1, value))
            session.record(num_samples=1, loss=1.0)
            optimizer.step()
        session.finish()


main()
