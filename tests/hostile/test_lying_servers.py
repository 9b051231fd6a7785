"""A server that says what no server says: the worker ends with one sentence, and does nothing of what it was told."""

from __future__ import annotations

import inspect
import queue
import socket
from pathlib import Path

import pytest
import torch

from paramserver.common.errors import ParamServerError, UsageError
from paramserver.common.registry import TASKS
from paramserver.common.security import PLAINTEXT
from paramserver.common.tensors.optimizers import check_arguments
from paramserver.common.wire.checks import struct
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.channel import MemberHeartbeat
from paramserver.worker.conversation.messages import read_settings
from paramserver.worker.training.tasks.loading import check_named_by_server, load_named_by_server

from .lying import lying_server, run_worker, settings, welcome, welcoming


def optimizer(name: str, **arguments) -> pb.Optimizer:
    return pb.Optimizer(name=name, groups=[pb.ParameterGroup(hyperparameters=struct(arguments))])


NAMES = {
    "a task that there is not": ({"task": "nonsense"}, "no built-in task"),
    "a module": ({"task": "subprocess"}, "no built-in task"),
    "a dotted name": ({"task": "paramserver.worker.tasks.linear"}, "no built-in task"),
    "a path": ({"task": "/etc/passwd"}, "no built-in task"),
    "a name with an escape": ({"task": "lin\x1b[31mear"}, "RunSettings.task"),
    "an argument that the task has not": ({"task_args": struct({"evil": 1})}, "task.args.evil"),
    "an argument of another type": ({"task_args": struct({"num_samples": "many"})}, "a whole number"),
    "a size that takes all memory": ({"task_args": struct({"num_samples": 2**30})}, "ask for 434 GB of data and model"),
    "sizes that take all memory together": (
        {"task_args": struct({"num_samples": 10**6, "num_features": 10**5})},
        "(num_features=100000, num_samples=1000000) ask for 401 GB",
    ),
    "layers that take all memory together": (
        {"task": "gpt", "task_args": struct({"num_layers": 200, "width": 8192})},
        "ask for 658 GB",
    ),
    "channels that take all memory together": (
        {"task": "digits", "task_args": struct({"channels": [30_000, 30_000]})},
        "ask for 33 GB",
    ),
    "an argument that is too large": ({"task_args": struct({"num_samples": 1e300})}, "a whole number of at most"),
    "an argument out of the task's range": ({"task_args": struct({"num_samples": 0})}, "task.args.num_samples is 0"),
    "a device": ({"task_args": struct({"device": "cuda:7"})}, "never taken from a server"),
    "a folder": ({"task": "mnist", "task_args": struct({"data_dir": "/etc"})}, "task.args.data_dir"),
    "a file": ({"task": "gpt", "task_args": struct({"text": "/etc/passwd"})}, "task.args.text"),
    "an optimizer that there is not": ({"optimizer": optimizer("system", lr=1.0)}, "unknown optimizer 'system'"),
    "an argument that it has not": ({"optimizer": optimizer("sgd", lr=0.1, closure=1.0)}, "no argument 'closure'"),
    "an argument out of its range": ({"optimizer": optimizer("sgd", lr=-1.0)}, "Invalid learning rate"),
    "contributions of no kind": ({"contribution": 17}, "contributions of kind 17"),
    "a section that there is not": ({"train": struct({"evil": 1})}, "train.evil"),
    "a seed that is none": ({"seed": 2**64 - 1}, "RunSettings.seed"),
    "batches of nothing": ({"batch_size": 0}, "RunSettings.batch_size"),
    "an interval that is none": ({"eval_every": "9" * 400}, "RunSettings.eval_every"),
}


def follow(received: pb.RunSettings) -> None:
    """All that a worker makes of its server's settings before it trains."""
    found = read_settings(received)
    load_named_by_server(found.task, found.task_args or {}, {}, seed=found.seed, device=torch.device("cpu"))
    check_arguments(found.optimizer, found.optimizer_args or {})


