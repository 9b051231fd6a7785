"""Kinds of contribution: what a worker sends, and what follows from it on both sides.

A mode names its kind. No other file compares kinds: it asks one of these questions.
"""

from __future__ import annotations

from enum import StrEnum


class ContributionKind(StrEnum):
    """What the payload of a contribution holds. The values are the words that people read."""

    GRADIENT = "gradient"  # the server steps the workers' optimizer along it
    WEIGHTS = "weights"  # the worker steps its own optimizer, and the server averages
    DELTA = "delta"  # the weights that local steps began from minus those they led to: the server steps along it
    COMPLETION = "completion"  # peers have averaged a gradient themselves, and each steps along the mean

    @property
    def has_payload(self) -> bool:
        """A completion that uploads weights is of the kind WEIGHTS when it is received."""
        return self is not ContributionKind.COMPLETION

    @property
    def holds_gradients(self) -> bool:
        return self is ContributionKind.GRADIENT

    @property
    def holds_differences(self) -> bool:
        """Of weights, which local steps have made."""
        return self is ContributionKind.DELTA

    @property
    def may_lose(self) -> bool:
        """A codec may leave out some of the payload: the rest comes later. Of weights it would be lost."""
        return self is not ContributionKind.WEIGHTS

    @property
    def worker_steps(self) -> bool:
        """The optimizer of the script runs in the worker."""
        return self is not ContributionKind.GRADIENT

    @property
    def server_steps(self) -> bool:
        """An optimizer runs in the server: the workers', or one of its own."""
        return self in (ContributionKind.GRADIENT, ContributionKind.DELTA)

    @property
    def has_peers(self) -> bool:
        """Workers average among themselves, and replies carry no weights."""
        return self is ContributionKind.COMPLETION

    @property
    def steps_along_mean_gradient(self) -> bool:
        """A version is a step along the mean gradient, wherever it is averaged."""
        return self in (ContributionKind.GRADIENT, ContributionKind.COMPLETION)

    def received(self, has_payload: bool) -> ContributionKind:
        """The kind of a contribution that comes to a run of this kind: a completion may upload weights."""
        return ContributionKind.WEIGHTS if has_payload and not self.has_payload else self
