"""Tokens, certificates and keys as they come from files: what is taken, what is refused, what is never shown."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.config.addresses import is_loopback, split_address
from paramserver.common.config.schema import SecurityConfig
from paramserver.common.config.sources import load_config
from paramserver.common.errors import AuthError, UsageError
from paramserver.common.security import (
    Credentials,
    facts_of,
    read_pem,
    read_token,
    shows_token,
    warn_of_readable_secrets,
)
from paramserver.launch.certs.kit import issue, make_ca

SECRET = "s3cret-of-this-test"
tokens = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, server.*, rank-3.*, and an expired.crt, a future.crt with their keys."""
    path = tmp_path_factory.mktemp("certs")
    ca, now, day = make_ca("lab", 30), datetime.now(UTC), timedelta(days=1)
    made = {
        "ca": ca,
        "server": issue(ca, "server", 30, ["localhost", "127.0.0.1", "::1"]),
        "rank-3": issue(ca, "rank-3", 30),
        "expired": issue(ca, "rank-3", 1, begins=now - 2 * day),
        "future": issue(ca, "rank-3", 1, begins=now + day),
    }
    for name, identity in made.items():
        (path / f"{name}.crt").write_bytes(identity.certificate_pem)
        (path / f"{name}.key").write_bytes(identity.key_pem)
    return path


def of_files(folder: Path, cert: str, key: str | None = None, ca: str = "ca.crt") -> SecurityConfig:
    return SecurityConfig(ca=str(folder / ca), cert=str(folder / f"{cert}.crt"), key=str(folder / f"{key or cert}.key"))


# ---- the token ------------------------------------------------------------------------------------


@given(tokens, st.sampled_from(["", " ", "\n", "\r\n\t "]))
def test_token_is_read_without_the_space_around_it(token: str, space: str) -> None:
    assert read_token(SecurityConfig(), {"PS_TOKEN": space + token + space}) == token


@given(tokens, tokens)
def test_only_the_same_token_is_right(token: str, other: str) -> None:
    [(_, value)] = Credentials(token=token).metadata
    assert shows_token(value, token)
    assert shows_token(value.encode(), token)
    assert shows_token(value, other) == (token == other)
    assert not shows_token(token, token)
    assert not shows_token(f"Basic {token}", token)
    assert not shows_token(value + " ", token)


@given(st.one_of(st.text(), st.binary()))
def test_any_header_is_compared_without_a_failure(value: str | bytes) -> None:
    assert not shows_token(value, "the-token-nobody-guesses-123456")


def test_token_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"\n  {SECRET}\n\n")
    config = SecurityConfig(token_file=str(tmp_path / "token"))
    assert read_token(config, {}) == SECRET
    assert read_token(config, {"PS_TOKEN": SECRET}) == SECRET
    assert read_token(SecurityConfig(), {}) is None and read_token(SecurityConfig(), {"PS_TOKEN": ""}) is None
    with pytest.raises(AuthError, match=f"security.token_file: cannot read {tmp_path}/none: No such file"):
        read_token(SecurityConfig(token_file=f"{tmp_path}/none"), {})


@pytest.mark.parametrize("text", ["", " \n", f"{SECRET} {SECRET}", f"{SECRET}\nx", f"{SECRET}ü", SECRET * 1000, "\0"])
def test_unusable_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(AuthError) as refused:
        read_token(SecurityConfig(token_file=str(tmp_path / "token")), {})
    assert refused.value.exit_code == 11
    assert str(tmp_path / "token") in refused.value.message
    assert SECRET not in refused.value.message + refused.value.fix


def test_two_different_tokens_are_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    with pytest.raises(AuthError, match="different tokens") as refused:
        read_token(SecurityConfig(token_file=str(tmp_path / "token")), {"PS_TOKEN": "other"})
    assert SECRET not in refused.value.message + refused.value.fix


