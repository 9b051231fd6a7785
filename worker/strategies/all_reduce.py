"""Averaging among all-reduce peers (`--mode allreduce`): what a training step does where no server has the gradients.

    backward | average over the group | report -> reply | step | next batch

The report says that this worker holds the mean; the reply, that all members do. Only then does it step: so a member
that dies before it has reported leaves nobody a step ahead, and the others average what they still hold once more, in
the group that the reply names. Who comes anew gets weights and optimizer from a member when the group first meets.

A step whose weights the server wants is taken ahead of its reply, on top of a copy to go back to.
"""

from __future__ import annotations

import copy
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeVar
from zlib import crc32

import torch

from ...common.config.addresses import split_address
from ...common.errors import DivergedError, Reason, UnreachableError, UsageError, refusal
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.clipping import clip
from ...common.tensors.layout import Kind
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import COUNTED, CompletionInfo, Contribution, Outcome, Reply
from ..conversation.exchange import Exchange
from ..conversation.messages import Final, Goodbye, Outgoing
from ..conversation.pool import Helper
from ..conversation.security import check_plaintext
from ..session import Progress
from ..tensors.transfer import ModelTensors
from ..tensors.watch import Watch
from .buckets import leaving_order
from .collectives.backends import computed, without_watchdog
from .collectives.rendezvous import Broken, Generation, OutOfReach, Rendezvous
from .direct import Direct, check_takes_dense
from .early import MIN_MODEL_BYTES, ReadyGradients
from .group import Group, Unsound, own_address

log = get_logger()
Found = TypeVar("Found")

_NOTHING = Outgoing(Contribution())
_NOBODY = -1  # in the place of a version
_LOOK_UP_S = 0.2
_FORMING_S = 60.0  # Gloo tries to connect five times 10 s
_NUM_SAMPLED = 16  # elements of a tensor
_MAY_DIFFER = 1e-3  # weights of members, relatively
_IN_PLAINTEXT = (
    "the server speaks TLS, members among themselves plain TCP, for torch's Gloo has no TLS: keep them on a network of "
    "their own (a tunnel), or take --mode sync"
)


