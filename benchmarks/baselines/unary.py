"""Naive gRPC: all tensors in one protobuf message, a unary call, limits raised."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ..rig.team import team
from ..rig.turns import Measured, in_parts, timed
from .base import Baseline

_SERVICE = "paramserver.Unary"
_NO_LIMIT = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Unary(Baseline):
    name = "unary"
    modules = ("grpc",)
    install = "pip install grpcio"

    def exchange(self, num_floats: int) -> Any:
        return _call(num_floats, one_call=False)

    def latency(self, floats: int) -> Any:
        return _call(floats, one_call=True)


@contextmanager
def _call(num_floats: int, one_call: bool) -> Iterator[Measured]:
    from multiprocessing import get_context

    ours, theirs = get_context("spawn").Pipe()
    with (
        ours,
        theirs,
        team(1, server_life, num_floats, theirs),
        _calling(ours.recv(), num_floats, one_call) as measured,
    ):
        yield measured


@contextmanager
def server_life(_: int, num_floats: int, link: Any) -> Iterator[Measured]:
    """Run a grpc.Server with the weights; it sends its port on `link`."""
    import grpc

    from ..rig.model import synthetic_model

    message = tensors_message()
    weights = [parameter.detach() for parameter in synthetic_model(num_floats)]

    def push(raw: bytes, _: Any) -> bytes:
        _unpacked(message, raw, weights)
        return b""

    def pull(raw: bytes, _: Any) -> bytes:
        return _packed(message, weights)

    def step(raw: bytes, _: Any) -> bytes:
        """Take an optimizer step, because the compared exchange has one."""
        for weight, gradient in zip(weights, _unpacked(message, raw, weights), strict=True):
            weight.sub_(gradient, alpha=1e-4)
        return b""

    def both(raw: bytes, context: Any) -> bytes:
        return step(raw, context) + pull(raw, context)

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(call)
        for name, call in (("Push", push), ("Pull", pull), ("Step", step), ("Both", both))
    }
    server = grpc.server(ThreadPoolExecutor(2), options=_NO_LIMIT)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    link.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    try:
        yield timed("served", lambda: None)
    finally:
        server.stop(1.0).wait()


@contextmanager
def _calling(port: int, num_floats: int, one_call: bool) -> Iterator[Measured]:
    import grpc
    import torch

    from ..rig.model import synthetic_model

    message = tensors_message()
    weights = [parameter.detach() for parameter in synthetic_model(num_floats)]
    gradients = [torch.randn_like(weight) * 1e-3 for weight in weights]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_NO_LIMIT) as channel:
        calls = {name: channel.unary_unary(f"/{_SERVICE}/{name}") for name in ("Push", "Pull", "Step", "Both")}

        def push() -> None:
            calls["Push"](_packed(message, gradients))

        def pull() -> Any:
            return _unpacked(message, calls["Pull"](b""), gradients)

        def exchange() -> Any:
            push()
            return pull()

        def whole() -> None:
            calls["Step"](_packed(message, gradients))
            for weight, new in zip(weights, pull(), strict=True):
                weight.copy_(new)

        def both() -> Any:
            return _unpacked(message, calls["Both"](_packed(message, gradients)), gradients)

        yield (
            timed("exchange", both)
            if one_call
            else in_parts({"up": push, "down": pull, "exchange": exchange, "whole": whole})
        )


def _packed(message: Any, tensors: list[Any]) -> bytes:
    packed: bytes = message(data=[tensor.numpy().tobytes() for tensor in tensors]).SerializeToString()
    return packed


def _unpacked(message: Any, raw: bytes, like: list[Any]) -> list[Any]:
    import torch

    parts = message.FromString(raw).data
    return [
        torch.frombuffer(bytearray(data), dtype=torch.float32).view_as(tensor)
        for data, tensor in zip(parts, like, strict=True)
    ]


def tensors_message() -> Any:
    """The class of `message Tensors { repeated bytes data = 1; }`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="benchmark_tensors.proto", package="benchmark", syntax="proto3")
    field = file.message_type.add(name="Tensors").field.add(name="data", number=1)
    field.label, field.type = field.LABEL_REPEATED, field.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("benchmark.Tensors"))


ENTRY = Unary
