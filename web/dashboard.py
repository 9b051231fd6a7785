"""`ps-runs ui FILE`: the dashboard with the runs of a run store, without a server."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from ..common.config.schema import Config
from ..common.runstore.reading import RunStore
from .serve import Page


def serve_dashboard(path: Path, address: str) -> None:
    """Until it is interrupted. StoreError for a file that cannot be read, BindError for the address, AuthError where
    others could reach it."""
    with RunStore(path):
        pass
    page = Page(Config.model_validate({"server": {"web": address}}), path, "/runs")
    page.start()
    print(f"runs of {path}: {page.url}", flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        stop.wait()
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
