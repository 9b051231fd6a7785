"""What a codec is: how one side writes the parameters of a payload, and the other reads them, with the memory of both.

A codec may remember (what it left out, what it sent last): then both sides must remember the same, whatever is lost
between them. So each payload is an attempt: `begin` works it out from the memory, and changes nothing yet; `commit`,
when the other side counts it, makes the memory what `begin` led to; `rollback`, when it does not, forgets that. A
payload that is sent again is not encoded again: it is the same bytes.

    encoder                         decoder
    begin(payload, bytes)              begin(bytes, payload)
    commit()                        commit()             both count it
    begin(payload, bytes)
    rollback()                      (never came)         the next begin is as if this one had not been

A file of this folder is a codec: `ENTRY` is its class. Its attributes say what it is able to do, and no list of codecs
stands anywhere else.
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
    """One side of one transport, in one direction. `commit` and `rollback` end the attempt that was begun, and do
    nothing when there is none; a `begin` after a `begin` is a `rollback` first."""

    def begin(self, source: torch.Tensor, target: torch.Tensor, /) -> None:
        """Of an encoder: a payload, uint8 [>= parameter_bytes], to uint8 [encoded_bytes]; a decoder's way is back. The
        source stays as it is. A decoder may raise anything for bytes that no encoder makes: that is refused, and
        nothing is remembered."""

    def commit(self) -> None:
        """The other side counts what was begun last."""

    def rollback(self) -> None:
        """It does not, and never will."""


class Codec(ABC):
    """Encodes the parameters' part of a payload, [0, layout.parameter_bytes). Buffers travel as they are."""

    name: str
    # The encoded bytes are the payload's own: nothing is encoded, and payloads are read and written in place.
    is_identity: bool = False
    # Beyond it a value becomes infinite, where the dtype of the payload has larger ones.
    largest: float = math.inf
    # Tensors may be encoded one by one, as they are ready.
    goes_in_parts: bool = False
    # What it leaves out of a contribution is to be added to the next one (error feedback), times `decay`.
    has_feedback: bool = False
    decay: float = 1.0
    # It may encode weights themselves, and not only what is added to them.
    takes_weights: bool = True
    # Gradients in it may be what a server's optimizer takes that divides by their size, or adds them up (law 1 in
    # docs/codecs.md): what is left out of one comes later, in lumps, which both make worse.
    suits_adaptive: bool = True
    suits_momentum: bool = True
    # Likewise differences, and the outer momentum of a server: few values of each are sent, and long after the others.
    suits_outer_momentum: bool = True
    # What is sent is of no use but to this optimizer of the server, and in these modes; None: to any.
    optimizer: str | None = None
    modes: tuple[str, ...] | None = None

    @abstractmethod
    def encoded_bytes(self, layout: Layout) -> int:
        """Size of the encoded part for every payload of this layout."""

    @abstractmethod
    def encoder(self, layout: Layout) -> Coder:
        """A new one, which remembers nothing."""

    @abstractmethod
    def decoder(self, layout: Layout) -> Coder:
        """A new one, which remembers nothing."""