class AllReduceStrategy(Direct):
    """`own` is the optimizer of this worker, and what steps it."""

    own: tuple[torch.optim.Optimizer, Callable[[], object]]
    _manner: tuple[int, int] = (0, 0)  # worker.zero, worker.zero_copies

    def __init__(self, exchange: Exchange, may_leave_early: bool) -> None:
        """`may_leave_early`: gradients may be averaged during backward."""
        super().__init__(exchange, may_send_early=False)
        self._may_leave_early = may_leave_early
        host = own_address(exchange.server)
        check_plaintext(
            host, f"rank {exchange.progress.rank} and those it averages with", exchange.trusts_network,
            "or take --mode sync, in which workers speak to the server only",
        )  # fmt: skip
        self._rendezvous = Rendezvous(host)
        exchange.rendezvous = "{}:{}".format(*self._rendezvous.address)
        self._group: Group | None = None
        self._held_version = _NOBODY  # that the model here is at,
        self._has_state = False  # and the optimizer, as far as anybody's is
        self._has_stepped = False
        self._generation: Generation | None = None  # of the group that there is, or is being formed
        self._over = ""  # generation that did not come together
        self._num_sent = 0.0  # bytes to members of groups that are over
        self._num_failed = 0  # groups in a row that did not come together, of the same members:
        self._failing: tuple[int, ...] = ()
        self._helper = Helper("group")
        self._forming: list[Helper] = []  # each still at a group that is nobody's
        if exchange.is_encrypted:
            log.warning("group_in_plaintext", meaning=_IN_PLAINTEXT)

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self._exchange.start(model, optimizer)
        self._held_version = _NOBODY
        self._order = leaving_order(model)
        entries = list(enumerate(model.layout.entries))
        self._of_lowest = frozenset(index for index, entry in entries if not entry.spec.averaged)
        self._trained = [index for index, entry in entries if entry.spec.kind is Kind.PARAMETER]
        self._of_sum = frozenset(self._trained) if optimizer.reduction == "sum" else frozenset()
        devices = {tensor.device for tensor in model.tensors}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        if self._device.type == "cuda":  # groups are made on other threads, again and again
            without_watchdog()
        if self._may_leave_early and model.layout.exchange_bytes >= MIN_MODEL_BYTES:
            self._ready_gradients = ReadyGradients(model, self._leave_early)

    def ready(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """The optimizer is here: returns when this worker has the weights of the newest version, and its state."""
        if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} computes gradients within its step, and workers of mode "
                f"{self.settings.mode} "
                "average them before it",
                fix="take an optimizer that steps along gradients that are there, such as AdamW; or --mode localsgd",
            )
        check_takes_dense(
            optimizer, f"workers of mode {self.settings.mode}", "or --mode localsgd, where each worker steps by itself"
        )
        self.own = optimizer, step
        self._weights, self._initial = Watch(self._model), copy.deepcopy(optimizer.state_dict()["state"])
        self._enter()

    def _leave_early(self, index: int, gradient: torch.Tensor) -> None:
        if self._group is not None:
            self._group.ready(index, gradient)

    # ---- the group --------------------------------------------------------------------------

    def _enter(self) -> None:
        """After a START."""
        while True:
            group = self._exchange.group
            self._held_version = self._said.version if group.has_weights else _NOBODY
            if group.has_weights:
                self._remember()
            if self._said.is_done or self._may_meet():  # done: there is no step to come
                return
            self._report_broken()

    @property
    def _said(self) -> Progress:
        """What the server said last."""
        return self._exchange.progress

    def _may_meet(self) -> bool:
        """Come together with the members of the newest generation, if this is another one; False where that failed."""
        told, rank = self._exchange.group, self._said.rank
        name = f"{self._said.run}/{self._said.server_incarnation}/{told.generation}"
        if self._group is not None and self._group.generation.name == name:
            return True
        if name == self._over:
            return False
        self._close_group()
        if rank is None or rank not in told.members or not told.rendezvous:
            what = f"rank {rank} a group of {len(told.members)} members without it, or with no Group.rendezvous"
            raise refusal(Reason.BAD_REQUEST, f"the server sent {what}")
        generation = Generation(told.generation, tuple(told.members), split_address(told.rendezvous), name, told.secret)
        self._generation = generation
        try:
            group = self._group = self._here(lambda: Group(generation, rank, self._rendezvous, self._device))
            group.like = [tensor for tensor in self._model.sources(ContributionKind.WEIGHTS) if tensor is not None]
            group.order, group.of_lowest, group.of_sum = self._order, self._of_lowest, self._of_sum
            self._agree(group)
            self._level(group)
        except Broken as broken:
            log.warning("group_broken", rank=rank, reason=str(broken))
            self._close_group()
            self._over = name
            self._failed(generation.members, broken)
            return False
        self._num_failed = 0
        if group.not_over_nccl:
            log.info("not_over_nccl", rank=rank, reason=group.not_over_nccl)
        log.routine(
            "group", rank=rank, generation=generation.number, members=len(generation.members), backend=group.backend
        )
        return True

    def _failed(self, members: tuple[int, ...], broken: Broken) -> None:
        """Not for ever: who is gone is in no group that the server names afterwards. UnreachableError."""
        self._num_failed = self._num_failed + 1 if members == self._failing else 1
        self._failing = members
        if self._num_failed < broken.attempts:
            return
        told = str(broken)
        if not isinstance(broken, OutOfReach):
            told = f"rank {self._said.rank} and those it is to average with did not come together: {broken}"
        raise UnreachableError(
            told,
            fix="let workers reach each other's ports, and start each with the server's address as other hosts know it "
            "(not 127.0.0.1); or --mode sync, where workers need to reach the server only",
        )

    def _agree(self, group: Group) -> None:
        """UsageError where another one divides otherwise; the lowest is right. Broken."""
        stage, copies = self._manner
        manners = self._here(lambda: group.told(10 * stage + copies))
        if manners[group.index] != manners[0]:
            raise UsageError(
                f"{_in_words(stage, copies)} for rank {self._said.rank}, and {_in_words(*divmod(manners[0], 10))} for "
                f"rank {group.generation.members[0]}, with which it is to average",
                fix="start all workers with the same",
            )
        states = self._here(lambda: group.told(self._begun_with()))
        begun = [state for state in states if state]
        if (mine := states[group.index]) and mine != (most := _most(begun)):
            other = group.generation.members[states.index(most)]
            raise UsageError(
                f"the optimizer of rank {self._said.rank} begins with another state than that of rank {other}: their "
                "weights would go apart",
                fix="load the same state in every script, before session.optimizer(), or in none",
            )

    def _begun_with(self) -> int:
        """The optimizer's state where nobody has stepped, in short; 0 afterwards."""
        return 0 if self._held_version or self._has_stepped else 1 + _crc(self._own_state())

    def _own_state(self) -> Any:
        return self.own[0].state_dict()["state"]

    def _level(self, group: Group) -> None:
        """All members have the weights of the newest version, and what the optimizer of who had them remembers."""
        mine = 2 * self._held_version + self._has_state
        held = self._here(lambda: group.told(mine))
        newest, best = self._said.version, max(held)
        if all(text == best for text in held) and best // 2 == newest:
            return
        if best // 2 != newest:
            raise nobody_has(newest)
        giver = held.index(best)
        found = self._given_by(group, giver)
        if mine != best:
            self._learn(found)
            self._held_version, self._has_state = newest, bool(best % 2)
            log.info(
                "taught",
                rank=self._said.rank,
                by=group.generation.members[giver],
                version=newest,
                bytes=group.given_bytes,
            )

    def _given_by(self, group: Group, giver: int) -> dict[str, Any]:
        mine = self._gift() if giver == group.index else None
        return self._here(lambda: group.give(mine, giver))

    def _gift(self, **more: Any) -> dict[str, Any]:
        tensors = [
            tensor.detach().cpu() for tensor in self._model.sources(ContributionKind.WEIGHTS) if tensor is not None
        ]
        return {"tensors": tensors, "optimizer": self.own[0].state_dict(), **more}

    def _learn(self, found: dict[str, Any]) -> None:
        """What another one has given."""
        for mine, theirs in zip(self._model.sources(ContributionKind.WEIGHTS), found["tensors"], strict=True):
            assert mine is not None
            mine.data.copy_(theirs)
        self.own[0].load_state_dict(found["optimizer"])

    def _remember(self) -> None:
        """With weights that came of the server: what its snapshot has of the optimizer. It may be the one of sync."""
        own, version = self.own[0], self._said.version
        self._has_state = True
        if not (version or self._has_stepped):
            return
        parameters = [param for group in own.param_groups for param in group["params"]]
        found = self.optimizer_state(parameters) if version else {}
        own.load_state_dict({"state": found or self._initial, "param_groups": own.state_dict()["param_groups"]})
        if version and not found and remembers(own):
            self._has_state = False
            if not self._said.is_done:
                log.warning("optimizer_state_anew", meaning="the server has none of this version: moments begin anew")

    def _remembered(self) -> dict[str, dict[str, torch.Tensor]] | None:
        """What the server keeps with the weights; None where it is not of a form that it can keep."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for tensor, state in self.own[0].state.items():
            held = {key: torch.as_tensor(value).detach().cpu() for key, value in state.items() if value is not None}
            if any(
                value.dim() and (value.shape, value.dtype) != (tensor.shape, tensor.dtype) for value in held.values()
            ):
                return None
            if tensor.numel():
                found[self._model.names[id(tensor)]] = held
        return found

    def _close_group(self) -> None:
        if self._group is not None:
            self._num_sent += self._group.num_sent
            self._group.close()
            self._group = None

    def _here(self, work: Callable[[], Found]) -> Found:
        """On the helper, so that a signal finds this thread awake: nothing in torch would hear it. Broken too where the
        server has let a member go, which itself does not: one that stands still, or is cut off, closes nothing."""
        future: Future[Found] = self._helper.submit(work)
        while not wait([future], timeout=_LOOK_UP_S).done:
            if self._generation is None or not self._exchange.is_over(self._generation.number):
                continue
            message = f"generation {self._generation.number}: the server has let one of its members go"
            if self._group is None:
                self._abandon(future)
                raise Broken(message)
            self._group.cut(message)
        return future.result()

    def _abandon(self, forming: Future[Any]) -> None:
        """Nothing of torch's ends the forming of a group before its time, and nobody waits for it."""
        forming.add_done_callback(lambda item: item.exception() or item.result().close())
        self._helper.dismiss()
        self._forming.append(self._helper)
        self._helper = Helper("group")

    # ---- a step -----------------------------------------------------------------------------

    def _contribute(self, outgoing: Outgoing) -> None:
        is_right = self._ready_gradients is None or self._ready_gradients.settle()
        computed(self._device)  # another thread averages what is there
        reply = self._until_taken(self._model.sources(ContributionKind.GRADIENT), outgoing, is_right)
        if reply.result.outcome == Outcome.START:
            self._enter()

    def _until_taken(
        self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool = True
    ) -> Reply:
        """In as many groups as it takes. The contribution counts, or there is another START."""
        while True:
            reply = self._round(gradients, outgoing, is_right)
            if reply.result.outcome in COUNTED and not self._said.is_done:
                self._may_meet()  # where it fails, that is said with the next report
            if reply.result.outcome in (*COUNTED, Outcome.START):
                return reply
            if reply.result.outcome == Outcome.REJECTED:
                raise self._diverged(None)

    def _round(self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool) -> Reply:
        """Average, report, and step where the reply says that all have the mean."""
        if not self._may_meet():
            return self._report_broken(outgoing)
        group = self._group
        assert group is not None
        try:
            metadata, num_samples = self._metadata(outgoing), max(1, outgoing.contribution.counts.num_samples)
            mean = self._here(lambda: group.average(gradients, num_samples, metadata, is_right))
            self._check_metadata(group, outgoing)
        except Unsound as unsound:
            raise self._diverged(unsound.index) from None
        except Broken as broken:
            log.warning("group_broken", rank=self._said.rank, reason=str(broken))
            return self._report_broken(outgoing)
        if clip_norm := outgoing.contribution.training.clip_norm:  # the same bits for all
            clip([item for item in map(mean.__getitem__, self._trained) if item is not None], clip_norm)
        outgoing = outgoing.changed(completion=CompletionInfo(group.generation.number))
        if self._is_brought(group, outgoing):
            return self._bring(outgoing, mean)
        reply = self._say(ContributionKind.COMPLETION, outgoing)
        if reply.result.outcome in COUNTED:
            self._step(mean)
        return reply

    def _is_brought(self, group: Group, outgoing: Outgoing) -> bool:
        return self._exchange.group.uploads_weights or (outgoing.contribution.training.evaluates and group.index == 0)

    def _bring(self, outgoing: Outgoing, mean: Sequence[torch.Tensor | None]) -> Reply:
        """Report, with the weights that the mean leads to."""
        undo = self._copy()
        self._step(mean)
        if self._exchange.group.uploads_optimizer:
            outgoing = outgoing._replace(optimizer=self._remembered())
        reply = self._say(ContributionKind.WEIGHTS, outgoing)
        if reply.result.outcome == Outcome.REJECTED:
            raise self._diverged(None)
        if reply.result.outcome not in COUNTED and reply.result.outcome != Outcome.START:
            undo()
        return reply

    def _report_broken(self, outgoing: Outgoing = _NOTHING) -> Reply:
        """This worker's generation came to nothing: the reply names the next."""
        failed = CompletionInfo(self._exchange.group.generation, failed=True)
        return self._say(ContributionKind.COMPLETION, outgoing.changed(completion=failed))

    def _say(self, kind: ContributionKind, outgoing: Outgoing) -> Reply:
        completion = replace(outgoing.contribution.completion, peer_bytes=self._take_sent())
        return self._exchange.contribute(outgoing.changed(kind=kind, completion=completion))

    def _take_sent(self) -> int:
        """Bytes that have gone to others since this was asked last."""
        sent, self._num_sent = int(self._num_sent), 0.0
        if self._group is not None:
            sent, self._group.num_sent = sent + int(self._group.num_sent), 0.0
        return sent

    def _diverged(self, index: int | None) -> DivergedError:
        """The gradient of this index is not finite; where the weights are not, these were it first."""
        held = zip(self._model.layout.entries, self._model.sources(ContributionKind.WEIGHTS), strict=False)
        names = [entry.spec.name for entry, item in held if item is not None and not bool(torch.isfinite(item).all())]
        if names or index is None:
            where = f" in '{names[0]}'" if names else ""
            return DivergedError(
                f"the weights overflowed: those of rank {self._said.rank} hold NaN or Inf{where} at version "
                f"{self._held_version}, after steps along finite means",
                fix="lower --lr, or clip gradients; give Adam an eps above 0; the newest "
                "snapshot (--checkpoint-dir) is unchanged",
            )
        name = self._model.layout.entries[index].spec.name
        return DivergedError(
            f"the gradient of '{name}' of rank {self._said.rank} is not finite, nor would the mean be",
            fix="lower --lr, or clip gradients; --mode sync leaves out a contribution that is not finite",
        )

    def _metadata(self, outgoing: Outgoing) -> tuple[int, ...]:
        """What must be the same for all whose weights are of the same version, which is the last of them."""
        training = outgoing.contribution.training
        numbers = (training.hyperparameters, training.clip_norm)
        return crc32(repr(numbers).encode()), crc32(self._weights.sample()), self._held_version

    def _norm(self) -> float:
        """Of the elements that were compared."""
        return self._weights.norm()

    def _check_metadata(self, group: Group, outgoing: Outgoing) -> None:
        """All are about to step by the same numbers from the same weights, or these would go apart: UsageError for
        those that would not, who are fewer. Broken."""
        numbers, weights, versions, *_ = group.metadata
        rank, ranks = self._said.rank, group.generation.members
        if numbers[group.index] != (most := _most(numbers)):
            training = outgoing.contribution.training
            told = ", ".join(f"{key} {value}" for key, value in training.hyperparameters[0].items() if key == "lr")
            told += f", clip_grad_norm {training.clip_norm:g}" if training.clip_norm else ""
            other = ranks[numbers.index(most)]
            raise UsageError(
                f"the optimizer of rank {rank} would step with other numbers ({told}) than that of rank {other}",
                fix="let all scripts have the same schedule; session.state(scheduler=...) brings it where the run is",
            )
        if len(set(zip(versions, weights, strict=True))) == len(set(versions)):
            return
        # On unequal machines the last digits differ, and are let be.
        norms = self._here(lambda: group.told(_bits(self._norm())))
        mine_too = [
            weight for weight, version in zip(weights, versions, strict=True) if version == versions[group.index]
        ]
        other = weights.index(_most(mine_too))
        mine, theirs = (_number(norms[index]) for index in (group.index, other))
        if abs(mine - theirs) > _MAY_DIFFER * theirs:
            raise UsageError(
                f"the weights of rank {rank} are not those of rank {ranks[other]}: the norm of a few elements is "
                f"{mine:.6g} here and {theirs:.6g} there",
                fix="change weights before session.optimizer(), which takes the first worker's into the run, or in "
                "every script in the same way",
            )

    def _step(self, mean: Sequence[torch.Tensor | None]) -> None:
        self._apply(mean)
        self._held_version += 1
        self._has_stepped = self._has_state = True

    def _apply(self, mean: Sequence[torch.Tensor | None], has_buffers: bool = True) -> None:
        """Gradients stay this worker's own: it may have to go back, and average them once more. Buffers become those of
        the mean (or of the lowest rank), where it `has_buffers`."""
        model = self._model
        own = [tensor.grad for tensor in model.tensors]
        for index, item in enumerate(mean):
            if item is None:
                continue
            if model.layout.entries[index].spec.kind is Kind.BUFFER:
                if has_buffers:
                    model.tensors[index].data.copy_(item)
            else:
                model.tensors[index].grad = item.to(model.tensors[index].device)
        try:
            self.own[1]()
        finally:
            for tensor, gradient in zip(model.tensors, own, strict=True):
                tensor.grad = gradient

    def _copy(self) -> Callable[[], None]:
        """What undoes a step."""
        optimizer, version = self.own[0], self._held_version
        tensors = [
            (tensor, tensor.detach().clone())
            for tensor in self._model.sources(ContributionKind.WEIGHTS)
            if tensor is not None
        ]
        state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())

        def undo() -> None:
            for item, before in tensors:
                item.data.copy_(before)
            optimizer.load_state_dict(state)
            self._held_version = version

        return undo

    # ---- the end ----------------------------------------------------------------------------

    def _finish(self, can_evaluate: bool) -> Final | None:
        self._close_group()  # whoever averages without this one is not to wait
        final = super()._finish(can_evaluate)
        if final is None:
            self._enter()
        return final

    def leave(self, goodbye: Goodbye, is_interrupted: bool) -> None:
        self._close_group()
        super().leave(goodbye, is_interrupted)
        self._end_helpers()

    def drop(self) -> None:
        self._close_group()
        super().drop()
        self._end_helpers()

    def _end_helpers(self) -> None:
        self._rendezvous.close()
        self._helper.end()
        for helper in self._forming:
            helper.end(_FORMING_S)


def nobody_has(version: int) -> UnreachableError:
    return UnreachableError(
        f"nobody has the weights of version {version} any more: all workers that had them are gone",
        fix="keep snapshots (--checkpoint-dir), which a run goes on from",
    )


def _in_words(stage: int, copies: int) -> str:
    return f"worker.zero is {stage}" + (f" (worker.zero_copies {copies})" if stage else "")


def remembers(optimizer: torch.optim.Optimizer) -> bool:
    return not (
        isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    )


def _crc(state: Any) -> int:
    """Of nested dicts and a few elements of each tensor; the same on every machine."""
    if isinstance(state, Mapping):
        return crc32(repr([(str(key), _crc(state[key])) for key in sorted(state, key=str)]).encode())
    if isinstance(state, torch.Tensor):
        flat = state.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _NUM_SAMPLED)].double().tolist()
        return crc32(repr((tuple(state.shape), sample)).encode())
    return crc32(repr(state).encode())


def _bits(number: float) -> int:
    """It, as what members can tell each other."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def _most(metadata: list[int]) -> int:
    """What most say, and of several the lowest rank."""
    return max(metadata, key=metadata.count)
