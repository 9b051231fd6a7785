"""Worker I's gradient at its step k is SCALE times the unit vector I * STEPS + k, in double precision.

With SGD at lr 1 the weights end at minus the sum of the weights of each contribution.
argv: I STEPS SCALE [DELAY_S [STOP_AT]]

With COUNTING_LARGE "FIRST NUMBER VALUE" in the environment, VALUE is added to so many gradients of worker I, from step
FIRST on, each of which it computes once.
"""

import os
import sys
import time

import torch

import paramserver

MAX_WORKERS = 8


def main() -> None:
    index, steps, scale = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    delay_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    stop_at = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    first, num_large, large = map(float, os.environ.get("COUNTING_LARGE", "0 0 0").split())
    model = torch.nn.Module()
    model.other = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))  # another fragment
    model.seen = torch.nn.Parameter(torch.zeros(MAX_WORKERS * steps, dtype=torch.float64))
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
        print("workers", session.num_workers, "index", optimizer.progress.worker_index, flush=True)
        while not session.is_done:
            step = session.step
            time.sleep(delay_s)
            optimizer.zero_grad()
            model.seen.grad = torch.zeros_like(model.seen)
            model.seen.grad[index * steps + step] = scale
            if num_large and step >= first:
                model.seen.grad[index * steps + step] += large
                num_large -= 1
            session.record(num_samples=1, loss=float(step))
            if step + 1 == stop_at:
                session.stop("enough")
            optimizer.step()
        print("has", int(model.seen.count_nonzero()), "steps", flush=True)  # before the final weights
        session.finish()


main()
