"""Follows the server's lines of a history, for the check of its promises and for the replay of its decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..common.registry import MODES, mode_anywhere
from .history_lines import Line


class Follower:
    """Calls `_on_<operation>` for one line after another. A subclass has these methods for the operations it follows.

    A history names no code to run: the user names the file of a mode, wherever it was in that run.
    """

    def __init__(self, modes: Iterable[str] = ()) -> None:
        """`modes`: modes in the user's files, `FILE.py:NAME`, beside the installed ones."""
        self._modes = {**{mode: mode for mode in MODES.names()}, **{mode_anywhere(mode): mode for mode in modes}}
        self._line: Line  # the one that is followed

    def feed(self, line: Line) -> None:
        self._line = line
        getattr(self, f"_on_{line.op}", self._ignore)(line)

    def _ignore(self, line: Line) -> None:
        """The operation means nothing to this follower."""

    def _mode_of(self, fields: dict[str, Any]) -> str | None:
        """Returns the mode that a start or a change of the mode names, None for one that is not known here."""
        return self._modes.get(mode_anywhere(fields["mode"]))
