"""Every field of every message is checked in the header or is an exception (`fields.py`), and hostile values of all of
them are refused where they come.

100,000 inputs of a seed, which is printed, go through the code that reads them in a server, a worker, a shard and a
server that goes on from a snapshot: no crash, nothing imported, opened or run, and none takes a second.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager

import numpy.ctypeslib  # noqa: F401  (numpy's own, imported where a codec first packs bits)
import pytest
from google.protobuf.descriptor import FieldDescriptor

from paramserver.common.errors import ParamServerError
from paramserver.common.registry import CODECS, MODES, TASKS
from paramserver.common.tensors.optimizers import is_elementwise, known_optimizers
from paramserver.common.wire.checks import check_header
from paramserver.proto import parameter_server_pb2 as pb

from .audit import watched
from .fields import EXCEPTIONS, all_fields, kind_of
from .hostile import Hostile
from .lying import settings, welcome
from .server_end import ServerEnd, ShardEnd, SnapshotEnd
from .worker_end import WorkerEnd

MAX_S = 1.0  # of CPU, for one input

NOT_SO = {
    "text": "a\nb", "address": "unix:/run/docker.sock", "whole": 2**64 - 1, "real": float("nan"), "choice": 77,
    "bytes": b"x" * 31, "json": "x" * (1 << 17),
}  # fmt: skip


def test_every_exception_is_a_field():
    assert EXCEPTIONS.keys() <= all_fields().keys()


BY_HEADER = sorted(
    item for item, field in all_fields().items() if item not in EXCEPTIONS and kind_of(field) not in ("part", "flag")
)
SOUND = {
    "Welcome": welcome(), "RunSettings": settings(), "Result": pb.Result(outcome=pb.Reply.APPLIED),
    "NextWork": pb.NextWork(num_workers=1),
    "Direct": pb.Direct(port=1, ticket=bytes(32)),
}  # fmt: skip
_NARROW = {FieldDescriptor.TYPE_UINT32: 2**32 - 1, FieldDescriptor.TYPE_SINT32: 2**31 - 1}


@pytest.mark.parametrize(("message", "field"), BY_HEADER, ids=".".join)
def test_what_is_no_exception_is_checked_in_the_header(message, field):
    """One value of it in a message that is sound without."""
    if message in ("MetricsEntry", "FinalMetricsEntry"):
        of = {
            "MetricsEntry": lambda **values: pb.Metrics(metrics=values),
            "FinalMetricsEntry": lambda **values: pb.Leave(final_metrics=values),
        }
        with pytest.raises(ParamServerError, match="name"):
            check_header(of[message](**{"a\nb": 1.0}))
        return
    field_message = getattr(pb, message)()
    field_message.MergeFrom(SOUND.get(message, field_message))
    descriptor = all_fields()[message, field]
    bad = _NARROW.get(descriptor.type, NOT_SO[kind_of(descriptor)])
    if descriptor.is_repeated:
        getattr(field_message, field).extend([bad, bad])
    else:
        setattr(field_message, field, bad)
    if message == "Direct":
        field_message = welcome(direct=field_message)
    with pytest.raises(ParamServerError) as caught:
        check_header(field_message)
    assert field in caught.value.message or message in caught.value.message
    assert caught.value.message.isprintable()


@contextmanager
def without_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def campaign(end, num_inputs, seed, item):
    """Each input has a seed of its own: what fails is done again by it alone. Returns how many there were. Garbage is
    collected between inputs: by then it takes a second, and no input's."""
    done = number = 0
    slowest_s, end.num_refused = 0.0, 0
    with watched() as noted, without_garbage_collection():
        while done < num_inputs:
            if number % 1000 == 0:
                gc.collect()
            noted.clear()
            started = time.process_time()
            try:
                found = item(Hostile(seed + number))
            except BaseException as error:
                raise AssertionError(f"{type(end).__name__}, seed {seed + number}") from error
            assert not noted, f"{type(end).__name__}, seed {seed + number}: {noted[:3]}"
            count = found if type(found) is int else 1
            slowest_s = max(slowest_s, (time.process_time() - started) / max(1, count))
            done, number = done + max(1, count), number + 1
    print(f"{type(end).__name__}: {done} inputs from seed {seed}, {end.num_refused} refused, slowest {slowest_s:.3f} s")
    assert slowest_s < MAX_S
    assert 0.05 * done < end.num_refused < done
    return done


def warm_up():
    """What is imported where it is first used: all that any name of a closed list stands for."""
    for family in (CODECS, TASKS, MODES):
        for name in family.names():
            family.load(name)
    for optimizer in known_optimizers().values():
        is_elementwise(optimizer)


@pytest.mark.parametrize(
    "thousands", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["2000", "100000"]
)
def test_no_value_of_any_field_does_any_harm(thousands):
    """In a server, a worker, a shard and a coordinator, and a server that reads a snapshot."""
    seed = 10_000_000 * thousands
    warm_up()
    server, shard, snapshot = ServerEnd(), ShardEnd(), SnapshotEnd()
    with WorkerEnd() as worker:
        for item in range(200):  # what is read once, such as the id of this boot
            for end in (worker, shard, snapshot):
                end.deliver(Hostile(item))
        for item in range(6):
            server.talk(Hostile(item))
        num = campaign(worker, 400 * thousands, seed, worker.deliver)
    num += campaign(server, 200 * thousands, seed, server.talk)
    num += campaign(shard, 200 * thousands, seed, shard.deliver)
    num += campaign(snapshot, 200 * thousands, seed, snapshot.deliver)
    assert num >= 1000 * thousands
