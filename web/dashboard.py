"""`ps-runs ui FILE`: the dashboard with the runs of a run store, without a server."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from ..common.config.schema import Config
from ..common.runstore.reading import RunStore
from .serve import Dashboard


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
