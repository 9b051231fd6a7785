"""Names of earlier versions end in a sentence that says what to use now."""

from __future__ import annotations

import pytest

from paramserver.common import dropped
from paramserver.common.config.flags import settings
from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.common.registry import CODECS
from paramserver.ps.main import main


@pytest.mark.parametrize("name", sorted(dropped.NAMES["codec"]))
def test_a_dropped_codec_is_refused_with_its_fix(name: str) -> None:
    assert name not in CODECS.names()
    with pytest.raises(UsageError, match=f"codec '{name}' was removed") as caught:
        CODECS.check(name)
    assert caught.value.fix == dropped.NAMES["codec"][name]


@pytest.mark.parametrize("key", sorted(dropped.SETTINGS))
def test_a_dropped_setting_is_refused_with_its_fix(key: str) -> None:
    assert key not in settings()
    with pytest.raises(UsageError, match=f"--set {key}: {key} was removed") as caught:
        load_config(None, {}, [f"{key}=1"], {})
    assert caught.value.fix == dropped.SETTINGS[key]


@pytest.mark.parametrize("flag", ["--merge", "--merge-alpha", "--late-compensation"])
def test_a_dropped_flag_is_refused_with_its_fix(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ps-server", "--mode", "diloco", flag, "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == UsageError.exit_code
    assert capsys.readouterr().err == f"ps-server: No such option: {flag}\n  fix: {dropped.flag(flag)}\n"
