"""The playground: one page at `/`, with its script and its style.

Clients of Ollama's API look at `/`, too, to see whether a server runs. A request that does not ask for HTML gets the
sentence that they expect.

The files are served as they are, without a build step. The page's content security policy forbids to load anything from
elsewhere.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request, Response

PAGES = {  # path → file, content type
    "/": ("index.html", "text/html; charset=utf-8"),
    "/playground/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/playground/style.css": ("style.css", "text/css; charset=utf-8"),
}
RUNNING = "Ollama is running"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "Accept",
}


def install_playground(app: FastAPI) -> None:
    for path, (name, content_type) in PAGES.items():
        _serve(app, path, files(__package__).joinpath(name).read_bytes(), content_type)


def _serve(app: FastAPI, path: str, content: bytes, content_type: str) -> None:
    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def page(http: Request) -> Response:
        if path == "/" and "text/html" not in http.headers.get("accept", ""):
            return Response(RUNNING, media_type="text/plain", headers={"vary": "Accept"})
        return Response(content, headers={**HEADERS, "content-type": content_type})
