"""What comes from the network becomes our own types, or a refusal that names the field; refusals survive the way."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
import torch

from paramserver.common.errors import Reason, UnreachableError, UsageError, refusal
from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec
from paramserver.common.wire.checks import from_struct, hyperparameters_from_proto, struct
from paramserver.common.wire.protocol import (
    layout_from_proto,
    optimizer_from_proto,
    refusal_from_status,
    refusal_to_status,
)
from paramserver.proto import parameter_server_pb2 as pb

from .messages import refused_as_bad_request as refused


def tensor(name: str = "w", kind: int = 1, dtype: str = "float32", shape: tuple[int, ...] = (2,), **rest: Any) -> Any:
    return pb.TensorSpec(name=name, kind=kind, dtype=dtype, shape=shape, **rest)


# ---- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([], "a model of 0 tensors"),
        ([tensor(kind=0)], "tensor 'w' has no kind"),
        ([tensor(kind=9)], "tensor 'w' has no kind"),
        ([tensor(dtype="")], "tensor 'w' has dtype ;"),
        ([tensor(dtype="object")], "tensor 'w' has dtype object"),
        ([tensor(), tensor()], "two tensors are named 'w'"),
        ([tensor(shape=(2**63,))], "an impossible shape"),
        ([tensor(shape=(2**32, 2**32))], "an impossible shape"),
    ],
)
def test_impossible_models_are_refused(tensors: list[Any], says: str) -> None:
    assert says in refused(lambda: layout_from_proto(tensors))


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if not dtype.is_floating_point])
def test_a_trained_tensor_of_integers_is_refused(dtype: str) -> None:
    """It has no gradient; the store could not build an optimizer over it."""
    assert "'w'" in refused(lambda: layout_from_proto([tensor(dtype=dtype)]))
    for kind in (Kind.BUFFER, Kind.FROZEN):
        assert layout_from_proto([tensor(dtype=dtype, kind=kind)]).specs[0].dtype == dtype


# ---- optimizers ---------------------------------------------------------------------------------------

LAYOUT = Layout([
    TensorSpec("w", Kind.PARAMETER, "float32", (2,), ("tied",)),
    TensorSpec("b", Kind.PARAMETER, "float32", (2,)),
    TensorSpec("mean", Kind.BUFFER, "float32", (2,)),
    TensorSpec("frozen", Kind.FROZEN, "float32", (2,)),
])  # fmt: skip


def optimizer(*groups: list[str]) -> Any:
    return pb.Optimizer(name="SGD", groups=[pb.ParameterGroup(tensors=names) for names in groups])


@pytest.mark.parametrize(
    ("groups", "wrong"),
    [
        ([["w", "nobody"]], "nobody"),
        ([["mean"]], "mean"),
        ([["frozen"]], "frozen"),
        ([["tied"]], "tied"),
        ([["w"], ["w"]], "w"),
        ([["w", "w"]], "w"),
        ([[""]], ""),
    ],
)
def test_an_optimizers_tensors_are_parameters_in_one_group(groups: list[list[str]], wrong: str) -> None:
    assert f"the optimizer's tensor '{wrong}'" in refused(lambda: optimizer_from_proto(optimizer(*groups), LAYOUT))


@pytest.mark.parametrize("groups", [[], [[]], [[], []]])
@pytest.mark.parametrize(
    ("kinds", "num"), [([Kind.PARAMETER, Kind.BUFFER], 1), ([Kind.BUFFER], 0), ([Kind.FROZEN], 0), ([], 0)]
)
def test_an_optimizer_without_a_parameter_is_refused_in_a_sentence(groups, kinds, num) -> None:
    """A parameter in no group, only buffers, only frozen tensors: torch's optimizers take no empty list."""
    layout = Layout([TensorSpec(kind.name, kind, "float32", (3,)) for kind in kinds])
    assert f"none of the model's {num} parameters" in refused(lambda: optimizer_from_proto(optimizer(*groups), layout))


