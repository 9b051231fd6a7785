"""One file, one name: what makes adding a mode, a codec, a task or a backend one file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paramserver.common.errors import UsageError
from paramserver.common.registry import (
    AGGREGATIONS,
    BACKENDS,
    CODECS,
    MODE_ALIASES,
    MODES,
    TASKS,
    Family,
    canonical_mode,
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of somebody's own, with a family in it."""
    folder = tmp_path / "their_family"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("their_family")]:
        del sys.modules[name]


@pytest.mark.parametrize("family", [MODES, AGGREGATIONS, CODECS, TASKS, BACKENDS], ids=lambda family: family.noun)
def test_every_name_loads(family: Family) -> None:
    names = family.names()
    assert names == sorted(set(names)) != []
    for name in names:
        entry = family.load(name)
        assert isinstance(entry, type), f"{family.noun} '{name}': ENTRY is no class"
        assert entry.__module__.startswith((family.package, *family.others))


def test_a_new_file_is_a_new_name(package: Path) -> None:
    assert Family("their_family", "thing").names() == []
    (package / "base.py").write_text("raise RuntimeError('support code is no implementation')")
    (package / "lambda_.py").write_text("class Mine:\n    pass\n\nENTRY = Mine\n")
    (package / "broken.py").write_text("raise RuntimeError('listing names must not import')")
    family = Family("their_family", "thing", frozenset({"base"}))
    assert family.names() == ["broken", "lambda"]
    assert family.load("lambda").__name__ == "Mine"
    with pytest.raises(RuntimeError, match="must not import"):
        family.load("broken")
    with pytest.raises(UsageError, match="unknown thing 'base'"):
        family.load("base")


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no package paramserver\.nothing"):
        Family("paramserver.nothing", "thing").names()


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ("spp", "did you mean 'ssp'?"), ("localSGD2", "did you mean 'localsgd'?"), ("async_", "did you mean 'async'?"),
        ("zzz", "known: allreduce, async, async_diloco, buffered, diloco, dssp, localsgd, ssp, sync"),
        ("", "known: "), ("base", "known: "), ("rounds", ""), ("../sync", "did you mean 'sync'?"),
    ],
)  # fmt: skip
def test_an_unknown_mode_names_the_nearest(wrong: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        canonical_mode(wrong)
    assert caught.value.message == f"unknown mode '{wrong.lower()}'"
    assert caught.value.fix.startswith(fix)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("given", "name"),
    [("SSP", "ssp"), (" async ", "async"), ("ssgd", "sync"), ("BSP", "sync"), ("asgd", "async"), ("asp", "async"),
     ("averaging", "localsgd")],
)  # fmt: skip
def test_modes_and_their_aliases(given: str, name: str) -> None:
    assert canonical_mode(given) == name


def test_no_alias_hides_a_mode() -> None:
    assert not set(MODE_ALIASES) & set(MODES.names())
    assert set(MODE_ALIASES.values()) <= set(MODES.names())
