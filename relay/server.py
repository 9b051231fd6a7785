"""The relay's server: `ps-server --upstream`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ..common import combinations
from ..common.config.addresses import split_address
from ..common.config.schema import Config
from ..common.errors import UnreachableError, raise_first
from ..common.reporting.log import get_logger
from ..ps.core.effects import Fact, MetricsTaken
from ..ps.core.events import Stopped
from ..ps.engine.engine import Clock
from ..ps.server import Server
from ..worker.conversation.messages import Goodbye
from .region import Link, Region

log = get_logger()

_TO_CONTINUE = "start the relay again: its region goes on from its newest contribution to the run above"
_NO_LOOP = "a relay listens once it has joined the server above, so two relays cannot join each other"


class RelayServer(Server):
    """A server for the workers of a region. It is also one worker of the run above."""

    def __init__(self, config: Config, link: Link, before: Server | None = None, clock: Clock | None = None) -> None:
        super().__init__(config, before=before, clock=clock)
        self._link = link
        self._run.name, self._run.incarnation = link.run_name, link.incarnation
        self._run.rhythm.leave_to_another_run(_TO_CONTINUE)
        if before is None:
            self._run.roster.restore({})  # its workers may have joined an earlier relay
        else:  # the state above does not know the joins of workers that have not begun
            self._run.roster.processes = dict(before.engine.run.roster.processes)
        publish = self.engine.publish

        def passed_on(at: float, fact: Fact) -> None:
            publish(at, fact)
            if isinstance(fact, MetricsTaken) and not self._run.is_done:
                link.measured(fact.point.step, fact.point.metrics)

        self.engine.publish, self.engine.is_observed[MetricsTaken] = passed_on, True

    def after(self, config: Config) -> Server:
        return RelayServer(with_settings(config, self._link), self._link, before=self, clock=self._clock)

    def _restored(self) -> None:
        self._region = Region(self._config, self.engine, self._link, self.go_back)
        if self._link.has_model:
            self._region.restore()
        self.engine.snapshots, self.engine.folding.committer = self._region, self._region.commit
        self.engine.send = partial(self._region.reply, self.engine.send)

    def go_back(self) -> None:
        """Leave this run for the run of the newest START reply, whose server `after` makes."""
        log.warning("region_goes_back", meaning="the run above has an earlier or a new position of this region")
        self._go_back()
        self.engine.offer(Stopped())  # no worker may train here now: the next server has the link

    async def _wind_down(self) -> None:
        asyncio.get_running_loop().call_soon(self._region.give_up)  # after the run is closed
        await super()._wind_down()

    async def serve(self) -> None:
        try:
            await super().serve()
        finally:
            if not self.goes_back:
                if self.engine.error is None and self._run.is_done:
                    goodbye = Goodbye(final_metrics=self._run.final)
                    leave = partial(self._link.strategy.leave, goodbye, is_interrupted=False)
                    await asyncio.wait([asyncio.wrap_future(self._link.thread.submit(leave))])
                self._link.close()


async def relay_server(config: Config) -> RelayServer:
    """Join the run above. Returns the region's server, with the settings of the run above."""
    check(config)
    try:
        link = await asyncio.to_thread(Link, config)
    except UnreachableError as error:
        fix = error.fix.replace("--server HOST:PORT", "--upstream HOST:PORT")
        raise UnreachableError(error.message, fix=f"{fix}; {_NO_LOOP}") from None
    settings = link.settings
    combinations.check(
        combinations.choices_of(config, config.run.mode, mode_above=settings.mode, kind_above=settings.kind)
    )
    every = "each version" if settings.kind.holds_gradients else "policy.local_steps of the run above"
    log.info("region", rank=link.progress.rank, above=link.address, mode_above=settings.mode, every=every)
    return RelayServer(with_settings(config, link), link)


def with_settings(config: Config, link: Link) -> Config:
    """Returns the configuration with the settings that the run above gives all its workers."""
    settings = link.settings
    run = {name: getattr(settings, name) for name in ("steps", "epochs", "batch_size", "seed", "eval_every")}
    changes: dict[str, Any] = {"run": config.run.model_copy(update=run), "train": settings.train}
    if settings.task:
        task = {"name": settings.task, "args": settings.task_args or {}}
        changes["task"] = config.task.model_copy(update=task)
    return config.model_copy(update=changes)


def check(config: Config) -> None:
    """Raises UsageError for settings that a region cannot have."""
    upstream, server = config.upstream, config.server
    assert upstream.server is not None
    combinations.check(combinations.choices_of(config, config.run.mode))
    raise_first(
        (any(_is_same(server.listen, address) for address in upstream.server.split(",")),
         f"--upstream {upstream.server} is this server's own address (--listen {server.listen})",
         "give the address of the server above"),
        ((upstream.cert is None) != (upstream.key is None), "upstream.cert and upstream.key go together",
         "give both: a certificate and its private key"),
    )  # fmt: skip


def _is_same(listen: str, other: str) -> bool:
    (host, port), (other_host, other_port) = split_address(listen), split_address(other)
    everywhere = ("0.0.0.0", "::")
    return port == other_port and (host == other_host or (host in everywhere and other_host in ("127.0.0.1", "::1")))