def refused(script, folder: Path, *flags: str) -> str:
    """What a worker says that is told this; it ends, and shows no traceback."""
    with lying_server(script) as address:
        ended = run_worker(address, *flags, folder=folder)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode in (1, 2), (ended.returncode, ended.stderr)
    assert "\x1b[31m" not in ended.stderr
    return ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_none(name):
    fields, says = NAMES[name]
    with pytest.raises(ParamServerError) as caught:
        follow(settings(**fields))
    assert says in caught.value.message
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("name", ["a dotted name", pytest.param("*", marks=pytest.mark.slow)])
def test_settings_that_are_none_end_a_worker_in_one_sentence(name, tmp_path):
    for item in NAMES if name == "*" else [name]:
        fields, says = NAMES[item]
        assert says in refused(welcoming(welcome(settings=settings(**fields))), tmp_path), item


def test_a_folder_is_this_workers_to_name(tmp_path):
    """Its own word for the argument counts, and the server's is not looked at."""
    run_settings = settings(task="mnist", task_args=struct({"data_dir": "/etc", "hidden": 8}))
    output = refused(welcoming(welcome(settings=run_settings)), tmp_path, "--set", "task.args.data_dir=mine")
    assert f"{tmp_path}/mine lacks 4 of 4 files" in output


WELCOMES = {
    "a lease of nothing": ({"lease_s": 0.0}, "Welcome.lease_s"),
    "a lease that is no number": ({"lease_s": float("nan")}, "Welcome.lease_s"),
    "a number beyond all": ({"seq": 2**64 - 1}, "Welcome.seq"),
    "another rank": ({"rank": 7}, "rank 0 rank 7"),
    "a shard in a file": ({"shards": ["", "unix:/run/docker.sock"]}, "not HOST:PORT"),
    "a shard that is a URL": ({"shards": ["", "http://127.0.0.1:80/"]}, "not HOST:PORT"),
    "a port beyond all": ({"direct": pb.Direct(port=2**32 - 1, ticket=bytes(32))}, "Welcome.direct"),
}


@pytest.mark.parametrize("name", ["a lease of nothing", pytest.param("*", marks=pytest.mark.slow)])
def test_a_welcome_that_is_none(name, tmp_path):
    for item in WELCOMES if name == "*" else [name]:
        fields, says = WELCOMES[item]
        assert says in refused(welcoming(welcome(**fields)), tmp_path), item


def test_a_server_sends_its_worker_nowhere_by_its_direct_port(tmp_path):
    """The host is the one that the worker has reached, whatever the server says: its other ports at most."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        offered = pb.Direct(port=listener.getsockname()[1], ticket=bytes(32))
        ended = welcoming(
            welcome(direct=offered),
            pb.ServerMessage(reply=pb.Reply(result=pb.Result(outcome=9), next_work=pb.NextWork())),
        )
        assert "Result.outcome is 9" in refused(ended, tmp_path)
        connection, _ = listener.accept()
        connection.close()


def test_more_pulses_than_heartbeats_end_no_heartbeat():
    """They end the call, which is made again."""
    memberships: queue.SimpleQueue[int] = queue.SimpleQueue()
    with lying_server(welcoming(welcome()), heartbeat_replies=3) as address:
        heartbeat = MemberHeartbeat(lambda: address, PLAINTEXT, lambda membership, _: memberships.put(membership))
        heartbeat.join(40.0)
        try:
            assert [memberships.get(timeout=60) for _ in range(3)] == [1, 1, 1]
        finally:
            heartbeat.stop()


@pytest.mark.parametrize("name", TASKS.names())
def test_the_default_arguments_of_each_task_are_small_and_large_ones_are_not(name: str) -> None:
    task = TASKS.load(name)
    defaults = {key: parameter.default for key, parameter in inspect.signature(task).parameters.items()}
    assert task.num_elements(**defaults) < 2**27
    for key, value in defaults.items():
        if isinstance(value, int) and key in inspect.signature(task.num_elements).parameters:
            assert task.num_elements(**defaults | {key: 10**12}) > 2**30, key


def test_arguments_that_a_worker_has_of_its_own_have_no_bound() -> None:
    check_named_by_server("linear", {"num_samples": 10**6}, {"num_samples": 10**9})
    with pytest.raises(UsageError, match="ask for 401 GB"):
        check_named_by_server("linear", {"num_samples": 10**6}, {"num_features": 10**5})