def test_an_optimizer_may_leave_parameters_out() -> None:
    assert [group.tensors for group in optimizer_from_proto(optimizer(["b"], []), LAYOUT).groups] == [("b",), ()]


def test_structs_keep_the_kinds_of_values() -> None:
    """Infinity too: `--set task.args.clip=.inf` is a value; the worker that is told it must not fail on it."""
    values = {"lr": 0.1, "nesterov": True, "betas": [0.9, -math.inf], "name": "x", "whole": 3.0, "none": None}
    values |= {"clip": math.inf, "inner": {"clip": math.inf}}
    received = from_struct(struct(values))
    assert received == values
    assert type(received["nesterov"]) is bool
    assert type(received["whole"]) is float


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_list", [False, True])
def test_hyperparameters_are_finite(bad: float, in_list: bool) -> None:
    """A broken schedule sends NaN: it is refused, the stream does not crash."""
    values = {"betas": [0.9, bad]} if in_list else {"lr": bad}
    assert next(iter(values)) in refused(lambda: hyperparameters_from_proto([struct(values)]))


# ---- refusals ------------------------------------------------------------------------------------------


class Failure(grpc.RpcError):
    """What a client's call raises."""

    def __init__(self, details: str, metadata: Any) -> None:
        self._details, self._metadata = details, metadata

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_is_the_same_error_on_both_sides(reason: Reason) -> None:
    code, details, metadata = refusal_to_status(refusal(reason, "what happened", fix="what to do"))
    assert code.name == reason.status
    assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    assert (code is grpc.StatusCode.INTERNAL) == (reason is Reason.INTERNAL)
    error = refusal_from_status(Failure(details, metadata))
    assert type(error) is reason.error
    assert (error.reason, error.message, error.fix) == (reason, "what happened", "what to do")


def test_statuses_are_those_the_proto_documents() -> None:
    """The comment on each value in the proto begins with its status."""
    text = (Path(__file__).parents[3] / "proto/parameter_server.proto").read_text(encoding="utf-8")
    documented = dict(re.findall(r"REASON_(\w+) = \d+; +// (\w+)\.", text))
    assert documented == {reason.value: reason.status for reason in Reason}


@pytest.mark.parametrize("text", ["naïve → é", "two\nlines", "x" * 100_000, "é" * 100_000, "🙂" * 9_000, ""])
def test_texts_fit_into_metadata(text: str) -> None:
    """gRPC takes printable ASCII in metadata, 8 KiB of it in all; anything else would kill the refusal itself."""
    _, details, metadata = refusal_to_status(refusal(Reason.BAD_REQUEST, text, fix=text))
    for _, value in metadata:
        assert value.isascii()
        assert value == "" or value.isprintable()
    # The status message travels percent-encoded.
    assert len(quote(details)) + sum(len(key) + len(value) for key, value in metadata) < 8000


def test_a_failure_that_is_no_refusal() -> None:
    assert refusal_from_status(Failure("connection reset", ())) is None
    assert refusal_from_status(Failure("connection reset", None)) is None
    assert refusal_from_status(Failure("connection reset", (("other", "x"),))) is None


def test_a_reason_of_a_newer_server() -> None:
    error = refusal_from_status(Failure("too new", (("ps-reason", "SOMETHING_NEW"),)))
    assert type(error) is UnreachableError
    assert "SOMETHING_NEW" in error.message
    assert "too new" in error.message


def test_errors_without_a_reason_are_bad_requests() -> None:
    code, _, metadata = refusal_to_status(UsageError("unknown optimizer 'x'"))
    assert (code, metadata[0]) == (grpc.StatusCode.INVALID_ARGUMENT, ("ps-reason", "BAD_REQUEST"))


def test_dtype_names_are_torchs() -> None:
    assert {name: getattr(torch, name) for name in DTYPES} == DTYPES
