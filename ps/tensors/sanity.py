"""Payloads measured as they arrive, window by window, and mended where the settings say so.

`Findings` come of one pass that sees NaN, Inf and the norm; what is made of them is decided in
`ps/core/judgement.py`. Norms are of parameters alone: buffers are no gradient. What a step leaves in the weights is
looked through as well, window by window: finite gradients overflow weights (3e38 at a rate of 1,000), and an optimizer
may divide by zero (Adam with eps 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...common.tensors.layout import FlatRun, Kind, View
from ..core.judgement import SOUND, Judgement, Limits, decide
from .windows import Window

# Below it a factor is no normal float32 any more; its root is.
_LEAST_FACTOR = 1e-30


@dataclass
class Findings:
    """Of one attempt at a payload. `norms` of the gradient, by window, so that the order of arrival changes no bit."""

    is_finite: bool = True
    norms: dict[int, float] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        return math.hypot(*(self.norms[index] for index in sorted(self.norms)))


class Unsound(Exception):
    """A step along finite values has left NaN or Inf in the weights; what, as a phrase."""


class Sanity:
    """Measures and mends payloads, uint8 [exchange_bytes]. `is_gradient`: what their parameters are, or weights.
    `is_part`: of a gradient whose norm no shard sees, about which `judge_whole` decides."""

    def __init__(
        self, limits: Limits, windows: list[Window], view: View, is_gradient: bool, is_part: bool = False,
        name_of: Callable[[FlatRun], str] | None = None,
    ) -> None:  # fmt: skip
        """`name_of` the tensor that an element is in, for people."""
        self.limits, self._name_of = limits, name_of
        self._is_part = is_part
        self._windows = windows
        self._floats = [piece for window in windows for piece in window.pieces if piece.is_float]
        self._view = view
        self._is_gradient = is_gradient

    def look(self, payload: torch.Tensor, windows: slice, findings: Findings) -> None:
        """Add what some windows of a payload hold. After the first NaN or Inf nothing else is looked at."""
        is_measured = self.limits.max_norm is not None
        for index in range(*windows.indices(len(self._windows))):
            norm = self.norm(payload, self._windows[index], is_measured) if findings.is_finite else None
            if norm is None:
                findings.is_finite = False
                return
            findings.norms[index] = norm

    def norm(self, payload: torch.Tensor, window: Window, is_measured: bool = True) -> float | None:
        """Of the window's parameters, 0 unless it `is_measured`; None when one of its floats is NaN or Inf. One pass.

        A sum is several times faster than isfinite and sees every NaN and Inf; only a sum that overflows by itself
        needs the slow look.
        """
        norms = []
        for piece in window.pieces:
            if not piece.is_float:
                continue
            values = self._view(piece, payload)
            is_one = is_measured and piece.kind is Kind.PARAMETER
            norm = _norm(values) if is_one else values.sum().item()
            if not math.isfinite(norm):
                if not bool(torch.isfinite(values).all()):
                    return None
                norm = _large_norm(values) if is_one else 0.0
            if is_one:
                norms.append(norm)
        return math.hypot(*norms)

    def first_unsound(self, payload: torch.Tensor, window: Window) -> FlatRun | None:
        """The first piece of a window in `payload` that holds NaN or Inf, its first one by itself. One pass of sums, as
        in `norm`, for one that was just written and is in the cache."""
        for piece in window.pieces:
            if not piece.is_float or math.isfinite(_sum(self._view(piece, payload))):
                continue
            wrong = torch.nonzero(~torch.isfinite(self._view(piece, payload)))
            if len(wrong):
                size = piece.dtype.itemsize
                return replace(piece, offset=piece.offset + int(wrong[0]) * size, num_elements=1)
        return None

    def examine(self, payload: torch.Tensor, weights: torch.Tensor) -> Judgement:
        """`look` at the whole of a payload, and `judge` it."""
        if self.limits.max_norm is None and self._is_sound(payload):
            return SOUND
        findings = Findings()
        self.look(payload, slice(None), findings)
        return self.judge(payload, findings, weights)

    def _is_sound(self, payload: torch.Tensor) -> bool:
        """Whether no sum of it says otherwise: nearly always all there is to be known."""
        return all(math.isfinite(self._view(piece, payload).sum().item()) for piece in self._floats)

    def judge(self, payload: torch.Tensor, findings: Findings, weights: torch.Tensor) -> Judgement:
        """What becomes of a payload that has been looked at whole; one that is clipped is changed here. `weights`,
        uint8
        [>= exchange_bytes], are the server's: they stand in for statistics and weights that are not finite.
        """
        if findings.is_finite and self.limits.max_norm is None:
            return SOUND
        limits = replace(self.limits, max_norm=None) if self._is_part else self.limits
        action, what, limit = decide(limits, findings.is_finite, findings.norm)
        if not findings.is_finite:
            what += self._in_which(payload)
        wrong, is_clipped = what, False
        if action == "clip" and not findings.is_finite:
            self._mend(payload, weights)
            is_clipped, findings = True, Findings()
            self.look(payload, slice(None), findings)
            action, what, limit = decide(limits, findings.is_finite, findings.norm)
            wrong = f"{wrong}, and without them {what}" if what else wrong
        if action == "clip" and self.limits.max_norm is not None:
            self.scale(payload, self.limits.factor(findings.norm))
            action, is_clipped = "take", True
        if action == "take":
            norm = findings.norm if self._is_part else 0.0
            return Judgement("take", wrong, limit, is_clipped, norm) if is_clipped or norm else SOUND
        assert action != "clip"
        return Judgement(action, wrong, limit)

    def _in_which(self, payload: torch.Tensor) -> str:
        found = (self.first_unsound(payload, window) for window in self._windows)
        first = next((item for item in found if item is not None), None)
        return f" in '{self._name_of(first)}'" if first is not None and self._name_of is not None else ""

    def with_rows(self, judgement: Judgement, rows: Sequence[torch.Tensor]) -> Judgement:
        """What becomes of a contribution with these gradients of rows; where it is clipped they are changed here."""
        if not judgement.is_taken or all(bool(torch.isfinite(row).all()) for row in rows):
            return judgement
        action, what, limit = decide(self.limits, False, 0.0)
        if action == "clip":
            for item in rows:
                torch.nan_to_num_(item, nan=0.0, posinf=0.0, neginf=0.0)
            return judgement._replace(what=what, limit=limit, is_clipped=True)
        assert action != "take"
        return Judgement(action, what, limit)

    def _mend(self, payload: torch.Tensor, weights: torch.Tensor) -> None:
        """Every NaN and Inf of a gradient becomes 0; of statistics and weights, where 0 is a value like any other, what
        the server has there."""
        for window in self._windows:
            for piece in window.pieces:
                if not piece.is_float:
                    continue
                values = self._view(piece, payload)
                if piece.kind is Kind.PARAMETER and self._is_gradient:
                    torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)
                else:
                    values.copy_(torch.where(torch.isfinite(values), values, piece.view(weights)))

    def scale(self, payload: torch.Tensor, factor: float) -> None:
        """Parameters times `factor`, 0 to 1."""
        for window in self._windows:
            self.scale_window(payload, window, factor)

    def scale_window(self, payload: torch.Tensor, window: Window, factor: float) -> None:
        """Those of one window."""
        factors = (factor,) if factor >= _LEAST_FACTOR else (math.sqrt(factor),) * 2
        for piece in window.pieces:
            if piece.kind is Kind.PARAMETER:
                for item in factors:
                    self._view(piece, payload).mul_(item)


def _sum(values: torch.Tensor) -> float:
    """In float16 it would overflow by itself beyond 65,504."""
    return values.sum(dtype=torch.float32 if values.dtype is torch.float16 else None).item()


def _norm(values: torch.Tensor) -> float:
    """2-norm of [n]; not finite when a value is not, or when a square is too large for float32."""
    is_half = values.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(values, dtype=torch.float32 if is_half else None).item()


def _large_norm(values: torch.Tensor) -> float:
    """2-norm of finite [n] whose squares overflow; Inf where even the norm does."""
    largest = values.abs().max().double().item()
    return largest * torch.linalg.vector_norm(values.double() / largest).item()
