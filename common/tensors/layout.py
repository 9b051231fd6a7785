"""The layout of a payload: the offset of each tensor of a model.

Tensors are sorted by kind (parameter, buffer, frozen), then dtype, then the model's own order. All tensors of one kind
and dtype form one contiguous *run* that starts at a multiple of 64 bytes. So the server works on a few large flat
tensors, with one fused optimizer call and one addition per contribution.

    | float32 parameters | int64 buffers | float32 buffers | frozen ... |
    |<------------- exchange_bytes ---------------------->|
    |<------------------------ total_bytes ------------------------->|

The same layout holds a gradient, a set of weights, or the mean of either.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Annotated, NamedTuple

import torch
from pydantic import PlainSerializer, PlainValidator

from ..errors import Reason, refusal

_ALIGNMENT_BYTES = 64
_MAX_BYTES = 2**50
_RULES = {True: "averaged over the workers", False: "that of the lowest live rank"}  # of a buffer, by `averaged`

_DTYPE_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES.split()}


class Kind(IntEnum):
    """The role of a tensor in the exchange. The values equal TensorSpec.Kind in the proto."""

    PARAMETER = 1
    BUFFER = 2
    FROZEN = 3


def _kind_named(name: object) -> Kind:
    if isinstance(name, str) and name in Kind.__members__:
        return Kind[name]
    raise ValueError(f"a kind is one of {', '.join(Kind.__members__)}")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model.

    `aliases` are other names of the same tensor (tied weights). `averaged` buffers are running statistics, which the
    server averages. Other buffers follow the lowest live rank. JSON has a kind by its name.
    """

    name: str
    kind: Annotated[Kind, PlainValidator(_kind_named), PlainSerializer(lambda kind: kind.name)]
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    averaged: bool = True

    @property
    def is_averaged(self) -> bool:
        """Whether the workers' values are averaged. Integers never are."""
        return self.averaged and DTYPES[self.dtype].is_floating_point

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