def test_token_is_no_setting() -> None:
    for source in ({"sets": [f"security.token={SECRET}"]}, {"environ": {"PS_SECURITY__TOKEN": SECRET}}):
        with pytest.raises(UsageError, match=r"unknown key 'security.token'") as refused:
            load_config(None, {}, source.get("sets", []), source.get("environ", {}))
        assert refused.value.fix == "did you mean 'security.token_file'?"
        assert SECRET not in refused.value.message


def test_secrets_that_everyone_can_read_are_named_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "token").write_text(SECRET)
    config = SecurityConfig(token_file=str(tmp_path / "token"))
    (tmp_path / "token").chmod(0o600)
    warn_of_readable_secrets(config)
    assert "secret_readable" not in "".join(capsys.readouterr())
    (tmp_path / "token").chmod(0o644)
    warn_of_readable_secrets(config)
    output = "".join(capsys.readouterr())
    assert "secret_readable" in output
    assert SECRET not in output


# ---- certificates and keys ------------------------------------------------------------------------


def test_files_that_fit_are_read_and_shown_nowhere(folder: Path) -> None:
    pem = read_pem(of_files(folder, "rank-3"))
    assert pem.key == (folder / "rank-3.key").read_bytes()
    assert "KEY" not in repr(pem)
    assert facts_of(pem.cert or b"").name == "rank-3"
    assert facts_of((folder / "server.crt").read_bytes()).names == ("localhost", "127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("cert", "key", "ca", "words"),
    [
        ("missing", None, "ca.crt", "cannot read .*missing.crt: No such file"),
        ("rank-3", "missing", "ca.crt", "cannot read .*missing.key: No such file"),
        ("rank-3", "server", "ca.crt", "server.key does not belong to the certificate .*rank-3.crt"),
        ("rank-3", "swapped", "ca.crt", "swapped.key holds no private key"),
        ("swapped", "rank-3", "ca.crt", "swapped.crt holds no certificate"),
        ("rank-3", "broken", "ca.crt", "broken.key holds no private key"),
        ("rank-3", None, "broken.crt", "broken.crt holds no certificate"),
        ("expired", None, "ca.crt", r"expired.crt \('rank-3'\) expired on 20"),
        ("future", None, "ca.crt", r"future.crt \('rank-3'\) is valid only from 20"),
    ],
)
def test_file_that_cannot_be_used_is_named(folder: Path, cert: str, key: str | None, ca: str, words: str) -> None:
    shutil.copy(folder / "rank-3.crt", folder / "swapped.key")
    shutil.copy(folder / "rank-3.key", folder / "swapped.crt")
    for name in ("broken.key", "broken.crt"):
        (folder / name).write_bytes(b"-----BEGIN CERTIFICATE-----\nnot base64\n-----END CERTIFICATE-----\n")
    with pytest.raises(AuthError, match=words) as refused:
        read_pem(of_files(folder, cert, key, ca))
    assert refused.value.fix


def test_encrypted_key_is_refused_without_asking_for_its_password(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_pem_private_key((folder / "rank-3.key").read_bytes(), None)
    encryption = form.BestAvailableEncryption(b"x")
    (folder / "locked.key").write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption)  # type: ignore[attr-defined]
    )
    with pytest.raises(AuthError, match=r"locked\.key is encrypted"):
        read_pem(of_files(folder, "rank-3", "locked"))


@given(st.binary(max_size=300))
def test_certificate_of_any_bytes_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        facts_of(data)


# ---- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "host", "port", "is_here"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0, True), ("127.8.8.8:1", "127.8.8.8", 1, True), ("[::1]:5", "::1", 5, True),
        ("localhost:5", "localhost", 5, True), ("0.0.0.0:65535", "0.0.0.0", 65535, False), ("[::]:5", "::", 5, False),
        ("localhost.evil.org:5", "localhost.evil.org", 5, False),
    ],
)  # fmt: skip
def test_addresses(address: str, host: str, port: int, is_here: bool) -> None:
    assert split_address(address) == (host, port)
    assert is_loopback(host) is is_here
