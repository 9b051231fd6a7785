"""Decodes many requests at once, a step at a time, on one thread (iteration-level scheduling: Orca, OSDI 2022).

Each step admits waiting requests, computes one chunk of a prompt and one token of every other sequence, and removes the
sequences that have ended. A new version of the weights takes over between two steps.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..common.config.schema import ServeConfig
from ..common.reporting.log import get_logger
from .errors import MOST_PAUSES, Paused, Refused
from .infer import InferQueue, Reply, Tensors
from .models import LanguageModel
from .slots import Slots, Version
from .text import TextPieces

if TYPE_CHECKING:
    from .stages import Stages

log = get_logger()


# ---- sampling ------------------------------------------------------------------------------------
# Chooses the next token of a sequence from its logits.


_LEAST_TEMPERATURE = 1e-30  # a smaller one is 0 in float32


@dataclass(frozen=True)
class Sampling:
    """The rule that draws tokens. Temperature 0 takes the likeliest token; `top_k` 0 sets no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    num_logprobs: int | None = None  # likeliest tokens to name with each; None: no probabilities

    def generator(self) -> torch.Generator:
        """Return the random numbers of one request. So other requests in a batch change no draw."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return torch.Generator().manual_seed(seed)


class Chosen(NamedTuple):
    """A token, with its log probability and the likeliest tokens if the request wants them."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> Chosen:
    """Return the next token from logits (V,).

    Log probabilities are those of the model, before temperature and limits.
    """
    if not logits.max().isfinite():  # max() of NaN is NaN; a token that is never drawn may have -inf
        raise ValueError("the logits are not finite")
    token = _draw(logits, sampling, generator)
    if sampling.num_logprobs is None:
        return Chosen(token)
    logprobs = logits.float().log_softmax(-1)
    values, tokens = logprobs.topk(min(sampling.num_logprobs, int(logprobs.isfinite().sum())))
    return Chosen(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    # The likeliest token has 0 here, so that no temperature makes its quotient infinite.
    scaled = (logits.float() - logits.max()) / max(sampling.temperature, _LEAST_TEMPERATURE)
    probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
    if sampling.top_k:
        probabilities = probabilities[: sampling.top_k]
    # Nucleus sampling (Holtzman et al., 2020): the fewest tokens that have top_p together.
    before = probabilities.cumsum(0) - probabilities
    is_kept = before < sampling.top_p
    is_kept[0] = True  # top_p may be 0 in float32
    return int(tokens[torch.multinomial(probabilities * is_kept, 1, generator=generator)])


# ---- engine --------------------------------------------------------------------------------------


_CHUNK = 256  # tokens of a prompt in one step; the other sequences wait for them


@dataclass(frozen=True)
class Request:
    """A request for text. `version` is the fingerprint of the wanted weights, or RUN:NUMBER; empty: the newest."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    version: str = ""


class Piece(NamedTuple):
    """Text that no later token changes, with the newest token."""

    text: str
    chosen: Chosen


class End(NamedTuple):
    """The end of a reply: `stop`, `length`, or `cancelled`. `version`: the weights that computed the last token."""

    reason: str
    text: str  # that was held back
    num_tokens: int
    version: Version
    num_swaps: int  # how often another version took over


Models = Mapping[int, nn.Module] | Sequence[nn.Module]  # by slot
Emit = Callable[[Piece | End | Refused], None]  # called on the engine's thread


@dataclass(eq=False)
class Job:
    """A request from its arrival to its end."""

    request: Request
    emit: Emit
    pieces: TextPieces
    generator: torch.Generator
    tokens: list[int]
    slot: int = -1
    row: int = -1  # in the cache
    num_cached: int = 0
    num_swaps: int = 0
    num_pauses: int = 0  # since its newest token
    is_cancelled: bool = False
    version: Version | None = field(default=None)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class Engine:
    """Computes the replies of several versions. `models`, one for each slot, share no memory.

    With `stages`, the models are in several processes. Replies pause while one of them is away.
    """

    def __init__(
        self, task: Any, models: Models, kind: LanguageModel | None, options: ServeConfig,
        stages: Stages | None = None,
    ) -> None:  # fmt: skip
        self._stages = stages
        if stages is not None:
            stages.has_changed = self._wake
        self.task, self.kind, self.options = task, kind, options
        self.models = models
        self.slots = Slots()
        self._cache = kind.new_cache(models[0], options.slots) if kind is not None else None
        self._active: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._drains_until = 0.0
        self._changed = threading.Condition()  # guards everything that another thread reads or writes
        self._inferring = InferQueue(task, options.queue, self._changed)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- from other threads -------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step. Open requests are refused."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def submit(self, request: Request, emit: Emit) -> Job:
        """Queue a request. Raises Refused if it cannot be served or the queue is full."""
        assert self.kind is not None
        if (excess := len(request.prompt) + request.max_tokens - self.kind.context) > 0:
            message = f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: together "
            message += f"{excess} more than the context of {self.kind.context}"
            param = "max_tokens" if len(request.prompt) < self.kind.context else "prompt"
            raise Refused(400, message, "context_length_exceeded", param)
        with self._changed:
            version = self.slots.versions[self._slot_of(request)]
            if request.version and version is not None:  # a number may name another version later
                request = replace(request, version=version.fingerprint)
            if len(self._waiting) >= self.options.queue + max(0, self.options.slots - len(self._active)):
                message = f"{len(self._waiting)} requests wait already, which is the maximum (serve.queue)"
                raise Refused(429, message, "queue_full")
            pieces = TextPieces(self.task.decode, request.stop)
            sequence = Job(request, emit, pieces, request.sampling.generator(), list(request.prompt))
            self._waiting.append(sequence)
            self._changed.notify()
        return sequence

    def cancel(self, sequence: Job) -> None:
        """End a request before its next step, because its client is gone."""
        with self._changed:
            sequence.is_cancelled = True
            if sequence in self._waiting:  # also while replies pause
                self._end(sequence, "cancelled")
            self._changed.notify()

    def infer(self, inputs: Tensors) -> Reply:
        """Queue a forward pass of named tensors, whose first axis is the batch. Raises Refused."""
        with self._changed:
            self._serving()
            self._changed.notify()
            return self._inferring.add(inputs)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    @property
    def pause(self) -> str:
        """The stages that are away, and why. Empty: none, so that replies do not pause."""
        return "" if self._stages is None else self._stages.problem

    def late(self) -> Refused:
        """Return the refusal of a request that has waited too long."""
        work = f"{self.num_active} requests are decoded, {self.num_waiting + len(self._inferring)} wait"
        message = f"nothing came for {self.options.reply_s:g} s (serve.reply_s): {self.pause or work}"
        return Refused(504, message, "timeout")

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def versions(self) -> list[Version]:
        """Return the versions that reply, the newest first."""
        with self._changed:
            return [version for slot in reversed(self.slots.live()) if (version := self.slots.versions[slot])]

    def begin_arrival(self) -> int | None:
        """Return the slot to write a new version to, or None while it could not be published."""
        with self._changed:
            old = self.slots.draining
            must_wait = old is not None and self._is_used(old) and time.monotonic() < self._drains_until
            slot = None if must_wait else self.slots.begin()
        if slot is not None:
            self.models[slot].eval()
        return slot

    def arrived(self, slot: int, version: Version | None) -> None:
        """Note that the version in this slot is complete. None: it could not be fetched."""
        with self._changed:
            self.slots.arrived(slot, version)
            self._changed.notify()

    def _serving(self) -> int:
        # A complete version is published before the next step.
        slot = self.slots.whole if self.slots.serving is None else self.slots.serving
        if slot is None:
            raise Refused(503, "no weights have arrived yet", "not_ready")
        return slot

    def _slot_of(self, request: Request) -> int:
        slot = self._serving()
        if not request.version:
            return slot
        here = {at: version for at, version in enumerate(self.slots.versions) if version is not None}
        # By the fingerprint, or by the run and the number alone, which may name two versions.
        wanted = request.version
        found = [at for at, it in here.items() if wanted in (it.fingerprint, f"{it.run}:{it.number}")]
        if len(found) != 1:
            problem = f"{len(found)} versions are called" if found else "no version is called"
            names = ", ".join(here[at].model for at in found or here)
            raise Refused(404, f"{problem} {request.version[:80]}; there are: {names}", "model_not_found", "model")
        return found[0]

    # ---- on the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        while self._next_step():
            if self._stages is not None and self._stages.has_lost:
                self._stages.has_lost = False
                for sequence in self._active:
                    sequence.num_cached = 0
            try:
                with torch.no_grad():
                    self._step()
            except Paused:
                pass
            except Exception as error:  # of this program; without the thread, all requests would wait forever
                self._refuse_all(Refused(500, f"ps-serve failed: {type(error).__name__}: {error}", "internal_error"))
        self._refuse_all(Refused(503, "ps-serve is stopping", "stopping"))

    def _next_step(self) -> bool:
        """Wait for work, and choose the sequences of the next step. Return False at the end."""
        with self._changed:
            while not self._is_stopped:
                has_work = self._active or self._waiting or self._inferring or self.slots.whole is not None
                if has_work and not self.pause:
                    self._swap()
                    for sequence in [*self._active, *self._waiting]:
                        if sequence.is_cancelled:
                            self._end(sequence, "cancelled")
                    self._admit()
                    return True
                self._changed.wait()
            return False

    def _refuse_all(self, reason: Refused) -> None:
        if reason.status == 500:
            log.error("serve_failed", error=reason.message)
        with self._changed:
            for sequence in [*self._active, *self._waiting]:
                self._release(sequence)
                sequence.emit(reason)
            self._inferring.refuse(reason)

    def _is_used(self, slot: int) -> bool:
        return any(sequence.slot == slot for sequence in self._active)

    def _swap(self) -> None:
        """Publish a complete version, once no sequence uses the version before the serving one."""
        if self.slots.whole is None:
            return
        if (old := self.slots.draining) is not None:
            if time.monotonic() > self._drains_until:
                self._move(old, True)
            if self._is_used(old):
                return
            self.slots.drained()
        draining = self.slots.publish()
        version = self.slots.versions[self._serving()]
        assert version is not None
        log.info("serving", version=version.number, run=version.run)
        self._drains_until = time.monotonic() + self.options.drain_s
        if draining is not None and self.options.swap != "pinned":
            self._move(draining, self.options.swap == "recompute")

    def _move(self, draining: int, computes_again: bool) -> None:
        """Move the sequences of a version to the serving one. Keep their keys and values, or compute these again."""
        for sequence in self._active:
            if sequence.slot == draining:
                sequence.slot = self._serving()
                sequence.num_swaps += 1
                sequence.num_cached = 0 if computes_again else sequence.num_cached

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.options.slots:
            sequence = self._waiting.popleft()
            try:
                sequence.slot = self._slot_of(sequence.request)
            except Refused as refused:  # the version has drained since
                sequence.emit(refused)
                continue
            sequence.row = self._cache.take() if self._cache is not None else -1
            self._active.append(sequence)

    def _step(self) -> None:
        """For each version, compute one chunk of one prompt and one token of every other sequence."""
        for slot in self.slots.live():
            sequences = [sequence for sequence in self._active if sequence.slot == slot]
            has_cache = self._cache is not None
            new = [sequence for sequence in sequences if has_cache and len(sequence.tokens) - sequence.num_cached > 1]
            # A sequence that has seen a pause is computed alone: it may be the reason.
            alone = [item for item in sequences if item not in new and (item.num_pauses or not has_cache)]
            together = [item for item in sequences if item not in new and item not in alone]
            for batch in filter(None, [new[:1], together, *([item] for item in alone)]):
                self._compute(slot, sorted(batch, key=lambda sequence: sequence.row))
        if self._inferring:
            slot = self._serving()
            version = self.slots.versions[slot]
            assert version is not None
            self._inferring.compute(self.models[slot], version)

    def _compute(self, slot: int, batch: list[Job]) -> None:
        """Compute the next tokens of these sequences, or the next chunk of a prompt."""
        try:
            logits = self._logits(slot, batch)
            if logits.dim() != 2 or len(logits) != len(batch):
                raise ValueError(f"the logits of {len(batch)} texts have shape {list(logits.shape)}")
        except Paused as paused:
            for sequence in batch:
                sequence.num_pauses += 1
                if sequence.num_pauses >= MOST_PAUSES:
                    self._fail(sequence, paused)
            raise
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0], error)
            else:  # only the sequences that fail alone end
                for sequence in batch:
                    self._compute(slot, [sequence])
            return
        for sequence, row in zip(batch, logits, strict=True):
            if self._cache is None or sequence.num_cached == len(sequence.tokens):
                sequence.version = self.slots.versions[slot]
                try:
                    self._take(sequence, choose(row, sequence.request.sampling, sequence.generator))
                except Exception as error:  # logits that are not finite, or the task's decode()
                    self._fail(sequence, error)

    def _logits(self, slot: int, batch: list[Job]) -> torch.Tensor:
        assert self.kind is not None
        model = self.models[slot]
        if self._cache is None:
            return self.kind.next_logits(model, torch.tensor([sequence.tokens for sequence in batch]), None)
        parts = [sequence.tokens[sequence.num_cached :][:_CHUNK] for sequence in batch]
        lengths = [sequence.num_cached for sequence in batch]
        view = self._cache.view([sequence.row for sequence in batch], lengths, len(parts[0]))
        logits = self.kind.next_logits(model, torch.tensor(parts), view)
        for sequence in batch:
            sequence.num_cached += len(parts[0])
        return logits

    def _take(self, sequence: Job, chosen: Chosen) -> None:
        if chosen.token == getattr(self.task, "end", None):
            self._end(sequence, "stop")
            return
        sequence.tokens.append(chosen.token)
        sequence.num_pauses = 0
        is_last = sequence.num_generated >= sequence.request.max_tokens
        sequence.emit(Piece(sequence.pieces.push(chosen.token, is_last), chosen))
        if sequence.pieces.is_stopped or is_last:
            self._end(sequence, "stop" if sequence.pieces.is_stopped else "length")

    def _end(self, sequence: Job, reason: str) -> None:
        self._release(sequence)
        version = sequence.version or Version("", 0, 0)
        rest = "" if reason == "cancelled" else sequence.pieces.rest()
        sequence.emit(End(reason, rest, sequence.num_generated, version, sequence.num_swaps))

    def _fail(self, sequence: Job, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        log.error("serve_failed", error=reason, tokens=len(sequence.tokens))
        self._release(sequence)
        sequence.emit(Refused(500, f"the model failed: {reason}", "model_failed"))

    def _release(self, sequence: Job) -> None:
        if sequence in self._active:
            self._active.remove(sequence)
            if self._cache is not None:
                self._cache.give_back(sequence.row)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