class Entry(NamedTuple):
    """The bytes of a tensor in a payload, [offset, end)."""

    spec: TensorSpec
    offset: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.offset

    def view(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the tensor in `payload` (uint8, [>= end]) with its dtype and shape. It shares memory."""
        return payload[self.offset : self.end].view(DTYPES[self.spec.dtype]).view(self.spec.shape)


@dataclass(frozen=True, eq=False)
class FlatRun:
    """Consecutive entries of one kind, dtype and rule, as one flat tensor of `num_elements`."""

    kind: Kind
    dtype: torch.dtype
    offset: int
    num_elements: int
    averaged: bool = True

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_averaged(self) -> bool:
        """Whether the server averages the workers' values. It never averages integers."""
        return self.averaged and self.is_float

    def view(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the run in `payload` (uint8, [>= end]) as [num_elements] of its dtype. It shares memory."""
        return payload[self.offset : self.end].view(self.dtype)

    @property
    def end(self) -> int:
        return self.offset + self.num_elements * self.dtype.itemsize

    def within(self, start: int, end: int) -> FlatRun | None:
        """Return the part of the run in bytes [start, end) of a payload, both multiples of 64; None if it is empty."""
        first, last = max(start, self.offset), min(end, self.end)
        if first >= last:
            return None
        return replace(self, offset=first, num_elements=(last - first) // self.dtype.itemsize)


def joined(entries: Iterable[Entry]) -> list[FlatRun]:
    """Return the runs of these entries, which are in the order of a payload.

    Adjacent entries of the same kind, dtype and rule form one run.
    """
    runs: list[FlatRun] = []
    for spec, offset, _ in entries:
        run = FlatRun(spec.kind, DTYPES[spec.dtype], offset, spec.num_elements, spec.averaged)
        last = runs[-1] if runs else None
        alike = (run.kind, run.dtype, run.averaged, run.offset)
        if last is not None and (last.kind, last.dtype, last.averaged, last.end) == alike:
            runs[-1] = replace(last, num_elements=last.num_elements + run.num_elements)
        else:
            runs.append(run)
    return runs


View = Callable[[FlatRun, torch.Tensor], torch.Tensor]  # has the meaning of `FlatRun.view`


class Layout:
    """The layout of one model. Equal specs give equal layouts on every machine.

    Raises a BAD_REQUEST refusal for duplicate names, negative dimensions or unknown dtypes.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)
        self._check()
        self.entries: list[Entry] = []
        ends = dict.fromkeys(Kind, 0)
        at, by_dtype = 0, attrgetter("kind", "dtype")
        for (kind, _), run in groupby(sorted(self.specs, key=by_dtype), key=by_dtype):
            at = -(-at // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            for spec in run:
                self.entries.append(Entry(spec, at, at + spec.num_bytes))
                at += spec.num_bytes
            ends[kind] = at
        self.runs = joined(self.entries)
        self.parameter_bytes = ends[Kind.PARAMETER]
        self.exchange_bytes = max(ends[Kind.PARAMETER], ends[Kind.BUFFER])
        self.total_bytes = at

    def _check(self) -> None:
        seen: set[str] = set()
        for spec in self.specs:
            for name in (spec.name, *spec.aliases):
                if name in seen:
                    raise refusal(Reason.BAD_REQUEST, f"two tensors are named '{name}'")
                seen.add(name)
            if spec.dtype not in DTYPES:
                message = f"tensor '{spec.name}' has dtype {spec.dtype}; known are {', '.join(DTYPES)}"
                raise refusal(Reason.BAD_REQUEST, message)
            # Ignore zeros: torch also refuses (2**62, 2**62, 0), although it has no elements.
            extent = math.prod(d for d in spec.shape if d) * DTYPES[spec.dtype].itemsize
            if any(d < 0 for d in spec.shape) or extent >= _MAX_BYTES:
                raise refusal(Reason.BAD_REQUEST, f"tensor {spec} has an impossible shape")
            if spec.kind is Kind.PARAMETER and not DTYPES[spec.dtype].is_floating_point:
                raise refusal(Reason.BAD_REQUEST, f"tensor '{spec.name}' is {spec.dtype}: only floats are trained")
        if (total := sum(spec.num_bytes for spec in self.specs)) >= _MAX_BYTES:
            raise refusal(Reason.BAD_REQUEST, f"a model of {total} bytes; at most {_MAX_BYTES} are possible")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the specs, as the proto defines it. It is equal for equal models."""
        digest = hashlib.sha256()
        for spec in self.specs:
            shape = ",".join(map(str, spec.shape))
            rule = "" if spec.averaged else " lowest_rank"
            digest.update(f"{spec.kind.name} {spec.name} {spec.dtype} {shape}{rule}\n".encode())
        return digest.hexdigest()

    @cached_property
    def num_parameters(self) -> int:
        """The number of trained elements."""
        return sum(run.num_elements for run in self.runs if run.kind is Kind.PARAMETER)

    def runs_of(self, kind: Kind) -> list[FlatRun]:
        return [run for run in self.runs if run.kind is kind]

    def views(self, payload: torch.Tensor) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield each tensor of `payload` (uint8, [total_bytes]) with its dtype and shape. They share memory."""
        return ((entry.spec, entry.view(payload)) for entry in self.entries)

    def differences(self, other: Layout, limit: int = 5) -> list[str]:
        """Return the first differences of `other` from this layout, as sentences. The list is empty if they match."""
        mine = {spec.name: spec for spec in self.specs}
        theirs = {spec.name: spec for spec in other.specs}
        found = []
        for name in dict.fromkeys([*mine, *theirs]):
            expected, got = mine.get(name), theirs.get(name)
            if expected is None:
                found.append(f"extra tensor {got}")
            elif got is None:
                found.append(f"missing tensor {expected}")
            elif (expected.kind, expected.dtype, expected.shape) != (got.kind, got.dtype, got.shape):
                kinds = f" ({expected.kind.name} and {got.kind.name})" if expected.kind != got.kind else ""
                found.append(f"expected {expected}, got {got}{kinds}")
            elif expected.averaged != got.averaged:
                first, second = (_RULES[spec.averaged] for spec in (expected, got))
                fix = "name it in averaged_buffers on all workers or on none"
                found.append(f"buffer {expected} is {first} in the run, and {second} here: {fix}")
        if not found and self.fingerprint != other.fingerprint:
            found.append("the same tensors in another order")
        return found[:limit] + ([f"and {len(found) - limit} more"] if len(found) > limit else [])


def new_payload(num_bytes: int) -> torch.Tensor:
    """Return zeros, uint8 [num_bytes]. A large payload starts on a page, so every run is aligned for SIMD."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")


def copy_of(*pieces: memoryview) -> torch.Tensor:
    """Return a copy of these bytes, joined, as uint8 [their length]."""
    joined = bytearray(b"".join(pieces))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else new_payload(0)  # torch refuses an empty buffer


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. They share memory."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    try:
        return plain.numpy().data.cast("B")
    except (TypeError, ValueError):  # bfloat16, which numpy lacks; an empty tensor or complex numbers, without a cast
        return plain.reshape(-1).view(torch.uint8).numpy().data
