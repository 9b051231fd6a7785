"""The time that a simulated server takes: staging of uploads, links, and tensor work."""

from __future__ import annotations

import heapq
import math

from ...ps.core import effects
from ...ps.policies.base import Policy
from ..machines.world import World
from ..traffic.framing import INLINE_BYTES
from .agenda import Agenda, Handler, Worker


class Server:
    """The server of one run. `arrived` gets each contribution at the server, `delivered` each reply at its worker."""

    def __init__(self, world: World, policy: Policy, arrived: Handler, delivered: Handler) -> None:
        self._world, self._policy = world, policy
        self._arrived, self._delivered = arrived, delivered
        self.agenda = Agenda(world)
        self._busy_until = 0.0  # with tensor work
        self._num_staged = self._num_folds = self._num_asked = 0
        self._waiting: list[tuple[int, int, Worker, int]] = []  # for staging memory
        self._has_order = type(policy).upload_position is not Policy.upload_position
        self._is_inline = world.sizes.up <= INLINE_BYTES  # smaller payloads are not staged
        self._own_up_s = world.sizes.up / world.up
        self._is_up_shared = bool(world.sizes.up) and not math.isinf(world.server_up)
        self._is_down_shared = not math.isinf(world.server_down)

    # ---- up ------------------------------------------------------------------------------------

    def take(self, worker: Worker) -> None:
        """Begin to upload the worker's contribution, or queue it."""
        if self._is_inline:
            self._upload(worker)
            return
        self._num_asked += 1
        position = self._policy.upload_position(worker.rank) if self._has_order else 0
        heapq.heappush(self._waiting, (position + self._num_folds, self._num_asked, worker, worker.life))
        self.begin_queued()

    def begin_queued(self) -> None:
        """Begin queued uploads in fold order, as `ps/tensors/staging.py` does, without those folded much later."""
        waiting, most = self._waiting, self._world.max_staged
        while waiting and self._num_staged < most:
            _, _, worker, life = waiting[0]
            is_alive = worker.life == life
            if is_alive and self._has_order and self._policy.upload_position(worker.rank) >= most:
                return
            heapq.heappop(waiting)
            if is_alive:
                self._num_staged += 1
                worker.is_staged = True
                self._upload(worker)

    def release(self, worker: Worker, _: object = None) -> None:
        """Free the staging memory of the worker's contribution."""
        if worker.is_staged:
            worker.is_staged = False
            self._num_staged -= 1
            self.begin_queued()

    def _upload(self, worker: Worker) -> None:
        world, agenda = self._world, self.agenda
        worker.begun_at = now = agenda.now
        if self._is_up_shared:
            agenda.up.begin(now, (worker, worker.life, self._here, None), world.sizes.up, world.up)
        else:
            own_s = self._own_up_s + agenda.trip_s + worker.compute.exchange_s
            agenda.push_behind(agenda.trips, now + own_s, self._here, worker)

    def _here(self, worker: Worker, _: object) -> None:
        event, framing = worker.event, self._world.framing
        assert event is not None
        worker.num_sent += self._world.sizes.up if framing is None else framing.up(event.contribution)
        self._arrived(worker, None)

    # ---- tensor work --------------------------------------------------------

    def fold(self, worker: Worker) -> None:
        """Fold the worker's contribution."""
        self._num_folds += 1
        now = self.agenda.now
        self._busy_until = (now if now > self._busy_until else self._busy_until) + self._world.fold_s
        if worker.is_staged:
            self.agenda.push_behind(self.agenda.works, self._busy_until, self.release, worker)

    def commit(self) -> None:
        """Make a version."""
        self._busy_until = max(self.agenda.now, self._busy_until) + self._world.step_s

    # ---- down ----------------------------------------------------------------------------------

    def reply(self, worker: Worker, reply: effects.SendReply) -> None:
        """Send a reply once the tensor work before it is done."""
        agenda = self.agenda
        worker.decided_at = agenda.now
        if self._busy_until > agenda.now:
            agenda.push_behind(agenda.works, self._busy_until, self._leaves, worker, reply)
        else:
            self._leaves(worker, reply)

    def _leaves(self, worker: Worker, reply: effects.SendReply) -> None:
        world, agenda = self._world, self.agenda
        worker.left_at = now = agenda.now
        num_bytes = 0
        if reply.has_weights:
            num_bytes = world.sizes.start if reply.is_start else world.sizes.down
        worker.num_received += num_bytes if world.framing is None else world.framing.down(reply)
        if num_bytes and self._is_down_shared:
            agenda.down.begin(now, (worker, worker.life, self._delivered, reply), num_bytes, world.down)
        else:
            at = now + num_bytes / world.down + agenda.trip_s
            agenda.push_behind(agenda.trips, at, self._delivered, worker, reply)
