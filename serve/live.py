"""The versions of a live run, fetched from its server."""

from __future__ import annotations

import time
from collections.abc import Collection

from torch import nn

from ..common.errors import ParamServerError, UsageError
from ..common.reporting.log import get_logger
from ..worker.conversation.channel import Lost
from ..worker.conversation.reader import Reader, Standing
from ..worker.tensors.transfer import ModelTensors
from .slots import Version

log = get_logger()

_STALE_S = 10.0  # without a server


class LiveRun:
    """The versions of a run whose server is reachable. It follows one run, the first at the address."""

    averaged_buffers: Collection[str] = ()

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._run = ""  # the first one at the address
        self._reached_at = time.monotonic()
        self._standing: Standing | None = None
        self._refusal = ""  # logged last: of a fetch, or another run

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self._reached_at > _STALE_S

    def look(self) -> Standing | None:
        """Return where the run stands; None while its server does not reply, or another run is at its address."""
        try:
            standing = self._reader.standing()
        except Lost:
            return None
        if standing.run != (self._run or standing.run):
            if self._refusal != standing.run:
                log.warning("another_run", address=self._reader.address, run=standing.run, served=self._run,
                            fix="start ps-serve again to serve the new run")  # fmt: skip
            self._refusal = standing.run
            return None
        self._run, self._standing, self._reached_at = standing.run, standing, time.monotonic()
        return standing

    def newest(self) -> Version | None:
        standing = self.look()
        return standing and Version(standing.run, standing.incarnation, standing.version)

    def load(self, model: nn.Module) -> Version | None:
        standing = self._standing
        assert standing is not None
        tensors = ModelTensors(getattr(model, "whole", model), (), self.averaged_buffers)
        tensors.transfer_of = getattr(model, "transfer_of", None)  # of a model in several processes
        try:
            pulled = self._reader.pull(tensors)
        except UsageError:
            raise
        except ParamServerError as refused:  # there are no weights yet, or too many readers
            if refused.message != self._refusal:  # not at every look
                log.info("version_not_fetched", reason=refused.message)
            self._refusal = refused.message
            return None
        after = self.look()  # the server may have gone back since, or another run may be at its address
        if pulled is None or after is None or after.incarnation != standing.incarnation:
            return None
        return Version(standing.run, standing.incarnation, pulled)

    def close(self) -> None:
        self._reader.close()
