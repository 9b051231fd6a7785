"""A hook of mkdocs that generates the reference from the schema and the command lines.

reference/settings.md      every key of the configuration, with its flag, default and meaning
reference/commands.md      every command with its flags
<!-- settings of ssp -->   in a page: the options that a mode declares

A build goes into a folder with the version's name, and versions that were built before stay beside it. The header has
the version, and a menu of all versions where the site comes from a web server.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from paramserver.common.config.flags import flag_name, flag_of, sections, settings
from paramserver.common.config.schema import mode_options
from paramserver.common.version import PROGRAM_VERSION

_MARKER = re.compile(r"<!-- settings of (\w+) -->")
_TAGS = re.compile(r"\[/?(?:bold|dim|italic)\]")


def on_config(config: Any) -> Any:
    """Name the version in the header, and build into its folder. Called by mkdocs."""
    config.site_name = f"{config.site_name} {PROGRAM_VERSION}"
    config.site_dir = str(Path(config.site_dir) / PROGRAM_VERSION)
    return config


def on_post_build(config: Any) -> None:
    """List the versions for the theme's menu, and lead to the newest one. Called by mkdocs."""
    site = Path(config.site_dir).parent
    found = sorted((page.parent.name for page in site.glob("*/index.html")), key=_order, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in found]
    (site / "versions.json").write_text(json.dumps(listed))
    (site / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={found[0]}/index.html">\n')


def _order(version: str) -> list[int]:
    """Returns the numbers of a version, so that 0.10.0 comes after 0.9.0."""
    return [int(number) for number in re.findall(r"\d+", version)]


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of the site. Called by mkdocs."""
    from mkdocs.structure.files import File

    for name, text in {"settings": settings_page(), "commands": commands_page()}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page's text. Called by mkdocs before it renders the page."""
    return _MARKER.sub(lambda found: mode_table(found[1]), markdown)


def mode_table(mode: str) -> str:
    """Return the table of a mode's options. Raises KeyError for an unknown mode."""
    if mode == "single":
        return "None, because it has no server."
    known = settings([mode])
    keys = [f"policy.{name}" for name in mode_options()[mode].model_fields]
    return "\n".join(_table(known, keys)) if keys else "None."


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting. Set it in a YAML file, with `--set KEY=VALUE`, as `PS_SECTION__KEY` in the environment, or by "
        "its flag. This page is generated from the schema.",
    ]
    known = settings()
    for name, model in sections().items():
        about = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines += ["", f"## {name}", "", about, "", *_table(known, [k for k in known if k.startswith(f"{name}.")])]
    return "\n".join(lines) + "\n"


def _table(known: dict[str, Any], keys: list[str]) -> Iterator[str]:
    yield "| key | default | flag | |"
    yield "|---|---|---|---|"
    for key in keys:
        info = known[key]
        flag = f"`{flag_name(key, info)}`" if flag_of(key, info) else ""
        default = info.get_default(call_default_factory=True)
        shown = "" if default is None else f"`{_cell(default)}`"
        yield f"| `{key}` | {shown} | {flag} | {_cell(info.description or '')}{_choices(info.annotation)} |"


def _choices(annotation: Any) -> str:
    """Return the values of a Literal as ` (first, second)`."""
    found = [one for one in (annotation, *get_args(annotation)) if str(get_origin(one)).endswith("Literal")]
    names = [str(name) for one in found for name in get_args(one)]
    return f" ({', '.join(names)})" if names else ""


def commands_page() -> str:
    from paramserver.docs.making.programs import described

    lines = ["# Commands", "", "Generated from the programs. Each has `--help` and `--version`."]
    for name, command in described():
        about = _TAGS.sub("", inspect.cleandoc((command.help or "").replace("\b", ""))).strip()
        summary, _, examples = about.partition("Examples")
        lines += ["", f"## {name}", "", summary.strip()]
        if examples.strip():
            lines += ["", "```text", inspect.cleandoc(examples.strip("\n")), "```"]
        lines += ["", "| | |", "|---|---|"]
        lines += [_option(one) for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    return "\n".join(lines) + "\n"


def _option(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| `{_cell(parameter.metavar or parameter.name.upper())}` | {_cell(parameter.help or '')} |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    metavar = "" if parameter.is_flag else f" {_cell(parameter.metavar or 'VALUE')}"
    default = parameter.default
    shown = f" Default: `{_cell(default)}`." if default not in (None, False, (), []) and not callable(default) else ""
    return f"| {names}{metavar} | {_cell(parameter.help or '')}{shown} |"


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
