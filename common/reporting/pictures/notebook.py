"""How runs show themselves in a notebook: text for a terminal, HTML with a picture for a page, nothing from outside.

IPython asks an object for `_repr_mimebundle_`. What people have named (tasks, runs, metrics, who stopped it) is data,
and escaped. A `Card` that was shown with an id is shown anew in its place as the run goes on; only then is IPython
asked for anything, and it is never imported where the process is no notebook.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from . import Curves, svg

_SHOWN_EVERY_S = 0.5
_MOST_POINTS = 512  # of the losses a session remembers; from there on every second one goes


@dataclass(frozen=True)
class Card:
    """A title, metrics by name, and curves, each picture with what it is over."""

    title: str
    metrics: Sequence[tuple[str, str]]
    pictures: Sequence[tuple[str, Curves, str]] = ()  # (what, curves, over)
    notes: Sequence[str] = ()

    def text(self) -> str:
        """One line, and another for each note."""
        return "\n".join(["  ".join([self.title, *(f"{name} {value}" for name, value in self.metrics)]), *self.notes])

    def html(self) -> str:
        names = "".join(f"<th scope=col style='text-align:right'>{escape(name)}</th>" for name, _ in self.metrics)
        values = "".join(f"<td style='text-align:right'>{escape(value)}</td>" for _, value in self.metrics)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        drawn = "".join(
            _picture(*picture) for picture in self.pictures if sum(len(points) for _, points in picture[1]) > 1
        )
        table = f"<table><tr>{names}</tr><tr>{values}</tr></table>" if self.metrics else ""
        return f"<div><strong>{escape(self.title)}</strong>{table}{notes}{drawn}</div>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.bundle()

    def bundle(self) -> dict[str, str]:
        """What IPython's display takes."""
        return {"text/plain": self.text(), "text/html": self.html()}


def _picture(caption: str, curves: Curves, over: str) -> str:
    style = "<div style='max-width:720px;background:#fff;color:#000'>"
    return f"<figure>{style}{svg(curves, escape(over))}</div><figcaption>{escape(caption)}</figcaption></figure>"


class Shown:
    """A card in an output of a notebook, shown anew at most twice a second."""

    def __init__(self, card: Callable[[], Card]) -> None:
        self._card = card
        self._handle: Any = None
        self._at = 0.0

    def show(self) -> None:
        """Here, from now on. Where there is no IPython a line of text."""
        ipython = sys.modules.get("IPython")
        if ipython is None or ipython.get_ipython() is None:
            print(self._card().text())
            return
        from IPython.display import display

        self._handle = display(self._card().bundle(), raw=True, display_id=True)

    def look_again(self, is_last: bool = False) -> None:
        """Something has changed."""
        if self._handle is not None and (is_last or time.monotonic() - self._at >= _SHOWN_EVERY_S):
            self._at = time.monotonic()
            self._handle.update(self._card().bundle(), raw=True)


@dataclass
class Losses:
    """What a script has recorded, thinned: (step, loss)."""

    points: list[tuple[float, float]] = field(default_factory=list)
    _every: int = 1
    _num: int = 0

    def note(self, step: int, loss: float) -> None:
        if self._num % self._every == 0:
            self.points.append((float(step), loss))
            if len(self.points) >= _MOST_POINTS:
                self.points, self._every = self.points[::2], 2 * self._every
        self._num += 1
