"""The playground: one page at `/`, with its modules, its style and its icon.

Clients of Ollama's API look at `/`, too, to see whether a server runs. A request that does not ask for HTML gets the
sentence that they expect.

The files are served as they are, without a build step. The page's content security policy forbids to load anything from
elsewhere.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request, Response

TYPES = {  # ending of a file that the page loads → content type
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
RUNNING = "Ollama is running"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "Accept",
}


def _loaded() -> dict[str, tuple[str, str]]:
    """Find the files that the page loads: path → file, content type."""
    endings = ((file.name, file.name[file.name.rfind(".") :]) for file in files(__package__).iterdir())
    return {f"/playground/{name}": (name, TYPES[ending]) for name, ending in sorted(endings) if ending in TYPES}


PAGES = {"/": ("index.html", "text/html; charset=utf-8"), **_loaded()}  # path → file, content type


def install_playground(app: FastAPI) -> None:
    for path, (name, content_type) in PAGES.items():
        _serve(app, path, files(__package__).joinpath(name).read_bytes(), content_type)


def _serve(app: FastAPI, path: str, content: bytes, content_type: str) -> None:
    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def page(http: Request) -> Response:
        if path == "/" and "text/html" not in http.headers.get("accept", ""):
            return Response(RUNNING, media_type="text/plain", headers={"vary": "Accept"})
        return Response(content, headers={**HEADERS, "content-type": content_type})
