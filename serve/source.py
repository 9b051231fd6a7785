"""Sources of weights (a file, a recorded run, a live run), and the thread that follows one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from torch import nn

from ..common.config.conditions import Every
from ..common.errors import ParamServerError, UsageError
from ..common.reporting.log import get_logger
from ..worker.conversation.channel import Lost
from ..worker.conversation.exchange import Reader
from ..worker.conversation.messages import StatusReply
from ..worker.tensors.transfer import ModelTensors
from ..worker.training.tasks.init import check_file, load_weights
from .engine import Engine
from .slots import Version

_LOOK_S = 0.5  # between two looks at a server
_REFUSED_S = 2.0  # after a version that could not be fetched
log = get_logger()
_STALE_S = 10.0  # without a server


class WeightsFile:
    """One version: the weights of a safetensors file."""

    is_stale = False
    averaged_buffers: Collection[str] = ()  # of no use here

    def __init__(self, path: Path, run: str, version: int = 0) -> None:
        """Raises UsageError for a file that cannot be read."""
        check_file(str(path), "")
        self._path, self._version = path, Version(run, 0, version)

    def newest(self) -> Version | None:
        return self._version

    def load(self, model: nn.Module) -> Version | None:
        load_weights(getattr(model, "whole", model), str(self._path), "", getattr(model, "write", None))
        return self._version

    def close(self) -> None:
        pass


class LiveRun:
    """The versions of a run whose server is reachable. It follows one run, the first at the address."""

    averaged_buffers: Collection[str] = ()  # as the task names them for the run's workers

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._run = ""  # the first one at the address
        self._reached_at = time.monotonic()
        self._standing: StatusReply | None = None
        self._refusal = ""  # logged last: of a fetch, or another run

    @property
    def is_stale(self) -> bool:
        """Whether newer versions may exist, and cannot be fetched."""
        return time.monotonic() - self._reached_at > _STALE_S

    def look(self) -> StatusReply | None:
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
        """Return the newest version, or None if there is none now."""
        standing = self.look()
        return None if standing is None else Version(standing.run, standing.incarnation, standing.version)

    def load(self, model: nn.Module) -> Version | None:
        """Write the newest version into a model and return it; None if it cannot be fetched now."""
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


Source = WeightsFile | LiveRun


class Follower:
    """A thread that fetches newer versions into an idle slot.

    `every`: the least seconds or versions between two fetches. `failed` is called with an error that ends the thread.
    """

    def __init__(self, engine: Engine, source: Source, every: Every, failed: Callable[[Exception], None]) -> None:
        self.source, self._engine, self._every, self._failed = source, engine, every, failed
        self._newest: Version | None = None  # in a slot
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()

    @property
    def age_s(self) -> float:
        """Seconds since the newest version was fetched; not a number before the first."""
        return math.nan if self._newest is None else time.monotonic() - self._newest.fetched_at

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                may_hurry = self._look()
            except Exception as error:
                if not self._stopped.is_set():
                    self._failed(error)
                return
            self._stopped.wait(_LOOK_S if may_hurry else _REFUSED_S)

    def _look(self) -> bool:
        """Fetch a newer version that is due. Return False if it could not be fetched."""
        found, newest = self.source.newest(), self._newest
        if found is None or not found.is_newer(newest):
            return True
        if newest is not None and found.incarnation == newest.incarnation:
            passed = self.age_s if self._every.unit == "seconds" else found.number - newest.number
            if passed < self._every.amount:
                return True
        if (slot := self._engine.begin_arrival()) is None:
            return True
        version: Version | None = None
        try:
            version = self.source.load(self._engine.models[slot])
        finally:
            self._engine.arrived(slot, version)
        if version is not None:
            self._newest = version
        return version is not None
