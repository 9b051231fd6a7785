"""Ray: actors that hold weights, the object store between them. Started with the measurement, stopped after it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..rig.turns import Measured, Samples, in_parts, timed
from .base import Baseline

_LOGICAL_CPUS = 16  # actors are placed by these; they start nothing


class Ray(Baseline):
    name = "ray"
    modules = ("ray",)
    install = "pip install ray"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a cluster of this process, in its own folder."""
        # Ray counts its users unless told otherwise; a short folder, for the names of its sockets.
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        import ray

        handler = signal.getsignal(signal.SIGTERM)  # Ray puts its own in the place
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp" if os.path.isdir("/tmp") else None)
        try:
            ray.init(
                address="local",
                num_cpus=_LOGICAL_CPUS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=folder,
            )
            signal.signal(signal.SIGTERM, handler)
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def exchange(self, num_floats: int) -> Iterator[Measured]:
        """numpy arrays, which Ray shares without a copy; those pulled are read-only, and left where they are."""
        import numpy as np
        import ray

        gradient = np.random.default_rng(0).standard_normal(num_floats, dtype=np.float32)
        with _actor(Holder, num_floats) as server:

            def push() -> Any:
                return ray.get(server.push.remote(ray.put(gradient)))

            def pull() -> Any:
                return ray.get(server.pull.remote())

            def exchange() -> Any:
                return (push(), pull())

            weights = np.zeros_like(gradient)

            def whole() -> None:
                ray.get(server.step.remote(ray.put(gradient)))
                np.copyto(weights, pull())

            yield in_parts({"up": push, "down": pull, "exchange": exchange, "whole": whole})

    @contextmanager
    def latency(self, floats: int) -> Iterator[Measured]:
        import numpy as np
        import ray

        gradient = np.random.default_rng(0).standard_normal(floats, dtype=np.float32)
        with _actor(Holder, floats) as server:
            yield timed("exchange", lambda: ray.get(server.both.remote(gradient)))

    @contextmanager
    def xor(self, options: Any) -> Iterator[Measured]:
        """The task in worker actors around a server actor: gradients there and new weights back in one call."""
        import ray

        with _actor(XorServer, options) as server:
            remote: Any = ray.remote(num_cpus=0)(XorWorker)
            workers: list[Any] = [remote.remote(server, rank, options) for rank in range(options.workers)]
            try:
                ray.get([worker.is_ready.remote() for worker in workers])

                def measured(count: int) -> Samples:
                    found = []
                    for _ in range(count):
                        began = time.perf_counter()
                        ray.get([worker.train.remote() for worker in workers])
                        found.append((time.perf_counter() - began) / (options.workers * options.steps))
                    return {"step": found}

                yield measured
            finally:
                for worker in workers:
                    ray.kill(worker)


@contextmanager
def _actor(made: Any, *arguments: Any) -> Iterator[Any]:
    import ray

    actor = ray.remote(num_cpus=0)(made).remote(*arguments)
    try:
        yield actor
    finally:
        ray.kill(actor)


class Holder:
    """Keeps flat weights."""

    def __init__(self, num_floats: int) -> None:
        import numpy as np

        self._weights = np.zeros(num_floats, dtype=np.float32)
        self._gradient: Any = None

    def push(self, gradient: Any) -> None:
        self._gradient = gradient

    def pull(self) -> Any:
        return self._weights

    def step(self, gradient: Any) -> None:
        """Take an optimizer step, because the compared exchange has one: torch's, in one pass."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Ray shares is read-only, and only read
            torch.from_numpy(self._weights).sub_(torch.from_numpy(gradient), alpha=1e-4)

    def both(self, gradient: Any) -> Any:
        self.step(gradient)
        return self._weights


class XorServer:
    """The run's weights, flat, and Adam or what the options name."""

    def __init__(self, options: Any) -> None:
        import torch

        from ...common.tensors.optimizers import find_optimizer

        torch.manual_seed(0)
        flat = torch.nn.utils.parameters_to_vector(options.task().model().parameters()).detach()
        self._weights = torch.nn.Parameter(flat)
        self._optimizer = find_optimizer(options.optimizer)([self._weights], lr=options.lr, fused=True)  # type: ignore[call-arg]

    def weights(self) -> Any:
        return self._weights.detach().numpy()

    def step(self, gradient: Any) -> Any:
        import torch

        self._weights.grad = torch.from_numpy(gradient.copy())
        self._optimizer.step()
        return self.weights()


class XorWorker:
    """One rank: its share of the data, forward and backward, a call for every step."""

    def __init__(self, server: Any, rank: int, options: Any) -> None:
        from ...worker.training.data import Shares, sharded_batches

        self._server, self._options, self._task = server, options, options.task()
        self._model = self._task.model()
        data, division = self._task.train_data(), (options.workers, rank)
        self._batches = sharded_batches(Shares(data, options.batch_size, 0), lambda: division, 0)

    def is_ready(self) -> bool:
        return True

    def train(self) -> None:
        """`options.steps` steps."""
        import ray
        import torch

        parameters = list(self._model.parameters())
        weights = ray.get(self._server.weights.remote())
        for _ in range(self._options.steps):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), parameters)
            loss = self._task.loss(self._model, next(self._batches)[0])
            self._model.zero_grad()
            loss.backward()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            gradient = torch.nn.utils.parameters_to_vector(gradients).numpy()
            weights = ray.get(self._server.step.remote(gradient))


ENTRY = Ray
