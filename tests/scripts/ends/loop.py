"""A small loop that rank 1 leaves early. argv: HOW STEP [AFTER]: how, at its so-manieth batch, and what goes wrong
after the final weights are there.
"""

import os
import sys

import torch
from torch.utils.data import TensorDataset

import paramserver

HOW, STEP, AFTER = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or [""])[0]


def train(session: paramserver.Session) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batches = 0
    for x, y in session.shard(TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), batch_size=4, epochs=None):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if session.rank == 1 and batches == STEP:
            match HOW:
                case "break" | "finish":
                    break
                case "return":
                    return
                case "stop":
                    session.stop("good enough")
                case "stop_break":
                    session.stop("good enough")
                    break
                case "raise":
                    raise ValueError("in the middle")
                case _:
                    sys.exit(int(HOW))
        session.record(loss=loss.item())
        optimizer.step()
        batches += 1
    print(f"rank {session.rank} took {batches}", flush=True)
    if HOW == "break" and session.rank == 1:
        return
    evaluates = session.finish()
    print(f"rank {session.rank} has {model.weight.sum().item():.9f}", flush=True)
    if evaluates:
        match AFTER:
            case "raise":
                raise ValueError("no such metric")
            case "kill":
                os.kill(os.getpid(), 9)
            case "":
                session.report(loss=0.5)
            case _:
                sys.exit(int(AFTER))


if os.environ.get("PLAIN"):
    train(paramserver.connect())
else:
    with paramserver.connect() as session:
        train(session)
