"""Deltas that are exchanged while local steps go on (diloco, policy.delayed_update), of all parameters or of a
fragment.

    training thread   H steps | measure | tau steps | merge | H - tau steps | measure | ...
    helper thread             | exchange ........ |                       | exchange ...

What has come is put together with the steps since then after tau of them (policy.overlap_steps), whenever it came: two
runs that get the same replies compute the same. With tau = H, or of P fragments H / P, that is just before the next
ones are measured. Buffers stay the worker's own until the run ends.
"""

from __future__ import annotations

from ...common.kinds import ContributionKind
from ...common.wire.records import Reply
from ..conversation.exchange import Exchange
from ..conversation.messages import Outgoing
from ..conversation.pool import wait_for
from ..tensors.overlap import Overlap
from ..tensors.transfer import ModelTensors
from .delayed_update import DelayedUpdate
from .direct import of_fragment


class Overlapped(DelayedUpdate):
    """As DelayedUpdate, and replies are merged in the middle of the next local steps."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._overlap: Overlap | None = None  # once there are weights
        self._landed: Reply | None = None  # merged, and not taken account of
        self._without: tuple[int, ...] = ()  # positions in the specs of what is not in the newest contribution

    def _watch_steps(self, model: ModelTensors) -> None:
        self._overlap = Overlap(model, self.settings.fragments, self.settings.merge)

    def went_on(self) -> None:
        progress, after = self.progress, self.settings.merge.after_steps
        if after and self._flight is not None and progress.local_steps - progress.steps_left == after:
            self._look()
            self._landed = self._land()

    def _land(self) -> Reply | None:
        landed, self._landed = self._landed, None
        if landed is not None:
            return landed
        landed = super()._land()
        if landed is not None and self._overlap is not None and self._goes_on(landed) and landed.has_new_weights:
            self._overlap.merge(self._shadow.tensors)
            self._held_version = self._received_version
        return landed

    def _begin(self) -> None:
        super()._begin()
        if self._overlap is not None:
            self._overlap.note()

    def _turn(self, has_weights: bool) -> int:
        assert self._overlap is not None
        self._without = self._overlap.choose(self._next_fragment())
        self._overlap.measure()
        self._shadow.snapshot(ContributionKind.DELTA)
        self._overlap.depart()
        return self._held_version

    def _described(self, outgoing: Outgoing) -> Outgoing:
        return outgoing

    def _hand_over(self, base_version: int, outgoing: Outgoing) -> None:
        if self.settings.fragments > 1:  # the shadow has all weights of the version that came last
            outgoing = of_fragment(outgoing, self._without)
        super()._hand_over(base_version, outgoing)

    # ---- evaluations: of the server's weights, and nothing else is computed for them -------------------

    def settle(self) -> int:
        assert self._overlap is not None
        if self._flight is not None:
            wait_for(self._flight)
            if self._flight.exception() is not None or not self._goes_on(self._flight.result()):
                return super().settle()
        self._overlap.show(self._shadow.tensors)
        return self._exchange.progress.version

    def measured(self, version: int, metrics: dict[str, float], failure: str = "", exit_code: int = 0) -> None:
        if self._overlap is not None:
            self._overlap.hide()
        super().measured(version, metrics, failure, exit_code)
