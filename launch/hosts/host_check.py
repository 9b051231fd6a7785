"""What is asked of a host before anything starts there: two small programs, and what their answers mean.

The programs are run by the host's own interpreter, in the environment its workers get, through the agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import MismatchError, OutputError, ParamServerError, UnreachableError, UsageError
from ...common.wire.json_text import read_json
from ..plan.hosts import Host
from ..plan.process import Child

INSTALLED = """
import importlib.metadata, importlib.util, json, os, sys
asked = json.loads(sys.argv[1])
folder = os.path.expanduser(asked["folder"])
found = {"version": None, "torch": False, "folder": os.path.isdir(folder), "missing": [], "closed": []}
found["python"] = "%d.%d" % sys.version_info[:2]
try:
    found["version"] = importlib.metadata.version("paramserver")
except importlib.metadata.PackageNotFoundError:
    pass
found["torch"] = importlib.util.find_spec("torch") is not None
if found["folder"]:
    os.chdir(folder)
    found["missing"] = [path for path in asked["needs"] if not os.path.exists(path)]
    for path in asked["leaves"]:
        parent = os.path.dirname(path) or "."
        if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
            found["closed"].append(path)
print(json.dumps(found))
"""

REACHES = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reach(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), float(sys.argv[1])).close()
    except OSError as error:
        late = isinstance(error, TimeoutError)
        return "no answer within %s s" % sys.argv[1] if late else str(error.strerror or error)
with ThreadPoolExecutor(16) as pool:
    print(json.dumps(list(pool.map(reach, sys.argv[2:]))))
"""


def last_json(output: str) -> Any:
    """The answer of a program, which may have been preceded by anything; None when there is none."""
    for line in reversed(output.splitlines()):
        try:
            return read_json(line)
        except ValueError:
            continue
    return None


def check_installed(host: Host, found: Mapping[str, Any], version: str, folder: str) -> None:
    """Whether the host can run what this launcher plans. Raises ParamServerError for the first thing it lacks."""
    error: type[ParamServerError] = UsageError
    theirs = found["version"]
    if theirs is None:
        lacks = f"paramserver is not installed for the interpreter there (Python {found['python']})"
        fix = "name the one that has it with python: or venv:"
    elif theirs != version:
        error = MismatchError
        lacks, fix = f"has paramserver {theirs}, this machine {version}", "install the same version on both"
    elif not found["torch"]:
        lacks, fix = "torch is not installed beside paramserver", "pip install torch there"
    elif not found["folder"]:
        lacks, fix = f"there is no directory {folder}", "create it there, or set workdir: to another"
    elif found["missing"]:
        lacks = f"there is no file {found['missing'][0]} in {folder}"
        fix = "put it there; --sync-code copies the task file or script"
    elif found["closed"]:
        error = OutputError
        lacks = f"cannot write {found['closed'][0]} in {folder}"
        fix = "its directory must exist there and be yours to write to"
    else:
        return
    raise error(f"{host.host}: {lacks}", fix=fix)


def check_reaches(host: Host, addresses: Mapping[Child, str], answers: Sequence[str | None]) -> None:
    """Whether the host got through to every server. Raises UnreachableError."""
    for (server, address), problem in zip(addresses.items(), answers, strict=True):
        if problem is not None:
            raise UnreachableError(
                f"{host.host}: cannot reach the {server} at {address}: {problem}",
                fix="give the server's host an address: that others can reach, and let the port through "
                "its firewall (a fixed one with --port)",
            )


def ssh_problem(host: Host, code: int | None, said: Sequence[str], python: str) -> ParamServerError:
    """Why there is no conversation with a host, from what ssh and the shell there said."""
    name, text = host.host, "\n".join(said)
    last = said[-1].strip() if said else f"ssh ended with {code}"
    problem, fix = f"does not answer: {last}", f"see what `ssh {name} true` says"
    if "Host key verification failed" in text:
        problem, fix = "its host key is not known or has changed", f"ssh {name} once by hand"
    elif "Permission denied" in text and code == 255:
        problem = f"does not let us in: {last}"
        fix = f"make `ssh {name} true` work without a password, with a key or an agent; user: names another user"
    elif "Could not resolve" in text or "not known" in text:
        problem, fix = f"is not a name ssh knows: {last}", "correct it, or put it in ~/.ssh/config"
    elif code in (126, 127) or "ommand not found" in text:
        return UsageError(f"{name}: cannot run {python}: {last}", fix="name its interpreter with python: or venv:")
    elif code is None:
        problem = "did not answer in time"
    return UnreachableError(f"{name}: {problem}", fix=fix)


def joined(problems: Sequence[ParamServerError]) -> ParamServerError:
    """One error of all hosts' errors, each with its way out on its own line; the first decides the exit code."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{problem.message} ({problem.fix})" if problem.fix else problem.message for problem in problems]
    return type(problems[0])("\n".join(lines))
