"""A gRPC server of a few methods, as a test needs them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb


def serve(*others: grpc.GenericRpcHandler, **methods: grpc.RpcMethodHandler) -> tuple[grpc.Server, str]:
    """Start a server with these methods of a ps-server, and return it with its address."""
    server = grpc.server(ThreadPoolExecutor(8), handlers=others)
    if methods:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    return server, address


def heartbeats(replies) -> grpc.RpcMethodHandler:
    """The method Heartbeat, whose replies the function `replies(requests, context)` yields."""
    return grpc.stream_stream_rpc_method_handler(
        replies, pb.HeartbeatRequest.FromString, pb.HeartbeatReply.SerializeToString
    )
