"""Shell commands as the pages tell them: taken apart, and offered to the programs' own command lines."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from paramserver.common.errors import ParamServerError, UsageError
from paramserver.docs.making.programs import CONFIGURED, OTHERS, command
from paramserver.launch.main import fold_script_arguments, with_port
from paramserver.tests.docs.blocks import ROOT

_WORDS = {"until", "while", "do", "done", "if", "then", "fi", "!", "wait", "true", "sleep", "test", "cat", "ls", "kill"}
_MODULES = {"paramserver.ps": "ps-server", "paramserver.worker": "ps-worker"}
_ENDS = re.compile(r"[;&|()]+")


@dataclass(frozen=True)
class Simple:
    """One simple command, with the variables before it."""

    environ: dict[str, str]
    argv: tuple[str, ...]


def simple_commands(text: str) -> Iterator[Simple]:
    """Those of a block; comments, redirections and what joins them left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not _ENDS.fullmatch(word):
                words.append(word)
            elif words:
                yield _simple(words)
                words = []


def _simple(words: list[str]) -> Simple:
    environ: dict[str, str] = {}
    while words and (found := re.fullmatch(r"(\w+)=(.*)", words[0])):
        environ[found[1]] = found[2]
        words = words[1:]
    cut = next((i for i, word in enumerate(words) if word in (">", ">>", "<", "2>")), len(words))
    return Simple(environ, tuple(words[:cut]))


def check(simple: Simple) -> str | None:
    """Try it without doing it. None: it is what a program takes; else why nobody can say. UsageError where not."""
    argv = _behind_launchers(simple.argv)
    if not argv or argv[0] in _WORDS:
        return None
    if argv[0].startswith("ps-"):
        with mock.patch.dict(os.environ, simple.environ):
            _check_ours(argv)
        return None
    if argv[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if wrong := [word for word in argv[1:] if "=" not in word and word not in targets]:
            raise UsageError(f"the Makefile has no {wrong[0]}")
        return None
    if argv[0] == "python" and len(argv) > 1:
        # here, in the folder that a page's commands are told for
        is_there = importlib.util.find_spec(argv[2]) is not None if argv[1] == "-m" else os.path.exists(argv[1])
        if not is_there:
            raise UsageError(f"there is no {argv[2] if argv[1] == '-m' else argv[1]}")
        return None
    return f"{argv[0]} is another's"


def _behind_launchers(argv: tuple[str, ...]) -> tuple[str, ...]:
    """`ps-worker ...` of `torchrun ... -m paramserver.worker ...` and of `mpirun -n 4 ps-worker ...`."""
    for at, word in enumerate(argv[1:], 1):
        if argv[at - 1] == "-m" and word in _MODULES:
            return (_MODULES[word], *argv[at + 1 :])
        if argv[0] in ("mpirun", "srun") and word.startswith("ps-"):
            return argv[at:]
    return argv


def _check_ours(argv: tuple[str, ...]) -> None:
    program, *arguments = argv
    if arguments and f"{program} {arguments[0]}" in OTHERS:
        program, arguments = f"{program} {arguments[0]}", arguments[1:]
    if program not in CONFIGURED and program not in OTHERS:
        raise UsageError(f"there is no program {program}")
    if arguments in (["--help"], ["--version"]):
        return
    try:
        if program in CONFIGURED:
            _resolve(program, arguments)
        else:
            _parse(program, arguments)
    except ParamServerError:
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(error.format_message()) from None


def _resolve(program: str, arguments: list[str]) -> None:
    """All sources merged and validated, as by --print-config."""
    if program == "ps-launch":
        arguments = with_port(fold_script_arguments(arguments))
    found = command(program, arguments)
    found.make_context(program, [*arguments])
    arguments = [word for word in arguments if word != "--estimate"]  # it would take its few steps
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        found.main([*arguments, "--print-config"], prog_name=program, standalone_mode=False)


def _parse(program: str, arguments: list[str]) -> None:
    found = command(program)
    if getattr(found, "commands", None):
        context = found.make_context(program, arguments[:1])
        _, found, _ = found.resolve_command(context, arguments[:1])
        arguments = arguments[1:]
    given = found.make_context(program, arguments).params
    if program == "ps-sim":
        from paramserver.simulate.plan import resolve

        resolve(given["config"], given["mode"], given["workers"], {}, given["sets"] or [], os.environ)
    elif given.get("sets"):
        from paramserver.common.config.sources import load_config

        load_config(None, {}, given["sets"], os.environ, is_worker=False)
