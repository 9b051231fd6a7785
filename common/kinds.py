"""Kinds of contribution, and the properties that server and worker derive from a kind.

Each mode names its kind. Other files do not compare kinds: they read one of the properties below. Each kind computes
its properties once.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property


class ContributionKind(StrEnum):
    """The content of a contribution's payload. Logs and error messages show the values."""

    GRADIENT = "gradient"  # the server runs the workers' optimizer on it
    WEIGHTS = "weights"  # each worker runs its own optimizer; the server averages the weights
    DELTA = "delta"  # weights before the local steps minus weights after; the server runs an outer optimizer on it
    COMPLETION = "completion"  # the peers averaged a gradient themselves, and each of them steps along the mean

    @cached_property
    def has_payload(self) -> bool:
        """Whether the contribution carries tensors. A completion that uploads weights is received as WEIGHTS."""
        return self is not ContributionKind.COMPLETION

    @cached_property
    def holds_gradients(self) -> bool:
        """Whether the payload is gradients."""
        return self is ContributionKind.GRADIENT

    @cached_property
    def holds_differences(self) -> bool:
        """Whether the payload is the difference of weights that local steps made."""
        return self is ContributionKind.DELTA

    @cached_property
    def may_lose(self) -> bool:
        """Whether a lossy codec is allowed. Its residual comes later, but of weights it would be lost."""
        return self is not ContributionKind.WEIGHTS

    @cached_property
    def worker_steps(self) -> bool:
        """Whether the script's optimizer runs in the worker."""
        return self is not ContributionKind.GRADIENT

    @cached_property
    def server_steps(self) -> bool:
        """Whether the server runs an optimizer: the workers' optimizer or its own outer optimizer."""
        return self in (ContributionKind.GRADIENT, ContributionKind.DELTA)

    @cached_property
    def has_peers(self) -> bool:
        """Whether workers average among themselves. Replies then carry no weights."""
        return self is ContributionKind.COMPLETION

    @cached_property
    def steps_along_mean_gradient(self) -> bool:
        """Whether each version is one step along the mean gradient, averaged by the server or by the peers."""
        return self in (ContributionKind.GRADIENT, ContributionKind.COMPLETION)

    def received(self, has_payload: bool) -> ContributionKind:
        """Return the kind of a contribution received in a run of this kind: a completion with a payload is WEIGHTS."""
        return ContributionKind.WEIGHTS if has_payload and not self.has_payload else self
