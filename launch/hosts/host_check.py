"""Checks a host before anything starts there: a small program, and the meaning of replies.

The host's own interpreter runs the program, in the environment of its workers, through the agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import MismatchError, OutputError, ParamServerError, UnreachableError, UsageError
from ..plan.hosts import Host

INSTALLED = """
import importlib.metadata, importlib.util, json, os, sys
wanted = json.loads(sys.argv[1])
folder = os.path.expanduser(wanted["folder"])
found = {"version": None, "folder": os.path.isdir(folder), "missing": [], "closed": []}
found["python"], found["torch"] = "%d.%d" % sys.version_info[:2], importlib.util.find_spec("torch") is not None
try:
    found["version"] = importlib.metadata.version("paramserver")
except importlib.metadata.PackageNotFoundError:
    pass
if found["folder"]:
    os.chdir(folder)
    found["missing"] = [path for path in wanted["needs"] if not os.path.exists(path)]
    found["closed"] = [path for path in wanted["leaves"] if not os.access(os.path.dirname(path) or ".", os.W_OK)]
print(json.dumps(found))
"""


def check_installed(host: Host, found: Mapping[str, Any], version: str, folder: str) -> None:
    """Raise ParamServerError for the first thing that the host lacks for this plan."""
    theirs, missing, closed = found["version"], found["missing"], found["closed"]
    lacks: list[tuple[object, type[ParamServerError], str, str]] = [
        (theirs is None, UsageError, f"paramserver is not installed for its interpreter (Python {found['python']})",
         "name the one that has it with python: or venv:"),
        (theirs != version, MismatchError, f"has paramserver {theirs}, this machine {version}",
         "install the same version on both"),
        (not found["torch"], UsageError, "torch is not installed beside paramserver", "pip install torch there"),
        (not found["folder"], UsageError, f"there is no directory {folder}",
         "create it there, or set workdir: to another"),
        (missing, UsageError, f"there is no file {next(iter(missing), '')} in {folder}",
         "put it there; --sync-code copies the task file or script"),
        (closed, OutputError, f"cannot write {next(iter(closed), '')} in {folder}",
         "its directory must exist there and be yours to write to"),
    ]  # fmt: skip
    for is_lacking, error, text, fix in lacks:
        if is_lacking:
            raise error(f"{host.host}: {text}", fix=fix)


def ssh_problem(host: Host, code: int | None, output: Sequence[str], python: str) -> ParamServerError:
    """Returns the reason why a host has no agent, from the output of ssh and of the shell there."""
    name, text = host.host, "\n".join(output)
    last = output[-1].strip() if output else f"ssh ended with {code}"
    if "Host key verification failed" in text:
        problem, fix = "its host key is not known or has changed", f"ssh {name} once by hand"
    elif "Permission denied" in text and code == 255:
        problem = f"does not let us in: {last}"
        fix = f"make `ssh {name} true` work without a password, with a key or an agent; user: names another user"
    elif "Could not resolve" in text or "not known" in text:
        problem, fix = f"is not a name ssh knows: {last}", "correct it, or put it in ~/.ssh/config"
    elif code in (126, 127) or "ommand not found" in text:
        return UsageError(f"{name}: cannot run {python}: {last}", fix="name its interpreter with python: or venv:")
    else:
        problem = "did not answer in time" if code is None else f"does not answer: {last}"
        fix = f"look at the output of `ssh {name} true`"
    return UnreachableError(f"{name}: {problem}", fix=fix)