class SelfContained(Codec):
    """A codec whose payloads are decoded without memory of earlier ones. `Coder.begin` says what `encode` and `decode`
    do."""

    @abstractmethod
    def encode(self, layout: Layout, payload: torch.Tensor, out: torch.Tensor) -> None: ...

    @abstractmethod
    def decode(self, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None: ...

    def encoder(self, layout: Layout) -> Coder:
        """One without memory; a subclass may have an encoder that remembers."""
        return _WithoutMemory(partial(self.encode, layout))

    def decoder(self, layout: Layout) -> Coder:
        return _WithoutMemory(partial(self.decode, layout))


class _WithoutMemory:
    def __init__(self, begin: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self.begin = begin

    def commit(self) -> None:
        """Nothing is remembered."""

    rollback = commit


class FreeBuffers:
    """Memory that is lent again: touching 100 MB of new memory costs more than filling it. From any thread; at most
    `limit` payloads lie idle."""

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._idle: list[torch.Tensor] = []

    def lend(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], with old contents."""
        while self._idle:
            with suppress(IndexError):
                payload = self._idle.pop()
                if payload.numel() == num_bytes:
                    return payload
        return new_payload(num_bytes)

    def give_back(self, payload: torch.Tensor) -> None:
        if len(self._idle) < self._limit:
            self._idle.append(payload)


def _or_differences(setting: str, codec: Codec) -> str:
    """What to do where weights are sent."""
    message = f"--set worker.{setting}={codec.name} for ps-server too, whose localsgd then takes how far workers went"
    return f"{message}; or --mode diloco, which always does; or --set worker.{setting}=bf16"


def _check_reference(mode: str, kind: ContributionKind, down: Codec) -> None:
    """Whether replies may be differences in this codec."""
    if not kind.may_lose:
        raise UsageError(
            f"worker.reply_codec is {down.name}, and workers of this run in mode {mode} send weights, in which what "
            "it leaves out would be lost",
            fix=_or_differences("reply_codec", down),
        )
    if not down.goes_in_parts or down.optimizer is not None:
        raise UsageError(
            f"worker.reply_codec is {down.name}, with which the workers' weights come near the server's late or never",
            fix="--set worker.reply_codec=q4 (or int8, bf16)",
        )


def _check_fragments(up: Codec, down: Codec, fragments: int) -> None:
    """Whether a fragment may travel by itself."""
    if up.has_feedback and not up.goes_in_parts:
        setting, codec, why, other = "codec", up, "keeps what it leaves out of all", "q4"
    elif not down.is_identity and down.takes_weights:
        setting, codec, why, other = "reply_codec", down, "has replies whole", "q4 (or int8, raw)"
    else:
        return
    raise UsageError(
        f"worker.{setting} is {codec.name}, which {why}, and policy.fragments is {fragments}, of which one travels",
        fix=f"--set worker.{setting}={other}, or --fragments 1",
    )


def _check_own(mode: str, up: Codec, optimizers: Iterable[tuple[str, object]]) -> None:
    """Whether a codec with an optimizer of its own has that optimizer, in one of its modes."""
    if up.modes is not None and mode not in up.modes:
        raise UsageError(
            f"worker.codec is {up.name}, which is for --mode {' or '.join(up.modes)}, and the mode is {mode}",
            fix=f"--mode {up.modes[0]}; or --set worker.codec=q4",
        )
    for name, _ in optimizers:
        if up.optimizer not in (None, name):
            raise UsageError(
                f"worker.codec is {up.name}, which sends what {up.optimizer} steps along, and the optimizer is {name}",
                fix=f"--optimizer {up.optimizer.lower()}, in a script paramserver.{up.optimizer}(model.parameters(), "
                "warmup_steps=...); or --set worker.codec=q4",
            )


# Of torch.optim, those that step along the gradient as it is; all others divide it by what it usually is.
_LINEAR = ("SGD", "ASGD")


def check_codecs(
    mode: str,
    kind: ContributionKind,
    up: Codec,
    down: Codec,
    optimizers: Iterable[tuple[str, Mapping[str, object]]] = (),
    fragments: int = 1,
) -> None:
    """Whether workers of a mode that contribute this kind may send in one codec and be replied in another; UsageError.
    `optimizers`: the server's, class and arguments of each group; none where they are not known yet."""
    if fragments > 1:
        _check_fragments(up, down, fragments)
    if not down.takes_weights:
        _check_reference(mode, kind, down)
    if not kind.may_lose and not up.takes_weights:
        raise UsageError(
            f"worker.codec is {up.name}, and workers of this run in mode {mode} send weights, of which it leaves out "
            "too much",
            fix=_or_differences("codec", up),
        )
    _check_own(mode, up, optimizers)
    for name, arguments in optimizers if kind.steps_along_mean_gradient and up.optimizer is None else ():
        if not up.suits_adaptive and name not in _LINEAR:
            why = f"{name} divides every gradient by its usual size, and most of them are 0 or all alike now"
        elif not up.suits_momentum and arguments.get("momentum"):
            why = f"{name} has momentum {arguments['momentum']}, and adds up what comes late"
        else:
            continue
        raise UsageError(
            f"worker.codec is {up.name}: {why}; measured, that is worse than sending nothing late",
            fix="--mode diloco, whose workers keep such an optimizer to themselves; or --set worker.codec=q4",
        )


def payload_bytes(codec: Codec, layout: Layout) -> int:
    """Size of every payload that is exchanged in this codec."""
    return codec.encoded_bytes(layout) + layout.exchange_bytes - layout.parameter_bytes


def begin_payload(
    codec: Codec, encoder: Coder, layout: Layout, payload: torch.Tensor, free_buffers: FreeBuffers | None = None
) -> torch.Tensor:
    """`payload` uint8 [>= exchange_bytes] as it is sent, uint8 [payload_bytes]: parameters encoded, then buffers.
    The memory of what is returned is lent by `free_buffers`."""
    encoded_bytes = codec.encoded_bytes(layout)
    out = (free_buffers or FreeBuffers()).lend(payload_bytes(codec, layout))
    encoder.begin(payload, out[:encoded_bytes])
    out[encoded_bytes:].copy_(payload[layout.parameter_bytes : layout.exchange_bytes])
    return out


def take_payload(codec: Codec, decoder: Coder, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
    """What was sent, uint8 [payload_bytes], into `payload`, uint8 [>= exchange_bytes].

    Raises a BAD_REQUEST refusal for bytes that the codec cannot decode, as if they had never come.
    """
    encoded_bytes = codec.encoded_bytes(layout)
    try:
        decoder.begin(encoded[:encoded_bytes], payload)
    except Exception as error:
        decoder.rollback()
        cause = f"{type(error).__name__}: {error}"
        raise refusal(Reason.BAD_REQUEST, f"codec '{codec.name}' cannot decode: {cause}") from error
    payload[layout.parameter_bytes : layout.exchange_bytes].copy_(encoded[encoded_bytes:])
