"""What a server refuses before it listens, and what it warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.errors import AuthError
from paramserver.ps.main import check_before_loading
from paramserver.ps.wire.security import check_security, insecurity

from ..certificates import certs, secured


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab")
    certs("init", path, "--workers", "1", "--shards", "3")
    return path


def config_of(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("listen", "has_tls", "has_token", "words"),
    [
        ("127.0.0.1:0", False, False, None),
        ("[::1]:0", False, False, None),
        ("0.0.0.0:0", True, True, None),
        ("0.0.0.0:0", False, False, "the connection is neither encrypted nor authenticated"),
        ("0.0.0.0:0", False, True, "the connection is not encrypted: no security.cert"),
        ("[::]:0", True, False, "the connection is not authenticated: no token"),
        ("gpu-box:0", False, False, "gpu-box:0 can be reached by other machines"),
    ],
)
def test_open_address_needs_tls_and_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, listen: str, has_tls: bool, has_token: bool, words: str
) -> None:
    monkeypatch.setenv("PS_TOKEN", "a-token" if has_token else "")
    security = {"cert": f"{folder}/server.crt", "key": f"{folder}/server.key"} if has_tls else {}
    config = config_of(server={"listen": listen}, security=security)
    insecure = config_of(server={"listen": listen, "insecure": True}, security=security)
    check_before_loading(insecure)
    if words is None:
        check_before_loading(config)
        return
    with pytest.raises(AuthError, match=words.replace("(", r"\(")) as refused:
        check_before_loading(config)
    assert "ps-certs init" in refused.value.fix and "--insecure" in refused.value.fix
    assert insecurity(insecure) in refused.value.message, "it is warned of"


@pytest.mark.parametrize("security", [{"ca": "ca.crt"}, {"ca": "ca.crt", "mutual": True}])
def test_server_without_a_certificate_does_not_pretend(folder: Path, security: dict[str, Any]) -> None:
    security = security | {"ca": f"{folder}/ca.crt"}
    with pytest.raises(AuthError, match="would not use TLS"):
        check_security(config_of(security=security))


@pytest.mark.parametrize(("name", "says"), [("server", "ps-server"), ("shard-2", "shard-2"), ("rank-0", "rank-0")])
def test_a_shard_with_another_ones_certificate_does_not_start(folder: Path, name: str, says: str) -> None:
    files = secured(folder, name, None).config
    server = {"shard": 1, "shards": 2}
    mutual = files.model_copy(update={"mutual": True}).model_dump()
    with pytest.raises(AuthError, match=f"{name}.crt is the certificate of '{says}', and this is shard 1") as refused:
        check_security(config_of(server=server, security=mutual))
    assert "ps-certs init DIR --renew --shards 2" in refused.value.fix
    check_security(config_of(server=server, security=secured(folder, "shard-1", None).config.model_dump()))
    check_security(config_of(server=server, security=files.model_dump()))
