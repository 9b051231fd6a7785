"""`ps-certs`: what it makes is good for real TLS, kept private, and never lost by mistake."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.errors import AuthError, UsageError
from paramserver.common.security import facts_of
from paramserver.launch.certs.kit import host_name, issue, make_ca
from paramserver.tests.certificates import certs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that only read."""
    folder = tmp_path_factory.mktemp("made") / "lab"
    certs("init", folder, "--host", "10.0.0.5", "--host", "gpu-box.lab", "--workers", "2")
    return folder


def shake_hands(server_files: tuple[Path, str], client_files: tuple[Path, str], host: str) -> str:
    """A TLS handshake in memory between two sets of files, both sides checking. The client's common name."""
    sides = []
    for (folder, name), purpose in ((server_files, ssl.PROTOCOL_TLS_SERVER), (client_files, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(purpose)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(folder / "ca.crt")
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
        sides.append(context)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = sides[0].wrap_bio(there, back, server_side=True)
    client = sides[1].wrap_bio(back, there, server_hostname=host)
    waiting = [client, server]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    subject = dict(entry[0] for entry in server.getpeercert()["subject"])
    return subject["commonName"]


# ---- what is made -----------------------------------------------------------------------------------


def test_files_and_their_modes(made: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    private = {"ca.key", "server.key", "serve.key", "rank-0.key", "rank-1.key", "token"}
    public = {"ca.crt", "server.crt", "serve.crt", "rank-0.crt", "rank-1.crt"}
    assert modes == dict.fromkeys(private, 0o600) | dict.fromkeys(public, 0o644)
    assert made.stat().st_mode & 0o777 == 0o700
    assert len((made / "token").read_text().strip()) >= 40


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "10.0.0.5", "gpu-box.lab"])
def test_certificates_are_good_for_mutual_tls_by_every_name(made: Path, host: str) -> None:
    assert shake_hands((made, "server"), (made, "rank-1"), host) == "rank-1"


def test_certificates_are_good_for_nothing_else(made: Path, tmp_path: Path) -> None:
    certs("init", tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        shake_hands((made, "server"), (made, "rank-0"), "10.0.0.6")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):  # a worker is no server
        shake_hands((made, "rank-0"), (made, "rank-1"), "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):  # and a server is no worker
        shake_hands((made, "server"), (made, "server"), "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):  # another CA
        shake_hands((tmp_path / "other", "server"), (made, "rank-0"), "127.0.0.1")
    assert shake_hands((tmp_path / "other", "server"), (tmp_path / "other", "worker"), "127.0.0.1") == "worker"


def test_a_shard_is_a_server_to_workers_and_a_client_to_shards(tmp_path: Path) -> None:
    certs("init", tmp_path, "--host", "10.0.0.5", "--workers", "1", "--shards", "2")
    assert shake_hands((tmp_path, "shard-0"), (tmp_path, "rank-0"), "10.0.0.5") == "rank-0"
    assert shake_hands((tmp_path, "shard-0"), (tmp_path, "shard-1"), "10.0.0.5") == "shard-1"
    before = contents(tmp_path)
    certs("init", tmp_path, "--renew")
    assert contents(tmp_path).keys() == before.keys()
    assert all(contents(tmp_path)[f"shard-1.{kind}"] != before[f"shard-1.{kind}"] for kind in ("crt", "key"))
    certs("init", tmp_path, "--force")
    assert not list(tmp_path.glob("shard-*"))


def test_ps_serve_is_a_server_to_browsers_and_a_client_to_the_run(made: Path) -> None:
    assert shake_hands((made, "server"), (made, "serve"), "127.0.0.1") == "ps-serve"
    assert shake_hands((made, "serve"), (made, "rank-0"), "127.0.0.1") == "rank-0"


# ---- again: renewed, refused, replaced ----------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_renewal_keeps_ca_token_hosts_and_ranks(tmp_path: Path) -> None:
    certs("init", tmp_path, "--host", "a.lab", "--workers", "2", "--days", "1")
    before, facts = contents(tmp_path), facts_of((tmp_path / "server.crt").read_bytes())
    certs("init", tmp_path, "--renew", "--host", "10.9.9.9")
    after, renewed = contents(tmp_path), facts_of((tmp_path / "server.crt").read_bytes())
    changed = {name for name in before if before[name] != after[name]}
    assert after.keys() == before.keys()
    assert changed == {f"{name}.{kind}" for name in ("server", "serve", "rank-0", "rank-1") for kind in ("crt", "key")}
    assert set(renewed.names) == {*facts.names, "10.9.9.9"}
    assert (renewed.not_after - facts.not_after).days == 364
    assert shake_hands((tmp_path, "server"), (tmp_path, "rank-0"), "a.lab") == "rank-0"
    certs("init", tmp_path, "--renew", "--workers", "3")
    assert (tmp_path / "rank-2.crt").exists()


def test_nothing_is_overwritten_unless_told_to(tmp_path: Path) -> None:
    certs("init", tmp_path, "--workers", "2")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"holds ca.crt already") as refused:
        certs("init", tmp_path)
    assert "--renew" in refused.value.fix and "--force" in refused.value.fix
    assert contents(tmp_path) == before
    certs("init", tmp_path, "--force")
    after = contents(tmp_path)
    pairs = {f"{name}.{kind}" for name in ("ca", "server", "serve", "worker") for kind in ("crt", "key")}
    assert after.keys() == {*pairs, "token"}
    assert all(after[name] != before[name] for name in after.keys() & before.keys())


def test_one_file_of_ours_is_enough_to_stop(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("mine")
    with pytest.raises(UsageError, match="holds token already"):
        certs("init", tmp_path)
    assert contents(tmp_path) == {"token": b"mine"}


@pytest.mark.parametrize(
    ("argv", "error", "words"),
    [
        (("--host", "10.0.0.5:50051"), UsageError, "neither a host name nor an address"),
        (("--host", "https://x"), UsageError, "neither a host name nor an address"),
        (("--host", "300.1.1.1"), UsageError, "neither a host name nor an address"),
        (("--renew", "--force"), UsageError, "--renew keeps the CA"),
        (("--renew",), None, "cannot read .*ca.crt"),
    ],
)
def test_mistakes_leave_nothing_behind(tmp_path: Path, argv: tuple[str, ...], error: type | None, words: str) -> None:
    with pytest.raises(error or Exception, match=words):
        certs("init", tmp_path / "new", *argv)
    assert not (tmp_path / "new").exists()


def test_renewal_needs_the_right_key_of_the_ca(tmp_path: Path) -> None:
    certs("init", tmp_path)
    (tmp_path / "ca.key").write_bytes((tmp_path / "server.key").read_bytes())
    before = contents(tmp_path)
    with pytest.raises(AuthError, match=r"ca\.key is not the key of ca\.crt"):
        certs("init", tmp_path, "--renew")
    assert contents(tmp_path) == before


HOST_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z0-9](\.[a-z]{1,8}){0,3}", fullmatch=True)


@settings(max_examples=30)
@given(st.one_of(st.ip_addresses().map(str), HOST_NAMES))
def test_every_host_name_and_address_is_in_the_certificate(host: str) -> None:
    server = issue(make_ca("x", 1), "server", 1, [host])
    assert facts_of(server.certificate_pem).names == (host,)


@given(st.text(max_size=40))
def test_any_other_text_is_the_users_mistake(text: str) -> None:
    try:
        named = host_name(text)
    except UsageError:
        return
    assert str(named.value) == text.strip("[]")


def test_validity_ends_with_the_ca() -> None:
    ca = make_ca("x", 2)
    server = issue(ca, "server", 300, ["a"])
    assert server.certificate.not_valid_after_utc == ca.certificate.not_valid_after_utc


# ---- what it says -------------------------------------------------------------------------------------


def test_init_says_what_to_type_and_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    certs("init", tmp_path / "lab", "--host", "10.0.0.5", "--workers", "4")
    output = capsys.readouterr().out
    lab = tmp_path / "lab"
    assert (
        f"ps-server --listen 0.0.0.0:50051 --ca {lab}/ca.crt --cert {lab}/server.crt --key {lab}/server.key" in output
    )
    assert f"ps-worker --server 10.0.0.5:50051 --rank 0 --ca {lab}/ca.crt --cert {lab}/rank-0.crt" in output
    assert output.count(f"--token-file {lab}/token") == 2
    assert (lab / "token").read_text().strip() not in output
    assert "PRIVATE" not in output


def test_show_lists_every_certificate_and_what_is_wrong_with_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    certs("init", tmp_path, "--workers", "11", "--days", "30")
    other = make_ca("other", 3)
    (tmp_path / "server.crt").write_bytes(issue(other, "server", 3, ["far.lab"]).certificate_pem)
    (tmp_path / "rank-4.crt").write_bytes(b"nothing")
    capsys.readouterr()
    certs("show", tmp_path)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(rows) == ["file", "ca.crt", *(f"rank-{rank}.crt" for rank in range(11)), "serve.crt", "server.crt"]
    assert "29 days" in rows["rank-10.crt"] and "signed" not in rows["rank-10.crt"]
    assert "far.lab" in rows["server.crt"] and "not signed by ca.crt" in rows["server.crt"]
    assert "no certificate" in rows["rank-4.crt"]


def test_show_of_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no certificates in"):
        certs("show", tmp_path)
