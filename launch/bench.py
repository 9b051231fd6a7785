"""Starts `benchmarks/`, which is installed as an extra (`paramserver[bench]`)."""

from __future__ import annotations

import importlib
import sys

from ..common.config.cli import report
from ..common.errors import UsageError

_COMMAND = "..benchmarks.main"
_FIX = "pip install 'paramserver[bench]'; from a checkout: pip install -e . (or ./benchmarks beside it)"


def main() -> None:
    """Entry point of `ps-bench`."""
    try:
        command = importlib.import_module(_COMMAND, __package__)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        sys.exit(report("ps-bench", UsageError(f"{missing} is not installed: the benchmarks are an extra", fix=_FIX)))
    command.main()
