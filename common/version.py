"""Versions of this package and of what outlives a process. An older protocol, snapshot or run store is refused."""

from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 5  # of proto/parameter_server.proto, in its package's name
SNAPSHOT_VERSION = 3  # `format` of a manifest
STORE_VERSION = 4  # of the tables of the run store


def installed(package: str) -> str:
    """Returns the version of an installed package, or `unknown`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


PROGRAM_VERSION = installed("paramserver")  # pyproject.toml has it; unknown: run from a checkout that was not installed


def versions_text() -> str:
    """Returns all versions in one line, as `--version` prints them."""
    return f"{PROGRAM_VERSION} (protocol {PROTOCOL_VERSION}, snapshots {SNAPSHOT_VERSION}, run store {STORE_VERSION})"
