"""What earlier versions had: names of settings, options and codecs, each with a sentence for whoever still uses it."""

from __future__ import annotations

NAMES = {  # of a family, by its noun
    "codec": {"auto": "`ps-launch doctor` measures the link and names a codec; on a slow link q4 is the first to try"}
}

_COMPENSATION = "late gradients are taken as they come; policy.late_scale and late_cut act against lateness"
_MERGE = "leave it out: the steps taken meanwhile are always added to the new weights, as by the rule shift"
SETTINGS = {
    "policy.late_compensation": _COMPENSATION, "policy.late_lambda": _COMPENSATION, "policy.merge": _MERGE,
    "policy.merge_alpha": _MERGE, "upstream.merge": _MERGE, "upstream.merge_alpha": _MERGE,
}  # fmt: skip


def flag(name: str) -> str:
    """Returns the sentence for a flag of an earlier version, such as `--merge`; "" for none."""
    return SETTINGS.get(f"policy.{name.removeprefix('--').replace('-', '_')}", "")
