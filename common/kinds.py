"""Kinds of contribution, and the properties that server and worker derive from a kind.

Each mode names its kind. Other files do not compare kinds: they read one of the properties below.
"""

from __future__ import annotations

from enum import StrEnum


class ContributionKind(StrEnum):
    """The content of a contribution's payload. Logs and error messages show the values."""

    GRADIENT = "gradient"  # the server runs the workers' optimizer on it
    WEIGHTS = "weights"  # each worker runs its own optimizer; the server averages the weights
    DELTA = "delta"  # weights before the local steps minus weights after; the server runs an outer optimizer on it
    COMPLETION = "completion"  # the peers averaged a gradient themselves, and each of them steps along the mean

    def __init__(self, name: str) -> None:
        # Whether contributions carry tensors, and replies the server's weights. A completion that uploads weights is
        # received as WEIGHTS.
        self.has_payload = name != "completion"
        # Whether the payload is gradients.
        self.holds_gradients = name == "gradient"
        # Whether the payload is the difference of weights that local steps made.
        self.holds_differences = name == "delta"
        # Whether a lossy codec is allowed. Its residual comes later, but of weights it would be lost.
        self.may_lose = name != "weights"
        # Whether the script's optimizer runs in the worker.
        self.worker_steps = name != "gradient"
        # Whether the server runs an optimizer: the workers' optimizer or its own outer optimizer.
        self.server_steps = name in ("gradient", "delta")
        # Whether workers average among themselves.
        self.has_peers = name == "completion"
        # Whether each version is one step along the mean gradient, averaged by the server or by the peers. If not, each
        # worker steps along its own gradients between two exchanges.
        self.steps_along_mean_gradient = name in ("gradient", "completion")

    def received(self, has_payload: bool) -> ContributionKind:
        """Return the kind of a contribution received in a run of this kind: a completion with a payload is WEIGHTS."""
        return ContributionKind.WEIGHTS if has_payload and not self.has_payload else self
