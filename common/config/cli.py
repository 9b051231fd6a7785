"""Builds the command line of every program, runs it, and prints its errors.

A user's mistake is printed as `ps-server: MESSAGE` and `  fix: FIX`, and the process ends with the exit code of the
error's class. Only bugs of the project show a traceback.
"""

from __future__ import annotations

import errno
import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from .. import synonyms
from ..errors import EXIT_DRAINED, EXIT_INTERRUPTED, EXIT_OUTPUT_LOST, OutputError, ParamServerError, UsageError
from . import quiet

# pydantic, yaml and rich are imported where they are used: not every command needs them.
if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from .option import Flag
    from .sources import Resolved

ConfigOption = Annotated[str | None, typer.Option("--config", help="YAML file; flags win over it.")]
_other = partial(typer.Option, rich_help_panel="Other")
SetOption = Annotated[list[str] | None, _other("--set", metavar="SECTION.KEY=VALUE", help="Set any key; repeatable.")]
PrintConfigOption = Annotated[bool, _other("--print-config", help="Show every setting and its origin, then stop.")]
# A command's parameter `flags`: the value of each flag by dotted key; None if the flag was not given.
Flags = Mapping[str, Any]


_EPILOG = "--version, by itself, shows the version."


class Drained(BaseException):
    """Raised by the SIGTERM handler, so that the program cleans up and ends with exit code 143."""


class _Help:
    """Prints help texts without reformatting, and each option under the heading of its panel.

    This is Click's own plain help. Rich's boxes would add 0.15 s to every `--help`.
    """

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write(indent(inspect.cleandoc(self.help or ""), "  ") + "\n")  # type: ignore[attr-defined]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            otherwise = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (row := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(parameter.rich_help_panel or otherwise, []).append(row)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class _Command(_Help, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option without its value, which would take the next option for its value. Raises UsageError."""
        options = [found for found in self.get_params(ctx) if found.param_type_name == "option"]
        valued = {name for option in options if not option.is_flag for name in option.opts}  # type: ignore[attr-defined]
        before_end = args[: args.index("--")] if "--" in args else args
        for option, value in pairwise([*before_end, "--"]):
            if option in valued and value.startswith("--"):
                program = ctx.command_path.partition(" ")[0]
                fix = synonyms.of_flag(program, option) or f"{option} VALUE; {program} --help lists every flag"
                raise UsageError(f"option {option} needs a value", fix=fix)
        return super().parse_args(ctx, args)


class _Group(_Help, TyperGroup):
    pass


class App(typer.Typer):
    """A Typer app with plain help."""

    def command(self, *arguments: Any, **options: Any) -> Any:
        return super().command(*arguments, cls=_Command, **options)


