"""A certificate for a server on loopback, and the authority's, for as long as a measurement takes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DAYS = 1


@contextmanager
def server_certificate(is_wanted: bool = True) -> Iterator[tuple[list[str], str | None]]:
    """Flags of a server that has it, and the file of the authority's for its workers; nothing unless `is_wanted`."""
    if not is_wanted:
        yield [], None
        return
    from ...launch.certs.kit import issue, make_ca

    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        ca = make_ca("ps-bench")
        server = issue(ca, "server", _DAYS, ["127.0.0.1"])
        files = {"ca.crt": ca.certificate_pem, "server.crt": server.certificate_pem, "server.key": server.key_pem}
        for name, pem in files.items():
            path = Path(folder, name)
            path.touch(mode=0o600)
            path.write_bytes(pem)
        yield ["--cert", f"{folder}/server.crt", "--key", f"{folder}/server.key"], f"{folder}/ca.crt"
