"""Trainers on a parameter server, a file each: the trainer owns the loop, the server what `step()` means.

Nothing of a trainer is imported unless its file is. docs/trainers.md has the recipes and what holds.
"""

from __future__ import annotations


def lacks(extra: str, error: ImportError) -> ImportError:
    """What to say where the package that a file is for is not there."""
    message = f"paramserver.integrations.{extra} needs a package that is not here ({error.name})"
    return ImportError(f"{message}: pip install 'paramserver[{extra}]'", name=error.name)
