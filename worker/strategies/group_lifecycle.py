"""Forms the group of all-reduce peers, and forms it again when members change.

A dead peer is noticed in one of two ways. Its connections close, so a collective raises Broken (`Group`). Or it hangs
or is cut off, and the server releases it after its lease (`GroupLifecycle.run`). The worker then reports that the
generation has failed, and repeats the round in the next generation (`all_reduce.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from ...common.config.addresses import join_address, split_address
from ...common.errors import UnreachableError, bad_request
from ...common.reporting.log import get_logger
from ..conversation.exchange import Exchange
from ..conversation.security import check_plaintext
from ..conversation.threads import Helper
from .collectives.rendezvous import Broken, Generation, OutOfReach, Rendezvous
from .group import Group, own_address

log = get_logger()
Found = TypeVar("Found")

_LOOK_UP_S = 0.2
_FORMING_S = 60.0  # Gloo tries to connect five times for 10 s
_RELEASED = "the server released a worker that left or was silent for server.lease_s; the others form a new group"
_IN_PLAINTEXT = (
    "the connection to the server uses TLS, but members use plain TCP among themselves, because torch's Gloo has no "
    "TLS: keep them on a private network (a tunnel), or use --mode sync"
)


class GroupLifecycle:
    """Keeps the group of the newest generation in `group`.

    Collectives run on a helper thread, so that signals can interrupt the calling thread.
    """

    _generation: Generation  # of the group, or of the group that is forming

    def __init__(self, exchange: Exchange, stage: int = 0) -> None:
        self._exchange, self._stage = exchange, stage
        host = own_address(exchange.server)
        check_plaintext(
            host, "this worker and the workers that it averages with", exchange.credentials.trusts_network,
            "or use --mode sync, in which workers connect to the server only",
        )  # fmt: skip
        self._rendezvous = Rendezvous(host)
        exchange.group_view.rendezvous = join_address(*self._rendezvous.address)
        self.group: Group | None = None
        self._failed_name = ""  # name of the generation whose group failed to form
        self._num_sent = 0.0  # bytes sent to peers in earlier groups
        self._num_failed: dict[tuple[int, ...], int] = {}  # in a row, with the same members
        self._helper = Helper("group")
        self._forming: list[Helper] = []  # helpers of abandoned groups
        if exchange.credentials.ca is not None:
            log.warning("group_in_plaintext", meaning=_IN_PLAINTEXT)

    @property
    def _rank(self) -> int:
        return self._exchange.progress.rank or 0

    def form(self, device: torch.device, joined: Callable[[Group], None]) -> bool:
        """Form the newest generation's group if needed, and call `joined`. Returns False if that failed.

        Raises UnreachableError after too many failures in a row.
        """
        progress, info = self._exchange.progress, self._exchange.group_view.info
        name = f"{progress.run}/{progress.server_incarnation}/{info.generation}"
        if self.group is not None and self.group.generation.name == name:
            return True
        if name == self._failed_name:
            return False
        self.close_group()
        if self._rank not in info.members or not info.rendezvous:
            description = f"a group of {len(info.members)} members without it, or without GroupInfo.rendezvous"
            raise bad_request(f"the server sent rank {self._rank} {description}")
        address = split_address(info.rendezvous)
        generation = Generation(info.generation, info.members, address, name, info.secret, self._stage)
        self._generation = generation
        try:
            group = self.group = self.run(lambda: Group(generation, self._rank, self._rendezvous, device))
            joined(group)
        except Broken as broken:
            self.log_broken(broken)
            self.close_group()
            self._failed_name = name
            self._count_failure(generation.members, broken)
            return False
        self._num_failed.clear()
        if group.not_over_nccl:
            log.info("not_over_nccl", rank=self._rank, reason=group.not_over_nccl)
        size = len(generation.members)
        log.routine("group", rank=self._rank, generation=generation.number, members=size, backend=group.backend)
        return True

    def log_broken(self, broken: Broken) -> None:
        log.warning("group_broken", rank=self._rank, reason=str(broken))

    def _count_failure(self, members: tuple[int, ...], broken: Broken) -> None:
        """Raises UnreachableError after too many failures in a row with the same members.

        A member that is gone is not in the server's next group, which restarts the count.
        """
        self._num_failed = {members: self._num_failed.get(members, 0) + 1}
        if self._num_failed[members] < broken.attempts:
            return
        message = str(broken)
        if not isinstance(broken, OutOfReach):
            message = f"rank {self._rank} and the workers that it averages with could not form a group: {broken}"
        raise UnreachableError(
            message,
            fix="let workers reach each other's ports, and start each with the server's address as other hosts know it "
            "(not 127.0.0.1); or --mode sync, where workers need to reach only the server",
        )

    def run(self, work: Callable[[], Found]) -> Found:
        """Run `work` on the helper thread and return its result.

        Raises Broken as `work` does, and when the server has released a member. A member that hangs or is cut off does
        not close its connections, so only the server notices it.
        """
        future: Future[Any] = self._helper.submit(work)
        while not wait([future], timeout=_LOOK_UP_S).done:
            if not self._exchange.group_view.is_over(self._generation.number):
                continue
            message = f"generation {self._generation.number} has ended: {_RELEASED}"
            if self.group is None:
                # Abandon the group that is forming: torch ends it only at its timeout, so nothing waits for it.
                future.add_done_callback(lambda item: item.exception() or item.result().close())
                self._helper.dismiss()
                self._forming.append(self._helper)
                self._helper = Helper("group")
                raise Broken(message)
            self.group.cut(message)
        found: Found = future.result()
        return found

    def take_num_sent(self) -> int:
        """Bytes sent to peers since the last call."""
        num_sent, self._num_sent = int(self._num_sent), 0.0
        if self.group is not None:
            num_sent, self.group.num_sent = num_sent + int(self.group.num_sent), 0.0
        return num_sent

    def close_group(self) -> None:
        if self.group is not None:
            self._num_sent += self.group.num_sent
            self.group.close()
            self.group = None

    def end(self) -> None:
        self._rendezvous.close()
        self._helper.end()
        for helper in self._forming:
            helper.end(_FORMING_S)
