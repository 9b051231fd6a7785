"""Certificates and tokens for tests, and the flags and settings that name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paramserver.common.config.schema import SecurityConfig
from paramserver.common.security import Credentials, read_pem
from paramserver.launch.certs.kit import Identity, load_ca
from paramserver.launch.certs.main import app


def certs(*argv: str | Path) -> None:
    app([str(word) for word in argv], standalone_mode=False)


def flags(folder: Path, name: str) -> tuple[str, ...]:
    return (
        "--ca", f"{folder}/ca.crt", "--cert", f"{folder}/{name}.crt", "--key", f"{folder}/{name}.key",
        "--token-file", f"{folder}/token",
    )  # fmt: skip


def secured(folder: Path, name: str, token: str | None, ca: str = "ca.crt") -> Credentials:
    config = SecurityConfig(ca=f"{folder}/{ca}", cert=f"{folder}/{name}.crt", key=f"{folder}/{name}.key")
    return replace(read_pem(config), token=token)


def write(folder: Path, name: str, identity: Identity) -> None:
    (folder / f"{name}.crt").write_bytes(identity.certificate_pem)
    (folder / f"{name}.key").write_bytes(identity.key_pem)


def load(folder: Path) -> Identity:
    return load_ca((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes())
