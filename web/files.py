"""The static files of the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from gzip import compress
from hashlib import sha256
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_STATIC = Path(__file__).parent / "static"
_STYLE = "style.css"


def static_routes(pages: Mapping[str, str]) -> list[Route]:
    """Returns the routes of all static files and of the pages."""
    files = read_files()

    def file(page: str) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            name = page or request.path_params["name"]
            if name not in files:
                raise HTTPException(404, f"no file {name[:80]}")
            (body, compressed, tag), kind = files[name], guess_type(name)[0]
            headers = {"Cache-Control": "no-cache", "ETag": tag, "Vary": "Accept-Encoding"}
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            accepted = request.headers.get("accept-encoding", "").split(",")
            if "gzip" in [text.partition(";")[0].strip() for text in accepted]:
                body, headers = compressed, {**headers, "Content-Encoding": "gzip"}
            return Response(body, media_type=kind, headers=headers)

        return handle

    found = {**pages, "/favicon.ico": "icon.svg", "/static/{name:path}": ""}
    return [Route(path, file(name)) for path, name in found.items()]


def read_files() -> dict[str, tuple[bytes, bytes, str]]:
    """Returns the static files by name: the bytes, the compressed bytes, and the ETag.

    Each page has the style inline, so it renders at once.
    """
    found = {path.relative_to(_STATIC).as_posix(): path.read_bytes() for path in _STATIC.rglob("*") if path.is_file()}
    link = f'<link rel="stylesheet" href="/static/{_STYLE}">'.encode()
    style = b"<style>\n" + found[_STYLE] + b"</style>"
    whole = {name: body.replace(link, style) if name.endswith(".html") else body for name, body in found.items()}
    return {name: (body, compress(body, mtime=0), f'"{sha256(body).hexdigest()[:16]}"') for name, body in whole.items()}
