"""A process of a worker that measures a task's layers as a pipeline, without a server.

    python -m paramserver.worker.replica_group G stages.py PLAN     as JSON: task, worker

`ps-launch doctor --pipeline` starts it. Group rank 0 prints one line `STAGES {...}`.
"""

import json
import os
import statistics
import sys
import timeit
from typing import Any

from paramserver.common.config.cli import before_torch

before_torch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from paramserver.common.config.cli import report  # noqa: E402
from paramserver.common.config.sections.processes import WorkerConfig  # noqa: E402
from paramserver.common.errors import ParamServerError  # noqa: E402
from paramserver.common.kinds import ContributionKind  # noqa: E402
from paramserver.common.wire.json_text import read_json  # noqa: E402
from paramserver.worker.replica_group.group import Group, find_member  # noqa: E402
from paramserver.worker.replica_group.pipeline import StagedPipeline  # noqa: E402
from paramserver.worker.trainer import choose_device  # noqa: E402
from paramserver.worker.training.data import to_device  # noqa: E402
from paramserver.worker.training.pipeline import Pipeline, inputs_of, layers_of  # noqa: E402
from paramserver.worker.training.tasks.loading import load_task  # noqa: E402

_STEPS = 5  # measured steps, after a first step that loads and allocates
_WAIT_S = 60.0


def main(plan: dict[str, Any]) -> None:
    """Measure and print."""
    worker = WorkerConfig(**plan["worker"])
    device = choose_device(worker.device)
    group = Group(find_member(os.environ), str(device), {}, _WAIT_S)
    task = load_task(plan["task"]["name"], plan["task"]["args"], seed=0, device=device)
    torch.manual_seed(0)
    data, size = task.train_data(), plan["task"]["batch_size"]

    def first(num: int) -> Any:
        return to_device(next(iter(torch.utils.data.DataLoader(data, max(1, size // num)))), device)

    model, num = task.model().to(device), worker.microbatches or 2 * group.size
    alone_s = steps_s(Pipeline(*layers_of(model), task.loss, num), first(1)) if not group.rank else 0.0
    group.gather([0.0])  # the other processes wait, and use no cores
    stages = StagedPipeline(*layers_of(model), task.loss, group, worker, ContributionKind.GRADIENT, first)
    measured_s = steps_s(stages, first(1))
    border_bytes = max(item.nbytes for item in stages.borders(inputs_of(task.loss, first(num)))[1:-1])
    link_s = trip_s(group, border_bytes, device)
    if not group.rank:
        print("STAGES", json.dumps({
            **stages.plan, "alone_s": alone_s, "measured_s": measured_s, "border_bytes": border_bytes, "link_s": link_s,
        }), flush=True)  # fmt: skip
    group.watch.end()  # from now on any process may end


def steps_s(pipeline: Pipeline, batch: Any) -> float:
    """Returns the median seconds of a step."""
    taken = timeit.repeat(lambda: pipeline.step(batch), pipeline.zero_grad, repeat=_STEPS + 1, number=1)
    return statistics.median(taken[1:])


def trip_s(group: Group, num_bytes: int, device: torch.device) -> float:
    """Returns the seconds in which `num_bytes` travel from group rank 0 to 1."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        if group.rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif group.rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return statistics.median(timeit.repeat(there_and_back, repeat=_STEPS + 1, number=1)[1:]) / 2


if __name__ == "__main__":
    try:
        main(read_json(sys.argv[1].encode()))
    except ParamServerError as error:
        sys.exit(report("ps-launch doctor", error))
