"""Tables of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def number_table(columns: Sequence[str], rows: Iterable[Sequence[str]], bold: Iterable[int] = ()) -> Table:
    """The first column names a row, the others are right-aligned; `bold` are the indices of rows that matter."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    matter = set(bold)
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index in matter else None)
    return table


def page(title: str, *parts: RenderableType, notes: Sequence[str] = ()) -> Group:
    """Returns a title, tables and notes as one renderable."""
    return Group(Text(title, style="bold"), *parts, *(Text(note, style="dim") for note in notes))


def number(value: float | None, form: str = "{:,.1f}", unit: str = "") -> str:
    """Returns the number as text, empty where there is none."""
    return "" if value is None else form.format(value) + (f" {unit}" if unit else "")
