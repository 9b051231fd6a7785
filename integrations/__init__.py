"""Integrations with trainers, one file each: the trainer runs the loop, and the server performs `step()`.

A trainer's package is imported only with its file here. docs/trainers.md has the recipes and the guarantees.
"""

from __future__ import annotations


def lacks(extra: str, error: ImportError) -> ImportError:
    """Returns the error for a trainer's package that is not installed."""
    message = f"paramserver.integrations.{extra} needs a package that is not here ({error.name})"
    return ImportError(f"{message}: pip install 'paramserver[{extra}]'", name=error.name)