def make_app(help_text: str | None = None) -> App:
    """Return an app with the options that all programs share. `help_text` is the program's own description."""
    return App(
        cls=_Group,
        add_completion=False,
        rich_markup_mode=None,
        help=help_text,
        epilog=_EPILOG,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def run_command(program: str, command: Callable[..., int | None]) -> NoReturn:
    """Run a program of one command, and end the process with the command's exit code.

    The command's docstring is its help. Its first parameter is `Flags`: the flags that fields of the configuration
    declare for this program. The second is the configuration file. All others are Typer's, and stand last in --help.
    """
    gc.disable()  # until the command runs, because modules that are being imported are not garbage
    try:
        app = single_app(program, command, sys.argv[1:])
    except UsageError as error:
        sys.exit(report(program, error))
    run_app(app, program)


def single_app(program: str, command: Callable[..., int | None], arguments: list[str]) -> App:
    """Returns the app of a program of one command, with its flags for these `arguments`. Raises UsageError.

    Options of modes in files, `--mode FILE.py:NAME`, are flags too.
    """
    texts = [argument.removeprefix("--mode=") for argument in arguments if argument.startswith("--mode=")]
    texts += [text for flag, text in pairwise(arguments) if flag == "--mode"]
    modes: list[str] = []
    if texts:
        from .sources import modes_in_files

        _, modes = modes_in_files([("run.other_modes", text.split(","), "flag") for text in texts])
    app = make_app()
    app.command(help=command.__doc__, epilog=_EPILOG)(_with_flags(program, command, modes))
    return app


def _with_flags(program: str, command: Callable[..., int | None], modes: list[str]) -> Callable[..., int | None]:
    """Returns `command` with one option for each of the program's flags instead of its first parameter."""
    from .flags import flags_of

    flags, kind = flags_of(program, modes), inspect.Parameter.KEYWORD_ONLY
    names = {key.replace(".", "__"): key for key in flags}
    options = {name: _option(program, key, *flags[key]) for name, key in names.items()}
    made = [inspect.Parameter(name, kind, default=None, annotation=option) for name, option in options.items()]
    _, config, *others = inspect.signature(command, eval_str=True).parameters.values()

    def with_flags(**arguments: Any) -> int | None:
        gc.enable()
        return command({key: arguments.pop(name) for name, key in names.items()}, **arguments)

    parameters = [parameter.replace(kind=kind) for parameter in (config, *made, *others)]
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def _option(program: str, key: str, info: FieldInfo, flag: Flag) -> Any:
    """Returns the annotation of a Typer option with the field's type. The schema checks the bounds."""
    from .flags import flag_name
    from .option import WORKER
    from .plain import types_in

    kinds = types_in(info.annotation)
    number = "FLOAT" if float in kinds else "INTEGER" if int in kinds else None
    name = flag_name(key, info)
    both = f"{name}/--no-{name.removeprefix('--')}" if info.default is True else name  # lets the user switch it off
    names = [f"-{flag.short}", both] if flag.short else [both]
    text = f"{info.description}; only without a server" if flag.is_for_alone and program == WORKER else info.description
    option = typer.Option(*names, metavar=flag.metavar or number, help=text, rich_help_panel=flag.panel)
    return Annotated[(bool if bool in kinds else str) | None, option]


def before_torch() -> None:
    """Set variables that torch and gRPC read when they are imported. Call this function before the imports.

    Idle OpenMP threads spin by default and take the cores from the other processes of the run: 2 workers and a server
    on 2 cores took 38 ms a step, and 10 ms with passive threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A process that waits in torch's store would otherwise log two lines of C++ every second.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A failed handshake is reported with its reason by `common/security.py`.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def after_torch() -> None:
    """Exclude everything imported so far from garbage collection, and turn the collector on.

    Modules of the project live as long as the process. Looking through them costs 0.2 s here, and 0.3 s at its end.
    """
    gc.freeze()
    gc.enable()


def resolve(
    config_path: str | None, flags: Flags, sets: list[str] | None, print_config: bool, *, is_worker: bool = False
) -> Resolved:
    """Load the configuration from all sources; with `print_config` show it and exit 0.

    Only a worker reads its rank from an engine's RANK or SLURM_PROCID.
    """
    from .sources import load_config

    resolved = load_config(config_path, flags, sets or [], os.environ, is_worker=is_worker)
    if print_config:
        show_config(resolved)
        raise SystemExit(0)
    return resolved


def show_config(resolved: Resolved) -> None:
    """Print every setting, its value and its origin."""
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, header_style="bold", pad_edge=False)
    for row in resolved.rows():
        table.add_row(*row)
    Console(soft_wrap=True, markup=False, emoji=False).print(table)


def _fix_of(program: str, error: Any, message: str) -> str:
    """Returns what to write instead of a wrong flag, command or argument."""
    wrong = getattr(error, "option_name", None)
    found = synonyms.of_dropped_flag(wrong) or synonyms.of_flag(program, wrong) if wrong else ""
    for flag, word in pairwise(["", *sys.argv[1:]]):
        if f"unexpected extra argument ({word}" in message.replace("(s)", "") or f"No such command '{word}'" in message:
            takes_none = f"{flag} takes no value; " if flag.startswith("--") else ""
            found = found or synonyms.of_word(program, word, flag) or takes_none
            break
    return found if found and not found.endswith("; ") else f"{found}{program} --help lists every flag"


def run_app(app: typer.Typer, program: str) -> NoReturn:
    """Run a Typer app, and end the process with its exit code."""
    if sys.argv[1:] == ["--version"]:
        from ..version import versions_text

        print(f"{program} {versions_text()}")
        sys.exit(0)
    quiet.end()
    try:
        code = app(prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except ParamServerError as error:
        code = report(program, error)
    except Drained:
        code = EXIT_DRAINED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else ParamServerError.exit_code
    except Exception as error:  # Click's error for a wrong flag; others are bugs, which show a traceback
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EPIPE):
            code = _output_lost(program, error)
        elif hasattr(error, "format_message"):
            message = error.format_message()
            fix = _fix_of(program, error, message)
            if not fix.endswith("lists every flag"):  # Click's own suggestions are of the spelling alone
                message = message.partition(" (Possible options:")[0].partition(" (Did you mean")[0]
            code = report(program, UsageError(message, fix=fix))
        else:
            raise
    with suppress(OSError):
        sys.stderr.flush()
    quiet.over(code or 0)
    sys.exit(code or 0)


def _output_lost(program: str, error: OSError) -> int:
    """Report that the output cannot be written, unless its reader has read enough, as `| head` has."""
    discard_from_now_on(1)
    if error.errno == errno.EPIPE:
        return EXIT_OUTPUT_LOST
    fix = "free space, or send it elsewhere"
    return report(program, OutputError(f"the output cannot be written: {error.strerror}", fix=fix))


def discard_from_now_on(descriptor: int) -> None:
    """Redirect a standard stream that nobody reads to /dev/null, so that no later flush fails."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def report(program: str, error: ParamServerError) -> int:
    """Print an error for a person, and return its exit code."""
    with suppress(OSError):  # standard error cannot be written
        for index, line in enumerate(error.message.splitlines()):
            print(f"{program}: {line}" if index == 0 else f"  {line}", file=sys.stderr)
        if error.fix:
            print(f"  fix: {error.fix}", file=sys.stderr)
    return error.exit_code
