"""Serves the dashboard of a process, or of a run store without a server (`ps-runs ui FILE`)."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from ..common.config.schema import Config
from ..common.reporting.log import get_logger
from ..common.reporting.view import About, Tick, View
from ..common.runstore.reading import RunStore
from ..common.runstore.schema import FILE
from .app import MAX_VIEWERS, Runs, make_app
from .feed import Control, Feed
from .guard import Rules
from .http import HttpServer
from .stored import Store

log = get_logger()

_LAST_S = 0.2  # time for viewers to receive the newest messages


class Dashboard:
    """The dashboard of a process that has one run at a time, at the address `server.web`."""

    def __init__(self, config: Config, store: Path | None = None, opens: str = "/") -> None:
        """`store`: the run store's file, None: the configured one; `opens`: the path of the printed URL.

        Raises AuthError if other machines can reach the address and TLS or the token is missing.
        """
        assert config.server.web is not None
        self._http = HttpServer(config.server.web, config, Rules(), name="the dashboard", flag="--web")
        self._store = store or Path(config.output.track_dir) / FILE
        self._opens = opens
        self._feed: Feed | None = None

    def start(self) -> None:
        """Listen. Raises BindError."""
        self._runs = Runs(Store(self._store), is_list=self._opens != "/")
        door = self._http.start(make_app(self._runs))
        self._runs.max_viewers = min(MAX_VIEWERS, door.max // 2)
        self.address, self.url = self._http.address, self._http.url_with_token(self._opens)
        readers = "anyone with the token" if self._http.is_open else "this machine"
        log.info("dashboard", url=self._http.url(self._opens), address=self.address, readable_by=readers)

    # ---- from the run's thread ------------------------------------------------------------------

    def begin(self, view: View, control: Control | None = None, version: int = 0) -> None:
        """Show a run. `version`: where it continues; the run store has the part before."""
        self._feed = feed = Feed(view, control)
        self._http.loop.call_soon_threadsafe(self._runs.begin, feed, version)

    def retell(self, about: About) -> None:
        """Show changed settings of the run."""
        if self._feed is not None:
            self._http.loop.call_soon_threadsafe(self._feed.retell, about)

    def push(self, tick: Tick) -> None:
        """Show the next tick."""
        if self._feed is not None:
            self._http.loop.call_soon_threadsafe(self._feed.push, tick)

    def close(self) -> None:
        """Stop serving, after viewers have got the newest messages."""
        self._http.close(self._end, _LAST_S)

    def _end(self) -> None:
        if self._feed is not None:
            self._feed.end()
        self._http.loop.call_later(_LAST_S, self._runs.stopped.set)


def serve_dashboard(path: Path, address: str) -> None:
    """Serve until it is interrupted. Raises StoreError for the file, BindError and AuthError for the address."""
    RunStore(path).close()
    dashboard = Dashboard(Config.model_validate({"server": {"web": address}}), path, "/runs")
    dashboard.start()
    print(f"runs of {path}: {dashboard.url}", flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        stop.wait()
    except KeyboardInterrupt:
        pass
    finally:
        dashboard.close()
