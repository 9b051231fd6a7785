"""Encodes payloads in a codec both ways, as a transport would, with error feedback and the shared reference.

Uploads use the worker's `Encoding`, with the outcome of each contribution. Replies use the server's `References`: after
a reply a worker has the newest reference, so the sequence of differences does not matter.
"""

from __future__ import annotations

import torch

from ...common.codecs.base import Codec, FreeBuffers, decode_payload, encode_payload
from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import moves_reference
from ...common.config.schema import Config
from ...common.registry import CODECS
from ...common.tensors.layout import Layout, new_payload
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import COUNTED, Outcome
from ...ps.core import effects
from ...ps.tensors.model import Model
from ...worker.tensors.transfer import Stretch
from ...worker.transports.encoding import Encoding


class Up:
    """Encodes the contributions of one process. Payloads are uint8 [exchange_bytes]."""

    def __init__(self, config: Config, layout: Layout, optimizer: OptimizerSpec) -> None:
        self._layout = layout
        codec: Codec = CODECS.load(config.worker.codec)()
        self.encoding = Encoding(codec, layout, len(layout.entries))
        self.encoding.of_optimizer([group.hyperparameters for group in optimizer.groups])

    def sent(self, stretch: Stretch, version: int) -> torch.Tensor:
        """Returns the contribution as the server decodes it. `version`: the weights on which it was computed."""
        self.encoding.ready(version)
        self._stretch = stretch
        encoded = torch.frombuffer(self.encoding.whole(stretch), dtype=torch.uint8)
        payload = new_payload(self._layout.exchange_bytes)
        decode_payload(self.encoding.codec, self._layout, encoded, payload)
        return payload

    def replied(self, reply: effects.SendReply, is_work: bool) -> None:
        """Handle the outcome of the newest contribution. `is_work`: the next one includes it if it was dropped."""
        outcome = reply.reply.result.outcome
        if outcome in COUNTED:
            self.encoding.commit()
        else:
            self.encoding.rollback(self._stretch if is_work and outcome is Outcome.DROPPED else None)


class Down:
    """The weights of a run's replies, as workers decode them."""

    def __init__(self, config: Config, model: Model) -> None:
        self._model, self._codec = model, CODECS.load(config.worker.reply_codec)()
        self._kept: tuple[object, torch.Tensor] = None, new_payload(0)  # the newest weights, and what they depend on

    def weights(self, version: int, is_start: bool) -> torch.Tensor:
        """Returns a copy, shared by all workers with the same weights; `version`: the newest."""
        codec, model, reference = self._codec, self._model, None
        is_encoded = not (is_start or codec.is_identity)  # a START is not encoded
        if isinstance(codec, ByTensor) and moves_reference(codec):
            model.references.replies(version, not is_encoded)
            reference = model.references.of(codec, version)
        key = (version, is_encoded) if reference is None else reference.number
        if self._kept[0] == key:
            return self._kept[1]
        if reference is None:
            layout = model.store.layout
            payload = model.store.weights[: layout.exchange_bytes].clone()
            if is_encoded:
                decode_payload(codec, layout, encode_payload(codec, layout, payload, FreeBuffers()), payload)
        else:
            (whole,) = reference.update_from(0).made
            assert whole.payload is not None
            payload = whole.payload
        self._kept = key, payload
        return payload
