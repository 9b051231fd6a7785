"""What this process runs, which it says with its first contribution: the script or the task, and its settings."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.runstore.process import code_of
from ...common.runstore.record import Settings
from ...common.user_code import is_in_file
from ...common.wire.json_text import to_json
from ...common.wire.records import MAX_WORK

_OF_A_PROCESS = {"rank", "server", "local_rank"}  # of the section worker
_SECRET = re.compile(r"secret|passw|(api|access).?key", re.IGNORECASE)
_SPECIAL_TOKENS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "start", "end"}  # of a vocabulary


class Work:
    """The record of this process's script or task, by the sections of `runstore/record.py`."""

    def __init__(self, config: Config) -> None:
        self.sections: Settings = {
            "worker": config.worker.model_dump(mode="json", exclude=_OF_A_PROCESS),
            "slowdown": config.slowdown.model_dump(mode="json"),
        }
        self._asks_git = not config.worker.rank  # for one of many workers
        self._is_sent = False

    def set_script(self, arguments: Sequence[str]) -> None:
        """Record the script of this process, from `sys.argv`. A prompt and a notebook have none."""
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        if arguments and file is not None and "ipykernel" not in file:
            text = shlex.join(_without_secrets(arguments[1:]))
            code = code_of(Path(file), asks_git=self._asks_git)
            self.sections["script"] = {"path": arguments[0], "arguments": text, **code}

    def set_task(self, config: Config, name: str, args: Mapping[str, Any]) -> None:
        """Record the task of ps-worker and its loader."""
        code = code_of(Path(name.rpartition(":")[0]), asks_git=self._asks_git) if is_in_file(name) else {}
        self.sections["task"] = {"name": name, "args": _as_json(args), "init": config.task.init, **code}
        self.sections["loader"] = config.loader.model_dump(mode="json")

    def add_batch_size(self, size: int) -> None:
        """Record the batch size of a loop; loops of several sizes make a list."""
        run = self.sections.setdefault("run", {})
        known = run.get("batch_size", [])
        sizes = list(dict.fromkeys([*(known if isinstance(known, list) else [known]), size]))
        run["batch_size"] = sizes[0] if len(sizes) == 1 else sizes

    def add_config(self, values: Mapping[str, Any]) -> None:
        """Record hyperparameters of the script. Raises UsageError after the first step, and for too many."""
        if self._is_sent:
            raise UsageError("session.config() after the first step: what ran is on record", fix="call it before")
        found = {name: "***" if _is_secret(name) else value for name, value in _as_json(values).items()}
        self.sections["config"] = {**self.sections.get("config", {}), **found}
        if (size := len(to_json(self.sections))) > MAX_WORK:
            message = f"session.config(): the record would have {size:,} characters, and at most {MAX_WORK:,}"
            raise UsageError(message, fix="leave out what is no hyperparameter")

    def text(self, group_size: int) -> str:
        """Returns the record as JSON, for the first contribution; empty where a script's arguments are too long."""
        self._is_sent = True
        text = to_json(self.sections | {"launch": {"group": group_size}})
        return text if len(text) <= MAX_WORK else ""


def _without_secrets(arguments: Iterable[str]) -> list[str]:
    """Returns the arguments of a script with *** for the values of --token and the like."""
    found, hides = [], False
    for word in arguments:
        name, equals, _ = word.partition("=")
        is_secret = (word.startswith("-") or bool(equals)) and _is_secret(name)
        found.append(f"{name}=***" if is_secret and equals else "***" if hides and not word.startswith("-") else word)
        hides = is_secret and not equals
    return found


def _is_secret(name: str) -> bool:
    """Whether a name is that of a password or of a token for access; `--max-tokens` and `--pad-token` are not."""
    words = re.split(r"[-_.]|(?<=[a-z])(?=[A-Z])", name.lower() if name.isupper() else name)
    is_token = words[-1].lower() == "token" and (len(words) < 2 or words[-2].lower() not in _SPECIAL_TOKENS)
    return is_token or _SECRET.search(name) is not None


def _as_json(value: Any) -> Any:
    """Returns a value as JSON has it: what is no finite number, text, list or mapping becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has none of them, and inf is not nan
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
