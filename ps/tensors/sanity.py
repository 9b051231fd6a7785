"""Checks payloads for NaN, Inf and large norms as they arrive, window by window, and repairs them if settings say so.

One pass over a payload gives `Findings`, from which `common/tensors/judgement.py` decides. Norms cover only parameters,
because buffers are not gradients. The weights after a step are checked as well: a finite gradient can make weights
overflow (3e38 at a rate of 1,000), and an optimizer may divide by zero (Adam with eps 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...common.config.sections.training import StoreConfig
from ...common.tensors.judgement import SOUND, Judgement, decide, factor_to
from ...common.tensors.layout import FlatRun, Kind, View
from .flat_optimizer import Window

# A smaller factor would be a subnormal float32, so its square root is applied twice.
_LEAST_FACTOR = 1e-30


@dataclass
class Findings:
    """Findings in a payload. `norms` are by window, so that the order of arrival does not change the result."""

    is_finite: bool = True
    norms: dict[int, float] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        return math.hypot(*(self.norms[index] for index in sorted(self.norms)))


class Unsound(Exception):
    """A step along finite values left NaN or Inf in the weights. The message is a phrase that names the position."""


class Sanity:
    """Measures and repairs payloads, uint8 [exchange_bytes].

    `is_gradient`: the parameters of a payload are gradients, not weights. `is_part`: this shard has only a part of the
    gradient, so its norm is judged later, over all shards. `name_of` returns the name of an element's tensor.
    """

    def __init__(
        self, limits: StoreConfig, windows: list[Window], view: View, is_gradient: bool, is_part: bool = False,
        name_of: Callable[[FlatRun], str] = lambda _: "",
    ) -> None:  # fmt: skip
        self.limits = limits
        self._limits_here = limits.model_copy(update={"max_norm": None}) if is_part else limits
        self._windows, self._view, self._name_of = windows, view, name_of
        self._floats = [piece for window in windows for piece in window.floats]
        self._is_gradient, self._is_part = is_gradient, is_part

    def look(self, payload: torch.Tensor, windows: slice, findings: Findings) -> Findings:
        """Add the findings in some windows of a payload. After the first NaN or Inf, no window is examined."""
        is_measured = self.limits.max_norm is not None
        for index in range(*windows.indices(len(self._windows))):
            norm = self.norm(payload, self._windows[index], is_measured) if findings.is_finite else None
            if norm is None:
                findings.is_finite = False
                break
            findings.norms[index] = norm
        return findings

    def norm(self, payload: torch.Tensor, window: Window, is_measured: bool = True) -> float | None:
        """Return the norm of the window's parameters, or None if the window has NaN or Inf. Without `is_measured`, 0.

        A sum is several times faster than isfinite, and every NaN or Inf makes it not finite. Only if the sum is not
        finite does the slow check decide whether a value is, or whether the sum overflowed.
        """
        norms = []
        for piece in window.floats:
            values = self._view(piece, payload)
            has_norm = is_measured and piece.kind is Kind.PARAMETER
            dtype = torch.float32 if piece.dtype.itemsize == 2 else None  # float16 would overflow above 65,504
            norm = (torch.linalg.vector_norm(values, dtype=dtype) if has_norm else values.sum(dtype=dtype)).item()
            if not math.isfinite(norm):
                if not bool(torch.isfinite(values).all()):
                    return None
                # The squares overflow. The result is Inf if even the norm overflows.
                largest = values.abs().max().double().item()
                norm = largest * torch.linalg.vector_norm(values.double() / largest).item()
            if has_norm:
                norms.append(norm)
        return math.hypot(*norms)

    def first_unsound(self, payload: torch.Tensor, window: Window) -> FlatRun | None:
        """Return the first element of a window in `payload` that is NaN or Inf, or None."""
        if self.norm(payload, window, is_measured=False) is not None:
            return None
        for piece in window.floats:
            wrong = torch.nonzero(~torch.isfinite(self._view(piece, payload)))
            if len(wrong):
                return replace(piece, offset=piece.offset + int(wrong[0]) * piece.dtype.itemsize, num_elements=1)
        return None

    def examine(self, payload: torch.Tensor, weights: torch.Tensor) -> Judgement:
        """Examine and judge a whole payload."""
        if self.limits.max_norm is None:
            for piece in self._floats:
                if not math.isfinite(self._view(piece, payload).sum().item()):
                    break
            else:
                return SOUND
        return self.judge(payload, self.look(payload, slice(None), Findings()), weights)

    def changes(self, findings: Findings) -> bool:
        """Whether `judge` will change a payload with these findings."""
        is_sound = findings.is_finite and self.limits.max_norm is None
        return not is_sound and decide(self._limits_here, findings.is_finite, findings.norm)[0] == "clip"

    def judge(self, payload: torch.Tensor, findings: Findings, weights: torch.Tensor) -> Judgement:
        """Return the judgement of a payload that was examined completely. Clipping changes the payload.

        `weights`, uint8 [>= exchange_bytes], are the server's. They replace statistics and weights that are not finite.
        """
        if findings.is_finite and self.limits.max_norm is None:
            return SOUND
        action, problem, limit = decide(self._limits_here, findings.is_finite, findings.norm)
        is_clipped = False
        if not findings.is_finite:
            found = filter(None, (self.first_unsound(payload, window) for window in self._windows))
            if name := next(map(self._name_of, found), ""):
                problem += f" in '{name}'"
            if action == "clip":
                # By 0 in a gradient, and by the server's value in statistics and weights.
                for piece in self._floats:
                    values = self._view(piece, payload)
                    if piece.kind is Kind.PARAMETER and self._is_gradient:
                        torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)
                    else:
                        values.copy_(torch.where(torch.isfinite(values), values, piece.view(weights)))
                is_clipped, findings = True, self.look(payload, slice(None), Findings())
                action, other, limit = decide(self._limits_here, findings.is_finite, findings.norm)
                problem = f"{problem}, and without them {other}" if other else problem
        if action == "clip" and self.limits.max_norm is not None:
            self.scale(payload, factor_to(self.limits.max_norm, findings.norm))
            action, is_clipped = "take", True
        if action == "take":
            norm = findings.norm if self._is_part else 0.0
            return Judgement("take", problem, limit, is_clipped, norm) if is_clipped or norm else SOUND
        assert action != "clip"
        return Judgement(action, problem, limit)

    def with_rows(self, judgement: Judgement, rows: Sequence[torch.Tensor]) -> Judgement:
        """Return the judgement of a contribution with these gradients of rows. Clipping changes the rows."""
        if not judgement.is_taken or all(bool(torch.isfinite(row).all()) for row in rows):
            return judgement
        action, problem, limit = decide(self.limits, False, 0.0)
        if action == "clip":
            for row in rows:
                torch.nan_to_num_(row, nan=0.0, posinf=0.0, neginf=0.0)
            return judgement._replace(problem=problem, limit=limit, is_clipped=True)
        assert action != "take"
        return Judgement(action, problem, limit)

    def scale(self, payload: torch.Tensor, factor: float, window: Window | None = None) -> None:
        """Multiply the parameters of one window, or of all, by `factor`, 0 to 1."""
        factors = (factor,) if factor >= _LEAST_FACTOR else (math.sqrt(factor),) * 2
        windows = self._windows if window is None else [window]
        for piece in (piece for window in windows for piece in window.pieces if piece.kind is Kind.PARAMETER):
            for item in factors:
                self._view(piece, payload).mul_(item)
