"""`paceline inspect --live`: the table of a running server, and the errors where there is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.cli.conftest import Cli

TOLD: dict[str, Any] = {
    "model": "tiny",
    "running": 3,
    "waiting": 1,
    "speedup": {"ratio": 1.523, "low": 1.4, "high": 1.65},
    "speedup_note": None,
    "drawn_share": 0.0123,
    "speedups": [
        {
            "drafter": "eagle",
            "batch": "1",
            "kind": "greedy",
            "speedup": {"ratio": 1.523, "low": 1.4, "high": 1.65},
            "runs": 20,
            "tokens_per_step": 2.5,
            "acceptance": 0.61,
            "off": None,
        },
        {
            "drafter": "ngram\x1b[2J",
            "batch": "3-4",
            "kind": "sampled",
            "speedup": None,
            "runs": 3,
            "tokens_per_step": None,
            "acceptance": None,
            "off": None,
        },
        {
            "drafter": "ngram",
            "batch": "2",
            "kind": "greedy",
            "speedup": {"ratio": 0.9, "low": 0.85, "high": 0.95},
            "runs": 9,
            "tokens_per_step": 1.1,
            "acceptance": 0.05,
            "off": "paused: 0.90 ×",
        },
    ],
    "drafting_now": {"eagle": 2},
    "off_now": {"off by request": 1},
    "drafters": {"eagle": None, "ngram": "it hung"},
    "prices": {"eagle": {"entry": 0.31, "token": 0.12}, "ngram": {"entry": 0.0, "token": 0.0}},
}


class Server(HTTPServer):
    answer: tuple[int, Any] = (200, TOLD)
    seen: list[tuple[str, str | None]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.seen = []
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_table_once_without_a_terminal(cli: Cli, server: Server) -> None:
    status, out, err = cli("inspect", "--live", f"{server.url}/v1/", "--api-key", "secret")
    assert (status, err) == (0, "")
    assert server.seen == [("/v1/speculation", "Bearer secret")]
    lines = out.splitlines()
    assert lines[:2] == [
        "tiny  3 running, 1 waiting",
        "speed-up 1.52 × plain (1.40 to 1.65)  1.2% of steps drawn to run plain",
    ]
    assert lines[3].split() == [
        "drafter",
        "batch",
        "kind",
        "speed-up",
        "95",
        "%",
        "interval",
        "tokens/step",
        "accepted",
        "state",
    ]
    assert lines[4].split() == ["eagle", "1", "greedy", "1.52", "×", "1.40", "to", "1.65", "2.50", "61%", "on"]
    assert lines[5].endswith("measuring, 3 runs so far")
    assert lines[6].endswith("paused: 0.90 ×")
    assert "  2 with eagle" in lines
    assert "  1: off by request" in lines
    assert "  ngram: it hung" in lines
    assert lines[-1].split() == ["eagle", "31%", "to", "draft", "at", "all,", "12%", "for", "one", "more", "token"]


def test_a_server_that_measures_still(cli: Cli, server: Server) -> None:
    server.answer = 200, TOLD | {"speedup": None, "speedup_note": "measuring: 3 of 8 runs", "speedups": []}
    out = cli("inspect", "--live", server.url, "--once")[1]
    assert "speed-up measuring: 3 of 8 runs" in out
    assert "no step with a drafter yet" in out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, {}), "wants another API key"),
        ((404, {}), "no Paceline server"),
        ((503, {}), "status 503"),
        ((200, {"speedup": None}), "update the server"),
        ((200, []), "update the server"),
    ],
)
def test_servers_that_cannot_tell(cli: Cli, server: Server, answer: tuple[int, Any], said: str) -> None:
    server.answer = answer
    status, out, err = cli("inspect", "--live", server.url)
    assert (status, out) == (2, "")
    assert said in err


def test_no_server_and_no_model(cli: Cli, server: Server) -> None:
    assert "is it running there?" in cli("inspect", "--live", "127.0.0.1:1")[2]
    assert "--live takes the address" in cli("inspect", "--live", "ftp://x")[2]
    assert "name a MODEL" in cli("inspect")[2]
    assert "name a MODEL" in cli("inspect", "smollm2", "--live", server.url)[2]
