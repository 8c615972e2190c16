"""OpenAI's SDK for browsers, and fetch with the headers of Anthropic's, in a Chromium on a page of another origin.

python clients/openai_browser.py --url http://127.0.0.1:8000/v1 --page-port 8001

The server needs `--cors-origins http://127.0.0.1:8001`; a page of any other origin must get nothing. The SDK is that of
clients/openai_node (`npm install`). The page is served from here, and sends its outcome back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from checks import Tally, get

SDK = Path(__file__).parent / "openai_node" / "node_modules" / "openai"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
SECONDS = 120  # for the browser to end
PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><script type="module">
import OpenAI from "/sdk/index.mjs";
const root = ROOT, model = MODEL, outcome = {};
const client = new OpenAI({ baseURL: `${root}/v1`, apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "Hello" }], max_tokens: 8, temperature: 0 };
const post = (headers) => fetch(`${root}/v1/chat/completions`, {
  method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(asked) });
const checks = {
  "openai: models": async () => (await client.models.list()).data[0].id === model,
  "openai: chat": async () => {
    const { data, response } = await client.chat.completions.create(asked).withResponse();
    return data.usage.completion_tokens > 0 && response.headers.get("x-request-id") !== null;
  },
  "openai: chat, streamed": async () => {
    let chunks = 0;
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) chunks += 1;
    return chunks > 1;
  },
  "openai: error": async () =>
    client.chat.completions.create({ ...asked, model: "gpt-4" }).then(() => false, (error) => error.status === 404),
  "fetch: headers of anthropic": async () => (await post({ "x-api-key": "none", "anthropic-version": "2023-06-01",
    "anthropic-dangerous-direct-browser-access": "true", "x-stainless-lang": "js" })).ok,
};
for (const [name, check] of Object.entries(checks)) {
  try { outcome[name] = await check() ? "" : "false"; } catch (error) { outcome[name] = String(error); }
}
await fetch("/outcome", { method: "POST", body: JSON.stringify(outcome) });
</script>"""


class Page(SimpleHTTPRequestHandler):
    """Serves one page at / and the SDK's files below /sdk/, and takes the outcome."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

    def __init__(self, *args: Any, page: bytes, outcomes: Queue[dict[str, str]], **options: Any) -> None:
        self._page, self._outcomes = page, outcomes
        super().__init__(*args, directory=str(SDK), **options)

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(self._page)
        else:
            self.path = self.path.removeprefix("/sdk")
            super().do_GET()

    def do_POST(self) -> None:
        self._outcomes.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(b"")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def outcome_of(page: str, port: int) -> dict[str, str]:
    """Open the page in a browser. It tells an empty text for each check that passed, else a problem."""
    outcomes: Queue[dict[str, str]] = Queue()
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Page, page=page.encode(), outcomes=outcomes))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command = [next(filter(None, map(shutil.which, BROWSERS))), *options, f"http://127.0.0.1:{server.server_port}/"]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return outcomes.get(timeout=SECONDS)
        except Empty:
            return {"the page": f"it did not end within {SECONDS} s"}
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the base URL (default: %(default)s)")
    parser.add_argument("--page-port", type=int, required=True, help="of the page whose origin is allowed")
    args = parser.parse_args()
    root = args.url.removesuffix("/v1")
    model = get(f"{args.url}/models")["data"][0]["id"]
    checks = Tally("openai (browser)", json.loads((SDK / "package.json").read_text())["version"])
    page = PAGE.replace("ROOT", json.dumps(root)).replace("MODEL", json.dumps(model))
    for port, allowed in ((args.page_port, True), (0, False)):
        for name, problem in outcome_of(page, port).items():
            with checks(name if allowed else f"another origin gets nothing: {name}"):
                if bool(problem) == allowed:
                    raise AssertionError(problem or "it got an answer")
    checks.end()


if __name__ == "__main__":
    main()
