"""The mean of gradients that each peer sends encoded (`worker.codec` in mode allreduce).

Each peer encodes its gradient with error feedback (`transports/encoding.py`) and sends it to every other peer. All
peers decode all payloads in the order of the members, so the mean has the same bits everywhere. If the next generation
averages a gradient again, its bytes stay the same. The residual changes when the round counts.

Each of N peers sends N - 1 payloads. A sum of raw gradients sends 2 (N - 1) / N payloads, so a codec pays only if it
saves more than a factor of N / 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.codecs.base import Codec, decode_payload
from ...common.kinds import ContributionKind
from ...common.tensors.layout import new_payload
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors
from ..transports.encoding import Encoding
from .buckets import is_finite
from .group import Group, Unsound


class EncodedMean:
    """Computes the encoded mean for one peer; `encoding` has its residual.

    `of_sum`: indices of tensors that are summed, not averaged.
    """

    def __init__(self, codec: Codec, model: ModelTensors, of_sum: frozenset[int]) -> None:
        self.encoding = Encoding(codec, model.layout, model.num_exchanged)
        self._model, self._transfer, self._of_sum = model, make_transfer(model), of_sum
        self._sum = new_payload(model.layout.exchange_bytes)
        self._decoded = new_payload(model.layout.exchange_bytes)

    def average(
        self, group: Group, gradients: Sequence[torch.Tensor | None], num_samples: int, metadata: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """The mean over the group, as `Group.average` returns it. The next call overwrites the result."""
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_floating_point() and not is_finite(gradient):
                raise Unsound(index)
        if self.encoding.payload is None:
            trained = enumerate(self._model.layout.entries[: self._model.num_trained])
            self.encoding.rest(frozenset(entry.spec.name for index, entry in trained if gradients[index] is None))
            (stretch,) = self._transfer.gather(ContributionKind.GRADIENT)
            self.encoding.whole(stretch)
        assert self.encoding.payload is not None
        announced, _ = group.announce(gradients, num_samples, metadata)
        payloads = group.gather_payloads(torch.frombuffer(self.encoding.payload, dtype=torch.uint8))
        sums, decoded = self._model.views(self._sum), self._model.views(self._decoded)
        for member, payload in enumerate(payloads):
            decode_payload(self.encoding.codec, self._model.layout, payload, self._decoded)
            share = announced.samples[member] / sum(announced.samples)
            for index, (entry, total, item) in enumerate(zip(self._model.layout.entries, sums, decoded, strict=False)):
                factor = 1.0 if index in self._of_sum else share
                if member == 0:  # buffers that are not averaged come from the lowest member
                    torch.mul(item, factor, out=total) if entry.spec.is_averaged else total.copy_(item)
                elif entry.spec.is_averaged:
                    total.add_(item, alpha=factor)
        return [item if index in announced.present else None for index, item in enumerate(sums)]
