"""Processes of a test, by a mark in their environment."""

from __future__ import annotations

import psutil


def marked_processes(mark: str) -> dict[psutil.Process, str]:
    """The command lines of what still runs and has the mark as PS_TEST_MARK."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PS_TEST_MARK") == mark:
                found[process] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found
