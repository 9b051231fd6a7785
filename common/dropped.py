"""What earlier versions had: names of settings, options and codecs, each with a sentence for whoever still uses it."""

from __future__ import annotations

CODECS = {"auto": "`ps-launch doctor` measures the link and names a codec; on a slow link q4 is the first to try"}

_COMPENSATION = "late gradients are taken as they come; policy.late_scale and late_cut act against lateness"
SETTINGS = {"policy.late_compensation": _COMPENSATION, "policy.late_lambda": _COMPENSATION}
