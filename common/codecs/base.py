"""Interface of a codec: one side encodes the parameters of a payload, the other decodes them.

A codec may have memory, such as its residual or the last payload. Encoder and decoder must then keep equal memories,
although a payload may be lost. So each payload is an attempt in two steps. `begin` encodes or decodes, and leaves the
memory unchanged. `commit` updates the memory, if the other side counts the payload; otherwise `rollback` discards the
attempt. A payload that is sent again has the same bytes and is not encoded again.

    encoder                         decoder
    begin(payload, bytes)           begin(bytes, payload)
    commit()                        commit()             both count it
    begin(payload, bytes)
    rollback()                      (never arrived)      the next begin sees the memory from before this one

Each file of this folder is a codec, and `ENTRY` names its class. The class attributes state what the codec can do.
There is no other list of codecs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from ...common.kinds import ContributionKind
from ..errors import Reason, UsageError, refusal
from ..tensors.layout import Layout, new_payload


class Coder(Protocol):
    """One side of one transport, in one direction.

    `commit` and `rollback` end the current attempt, and do nothing without an attempt. A second `begin` first rolls the
    current attempt back.
    """

    def begin(self, source: torch.Tensor, target: torch.Tensor, /) -> None:
        """Encode a payload, uint8 [>= parameter_bytes], into uint8 [encoded_bytes]; a decoder does the reverse.

        `source` stays unchanged. A decoder may raise any exception for bytes that no encoder makes. The caller then
        refuses the payload, and the memory stays unchanged.
        """

    def commit(self) -> None:
        """Keep the new memory, because the other side counts the payload."""

    def rollback(self) -> None:
        """Discard the attempt, because the other side will never count the payload."""


class Codec(ABC):
    """Encodes the parameters of a payload, bytes [0, layout.parameter_bytes). Buffers are sent unchanged."""

    name: str
    # The encoded bytes equal the payload's bytes, so payloads are read and written in place.
    is_identity: bool = False
    # Larger values become infinite, even if the payload's dtype can represent them.
    largest: float = math.inf
    # Tensors may be encoded one by one, as they become ready.
    goes_in_parts: bool = False
    # The worker adds the residual, multiplied by `decay`, to the next contribution (error feedback).
    has_feedback: bool = False
    decay: float = 1.0
    # Replies may be weights in this codec, and not only differences to a reference.
    takes_weights: bool = True
    # Whether the server's optimizer may be adaptive or have momentum (law 1 in docs/codecs.md). A residual comes later
    # in large values, which both kinds of optimizer amplify.
    suits_adaptive: bool = True
    suits_momentum: bool = True
    # Whether the server's outer optimizer may have momentum. A sparse codec sends most values of a difference late.
    suits_outer_momentum: bool = True
    # Only this optimizer of the server, and only these modes, can use the payload. None: all can.
    optimizer: str | None = None
    modes: tuple[str, ...] | None = None

    @abstractmethod
    def encoded_bytes(self, layout: Layout) -> int:
        """Return the number of encoded bytes, which is the same for every payload of this layout."""

    @abstractmethod
    def encoder(self, layout: Layout) -> Coder:
        """Return a new encoder with empty memory."""

    @abstractmethod
    def decoder(self, layout: Layout) -> Coder:
        """Return a new decoder with empty memory."""


class SelfContained(Codec):
    """A codec whose decoder needs no memory of earlier payloads."""

    @abstractmethod
    def encode(self, layout: Layout, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Encode as `Coder.begin` does."""

    @abstractmethod
    def decode(self, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        """Decode as `Coder.begin` does."""

    def encoder(self, layout: Layout) -> Coder:
        """Return an encoder without memory. A subclass may return an encoder with memory."""
        return _WithoutMemory(partial(self.encode, layout))

    def decoder(self, layout: Layout) -> Coder:
        """Return a decoder without memory."""
        return _WithoutMemory(partial(self.decode, layout))


class _WithoutMemory:
    def __init__(self, begin: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self.begin = begin

    def commit(self) -> None:
        """Do nothing, as there is no memory."""

    rollback = commit


class FreeBuffers:
    """A thread-safe pool of payload buffers. The first touch of 100 MB of new memory costs more than writing it.

    `limit`: the most buffers that the pool keeps.
    """

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._idle: list[torch.Tensor] = []

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer, uint8 [num_bytes], with old contents."""
        while self._idle:
            with suppress(IndexError):
                payload = self._idle.pop()
                if payload.numel() == num_bytes:
                    return payload
        return new_payload(num_bytes)

    def give_back(self, payload: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        if len(self._idle) < self._limit:
            self._idle.append(payload)


def _check_weights(mode: str, setting: str, codec: Codec) -> None:
    """Raise UsageError if workers send weights, of which a codec in either direction would lose the small steps."""
    if not codec.is_identity:
        raise UsageError(
            f"worker.{setting} is {codec.name}, and workers of this run in mode {mode} send weights, of which the "
            "codec would lose every small step",
            fix=f"--set worker.{setting}={codec.name} for ps-server too: localsgd then averages weight changes; or "
            "--mode diloco, which always does",
        )


def _check_reference(down: Codec) -> None:
    """Raise UsageError if replies cannot be differences in this codec."""
    if not down.goes_in_parts or down.optimizer is not None:
        raise UsageError(
            f"worker.reply_codec is {down.name}, with which workers approach the server's weights too slowly or never",
            fix="--set worker.reply_codec=q4 (or int8, bf16)",
        )


def _check_fragments(up: Codec, down: Codec, fragments: int) -> None:
    """Raise UsageError if the codecs cannot send a single fragment."""
    if up.has_feedback and not up.goes_in_parts:
        setting, codec, why, other = "codec", up, "needs the whole model at once for its residual", "q4"
    elif not down.is_identity and down.takes_weights:
        setting, codec, why, other = "reply_codec", down, "encodes only whole replies", "q4 (or int8, raw)"
    else:
        return
    raise UsageError(
        f"worker.{setting} is {codec.name}, which {why}; policy.fragments is {fragments}, so one fragment is sent",
        fix=f"--set worker.{setting}={other}, or --fragments 1",
    )


def _check_own(mode: str, up: Codec, optimizers: Iterable[tuple[str, object]]) -> None:
    """Raise UsageError if the codec needs another mode or another optimizer."""
    if up.modes is not None and mode not in up.modes:
        raise UsageError(
            f"worker.codec is {up.name}, which is for --mode {' or '.join(up.modes)}, and the mode is {mode}",
            fix=f"--mode {up.modes[0]}; or --set worker.codec=q4",
        )
    for name, _ in optimizers:
        if up.optimizer not in (None, name):
            raise UsageError(
                f"worker.codec is {up.name}, which needs the optimizer {up.optimizer}, and the optimizer is {name}",
                fix=f"--optimizer {up.optimizer.lower()}, in a script paramserver.{up.optimizer}(model.parameters(), "
                "warmup_steps=...); or --set worker.codec=q4",
            )


# Classes in torch.optim that step along the gradient itself. All others divide it by its usual size.
_LINEAR = ("SGD", "ASGD")


def check_codecs(
    mode: str,
    kind: ContributionKind,
    up: Codec,
    down: Codec,
    optimizers: Iterable[tuple[str, Mapping[str, object]]] = (),
    fragments: int = 1,
) -> None:
    """Raise UsageError if a run cannot use `up` for contributions or `down` for replies.

    `kind`: the kind of contribution in this mode. `optimizers`: class name and arguments of each parameter group of the
    server's optimizer, or empty if they are not known yet. `fragments`: the number of fragments of the model.
    """
    if fragments > 1:
        _check_fragments(up, down, fragments)
    for setting, codec in (("codec", up), ("reply_codec", down)) if not kind.may_lose else ():
        _check_weights(mode, setting, codec)
    if not down.takes_weights:
        _check_reference(down)
    _check_own(mode, up, optimizers)
    for name, arguments in optimizers if kind.steps_along_mean_gradient and up.optimizer is None else ():
        if not up.suits_adaptive and name not in _LINEAR:
            why = f"{name} divides every gradient by its usual size, and the codec makes most of them 0 or equal"
        elif not up.suits_momentum and arguments.get("momentum"):
            why = f"{name} has momentum {arguments['momentum']}, which amplifies the values that the codec sends late"
        else:
            continue
        raise UsageError(
            f"worker.codec is {up.name}: {why}; this trains worse than without a residual (docs/codecs.md)",
            fix="--mode diloco, which runs this optimizer in the workers; or --set worker.codec=q4",
        )


def payload_bytes(codec: Codec, layout: Layout) -> int:
    """Return the number of bytes of every payload in this codec: encoded parameters plus buffers."""
    return codec.encoded_bytes(layout) + layout.exchange_bytes - layout.parameter_bytes


def begin_payload(
    codec: Codec, encoder: Coder, layout: Layout, payload: torch.Tensor, free_buffers: FreeBuffers | None = None
) -> torch.Tensor:
    """Encode `payload`, uint8 [>= exchange_bytes], and return uint8 [payload_bytes]: parameters, then buffers.

    The returned memory comes from `free_buffers`. The caller gives it back.
    """
    encoded_bytes = codec.encoded_bytes(layout)
    out = (free_buffers or FreeBuffers()).lend(payload_bytes(codec, layout))
    encoder.begin(payload, out[:encoded_bytes])
    out[encoded_bytes:].copy_(payload[layout.parameter_bytes : layout.exchange_bytes])
    return out


def take_payload(codec: Codec, decoder: Coder, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
    """Decode uint8 [payload_bytes] into `payload`, uint8 [>= exchange_bytes].

    Raises a BAD_REQUEST refusal for bytes that the codec cannot decode, and leaves the decoder's memory unchanged.
    """
    encoded_bytes = codec.encoded_bytes(layout)
    try:
        decoder.begin(encoded[:encoded_bytes], payload)
    except Exception as error:
        decoder.rollback()
        cause = f"{type(error).__name__}: {error}"
        raise refusal(Reason.BAD_REQUEST, f"codec '{codec.name}' cannot decode: {cause}") from error
    payload[layout.parameter_bytes : layout.exchange_bytes].copy_(encoded[encoded_bytes:])
