"""Checks that peers start from the same weights and step along the same means with the same hyperparameters."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

from ...common.config.schema import WorkerConfig
from ...common.errors import UsageError
from ..conversation.messages import Outgoing
from ..tensors.watch import Sample
from .group import Group
from .group_lifecycle import GroupLifecycle
from .peer_state import UndoableStep

_NUM_SAMPLED = 16  # elements of each tensor that a checksum covers
_ZERO_BITS = 8  # bits of the combined settings value for worker.zero
_MAY_DIFFER = 1e-3  # allowed relative difference between members' weights


class ConsistencyCheck:
    """The checks of one peer."""

    def __init__(self, lifecycle: GroupLifecycle, step: UndoableStep, config: WorkerConfig) -> None:
        self._lifecycle, self._step, self._config = lifecycle, step, config
        self.weights = Sample(step.model)

    def check_setup(self, group: Group, initial_state: Any) -> None:
        """Compare settings and the initial optimizer state with the other members.

        Raises UsageError if worker.codec or worker.zero differ from the lowest member's, or the state from most
        members'. Raises Broken.
        """
        stage, copies, codec = self._config.zero, self._config.zero_copies, self._config.codec
        rank, ranks = group.generation.members[group.index], group.generation.members
        settings = 10 * stage + copies + (crc32(codec.encode()) << _ZERO_BITS)
        found = self._lifecycle.run(lambda: group.gather_numbers(settings))
        codecs, divisions = [item >> _ZERO_BITS for item in found], [item % (1 << _ZERO_BITS) for item in found]
        if codecs[group.index] != codecs[0]:
            raise UsageError(
                f"worker.codec is {codec} for rank {rank}, but rank {ranks[0]}, which averages with it, has "
                "another codec",
                fix="start all workers with the same worker.codec",
            )
        if divisions[group.index] != divisions[0]:
            raise UsageError(
                f"{_zero_words(stage, copies)} for rank {rank}, but {_zero_words(*divmod(divisions[0], 10))} for "
                f"rank {ranks[0]}, which averages with it",
                fix="start all workers with the same worker.zero and worker.zero_copies",
            )
        has_begun = self._step.version or self._step.has_stepped
        states = self._lifecycle.run(lambda: group.gather_numbers(0 if has_begun else 1 + _crc(initial_state)))
        initial = [state for state in states if state]
        if (local := states[group.index]) and local != (most := _most_common(initial)):
            raise UsageError(
                f"the optimizer of rank {rank} begins with another state than that of rank "
                f"{ranks[states.index(most)]}: their weights would diverge",
                fix="load the same state in every script before session.optimizer(), or in none",
            )

    def metadata(self, outgoing: Outgoing, version: int, change: int) -> tuple[int, ...]:
        """Checksums of the step's hyperparameters and of the weights, the version of the weights, and `change`.

        `change`: whether the script has changed them since the last step: 1; 2: there was none.
        """
        training = outgoing.contribution.training
        numbers = repr((training.hyperparameters, training.clip_norm))
        return crc32(numbers.encode()), crc32(self.weights.bytes()), version, change

    def check(self, group: Group, outgoing: Outgoing, norm: float) -> None:
        """Compare the group's metadata. Raises UsageError in members that differ from most, and Broken."""
        numbers, weights, versions, changes, *_ = group.metadata
        index, ranks = group.index, group.generation.members
        if numbers[index] != (most := _most_common(numbers)):
            training = outgoing.contribution.training
            settings = ", ".join(f"{key} {value}" for key, value in training.hyperparameters[0].items() if key == "lr")
            settings += f", clip_grad_norm {training.clip_norm:g}" if training.clip_norm else ""
            raise UsageError(
                f"the optimizer of rank {ranks[index]} would step with other hyperparameters ({settings}) than that of "
                f"rank {ranks[numbers.index(most)]}",
                fix="use the same schedule in all scripts; session.state(scheduler=...) restores it after a resume",
            )
        if changes[index] == 1 and 0 in changes:
            raise UsageError(
                f"weights of rank {ranks[index]} were changed between two steps, not by its optimizer, and those of "
                f"rank {ranks[changes.index(0)]} were not: they would diverge",
                fix="make the same change in every script; or change weights before session.optimizer()",
            )
        if len(set(zip(versions, weights, strict=True))) == len(set(versions)):
            return
        # On unequal machines the last digits may differ. A float travels as an integer of the same bits.
        bits = int(struct.unpack("q", struct.pack("d", norm))[0])
        norms = self._lifecycle.run(lambda: group.gather_numbers(bits))
        same = [weight for weight, version in zip(weights, versions, strict=True) if version == versions[index]]
        other = weights.index(_most_common(same))
        own_norm, other_norm = _number(norms[index]), _number(norms[other])
        if abs(own_norm - other_norm) > _MAY_DIFFER * other_norm:
            raise UsageError(
                f"the weights of rank {ranks[index]} differ from those of rank {ranks[other]}: the norm of a few "
                f"elements is {own_norm:.6g} here and {other_norm:.6g} there",
                fix="change weights before session.optimizer(), which uploads the first worker's weights; or make the "
                "same change in every script",
            )


def _zero_words(stage: int, copies: int) -> str:
    return f"worker.zero is {stage}" + (f" (worker.zero_copies {copies})" if stage else "")


def _crc(state: Any) -> int:
    """A checksum of nested dicts and of a few elements of each tensor, equal on every machine."""
    if isinstance(state, Mapping):
        return crc32(repr([(str(key), _crc(state[key])) for key in sorted(state, key=str)]).encode())
    if isinstance(state, torch.Tensor):
        flat = state.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _NUM_SAMPLED)].double().tolist()
        return crc32(repr((tuple(state.shape), sample)).encode())
    return crc32(repr(state).encode())


def _number(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def _most_common(values: list[int]) -> int:
    """The most frequent value; among equally frequent ones the lowest rank's."""
    return max(values, key=values.count)
