"""Reads the history of a recorded run (`--history`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...common.config.schema import Config, PolicyConfig
from ...common.errors import UsageError
from ...common.registry import MODES, mode_anywhere
from ...drills.history_lines import Line, read_lines
from ..machines.world import World
from ..traffic.framing import Framing


def read_trace(path: str) -> list[Line]:
    """Returns the server's lines in order. Raises UsageError for a file that is not a history."""
    try:
        with open(path, "rb") as file:
            lines, problems = read_lines(path, file)
    except OSError as error:
        raise UsageError(f"flag --trace: {path} cannot be read: {error.strerror}", fix="a file of --history") from None
    if problems:
        raise UsageError(f"flag --trace: {problems[0]}", fix="ps-launch check shows all its problems")
    found = [line for line in lines if line.role == "server"]
    if not found or found[0].op != "start":
        message = "the server's lines do not begin with a start"
        raise UsageError(f"flag --trace: {path}: {message}", fix="give the file that ps-server wrote with --history")
    return found


def config_of(lines: Sequence[Line], config: Config) -> Config:
    """Returns `config` with the mode, the options and the length of the newest run in a history."""
    at = max(at for at, line in enumerate(lines) if line.op == "start")
    start = lines[at].fields
    common = start["common"]
    options = {name: common[name] for name in ("min_workers", "weighting", "delayed_update") if name in common}
    policy = PolicyConfig.model_validate({**config.policy.model_dump(), **options, **start["options"]})
    mode = next((name for name in config.run.modes if mode_anywhere(name) == start["mode"]), start["mode"])
    counted = [line for line in lines[at:] if line.op == "accept"]
    run_steps = next((line.fields["run_steps"] for line in counted if "run_steps" in line.fields), None)
    taken = max((line["training_steps"] for line in lines[at:] if line.op == "reply"), default=1)
    steps = common.get("training_steps") or run_steps or taken
    run = config.run.model_copy(update={"mode": mode, "steps": steps, "workers": start.get("workers")})
    return config.model_copy(update={"run": run, "policy": policy})


def framing_of(lines: Sequence[Line], config: Config, world: World) -> Framing | None:
    """That of a world, in the mode of the recorded run."""
    if world.framing is None:
        return None
    mode = config_of(lines, config).run.mode
    return replace(world.framing, has_base=not MODES.load(mode).kind.worker_steps)
