"""A server's life on real sockets: what the wire refuses, signals, drains, and what a client leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.responses import StreamingResponse

from paceline.cli.main import main
from paceline.errors import InvalidRequest
from paceline.llm import LLM
from paceline.server import http1
from paceline.server.banner import announce, chosen
from paceline.server.guards import check
from paceline.server.process import bind, with_descriptors
from paceline.server.settings import Settings
from tests.cli.tiny_model import write_model
from tests.server.alive import Alive, scenario, until
from tests.server.api import tiny_llm

LONG = {"prompt": "abcabc", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


pytestmark = pytest.mark.usefixtures("log")


def test_it_answers(llm: LLM, log: io.StringIO) -> None:
    async def play(server: Alive) -> None:
        assert (await server.http.get("/health")).json() == {"status": "ready"}
        response = await server.http.post("/v1/completions", json=LONG, headers={"x-request-id": "mine"})
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine"
        assert "server" not in response.headers
        line = next(json.loads(line) for line in log.getvalue().splitlines() if "mine" in line)
        assert (line["output_tokens"], line["finish"], line["status"]) == (200, "length", 200)
        assert 0 < line["time_to_first"] <= line["seconds"]

    scenario(llm, play)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"x" * 65536 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"x: y\r\n" * 10_000 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 17_000, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400),
        (b"GET /v1/../health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"GET //v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", 400),
        (HEAD + b"Content-Length: 999999999\r\n\r\n{", 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
        (b"GET /health HTTP/1.1\r\nHost: localhost", 408),
    ],
)
def test_bad_requests_below_the_routes(llm: LLM, data: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LINGER_SECONDS", 0.05)

    async def play(server: Alive) -> None:
        head, _, body = (await server.raw(data)).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status, head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        await until(lambda: server.connections == 0)
        while (health := await server.http.get("/health")).status_code == 408:  # this process slept while it asked
            assert status == 408
        assert health.status_code == 200

    patience = 0.1 if status == 408 else 60.0
    scenario(llm, play, header_timeout=patience, read_timeout=patience)


def test_nothing_hides_behind_a_body_with_two_lengths(llm: LLM) -> None:
    """A proxy that believes Content-Length would read the second request as part of the first one's body."""
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    both = f"Content-Length: {5 + len(hidden)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()

    async def play(server: Alive) -> None:
        answer = await server.raw(HEAD + both + hidden)  # returns when the server has closed the connection
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
        assert b"ambiguous_length" in answer

    scenario(llm, play)


def test_whoever_connects_and_says_nothing_is_cut_off(llm: LLM) -> None:
    async def play(server: Alive) -> None:
        assert await server.raw(b"") == b""
        answer = await server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health")  # and half a head
        assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 408") == 1
        await until(lambda: server.connections == 0)

    scenario(llm, play, header_timeout=0.3)


def test_a_large_body_finds_its_answer(llm: LLM) -> None:
    """Also where the client sends all of it before it reads."""

    async def play(server: Alive) -> None:
        response = await server.http.post(
            "/v1/completions", content=b" " * (20 << 20), headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"

    scenario(llm, play)


def test_a_reader_that_never_reads_is_cut_off(llm: LLM) -> None:
    closed = []

    async def play(server: Alive) -> None:
        @server.process.app.get("/v1/flood")
        async def flood() -> StreamingResponse:
            async def parts() -> AsyncIterator[bytes]:
                try:
                    while True:
                        yield b"x" * 65536
                        await asyncio.sleep(0)
                finally:
                    closed.append(True)

            return StreamingResponse(parts())

        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        writer.write(b"GET /v1/flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: server.connections == 1)
        assert (await server.http.get("/health", headers={"connection": "close"})).status_code == 200
        await until(lambda: server.connections == 0 and bool(closed))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    scenario(llm, play, write_timeout=0.1)


def test_connections_have_a_limit(llm: LLM) -> None:
    """Beyond it probes are answered, and other requests are told to come again: one on each connection."""

    async def play(server: Alive) -> None:
        _, first = await asyncio.open_connection("127.0.0.1", server.port)
        await until(lambda: server.connections == 1)
        for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/models", 503)):
            response = await server.http.get(path)
            assert (response.status_code, response.headers["connection"]) == (status, "close")
        assert (response.json()["error"]["code"], response.headers["retry-after"]) == ("too_many_connections", "1")
        assert (await server.http.post("/v1/completions", json=LONG)).status_code == 503
        first.close()
        await first.wait_closed()
        await until(lambda: server.connections == 0)
        assert (await server.http.get("/v1/models")).status_code == 200

    scenario(llm, play, max_connections=1)


def test_probes_are_answered_whoever_holds_sockets(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held sockets take all places, and all of the lobby: whoever comes last is still answered."""
    monkeypatch.setattr(http1, "LOBBY_CONNECTIONS", 3)

    async def play(server: Alive) -> None:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        held += await asyncio.gather(*(asyncio.open_connection("127.0.0.1", server.port) for _ in range(45)))
        await until(lambda: server.connections == 5 + 3)
        for path in ("/health", "/ready") * 5:
            assert (await server.http.get(path)).status_code == 200
        assert server.connections <= 5 + 3
        for _, writer in held:
            writer.close()
        await until(lambda: server.connections == 0)
        assert (await server.http.get("/v1/models")).status_code == 200

    scenario(llm, play, max_connections=5)


@pytest.mark.parametrize(
    ("limits", "raised", "connections"),
    [
        ((100_000, 100_000), None, 1000),
        ((1024, 100_000), 1000 + 64 + 256 + 2048, 1000),
        ((1024, 2000), 2000, 1000),
        ((1024, 1024), 1024, 1024 - 64 - 256),
        ((256, 256), 256, 1),
    ],
)
def test_connections_never_take_the_last_descriptor(
    limits: tuple[int, int], raised: int | None, connections: int, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, wanted: given.append(wanted))
    assert with_descriptors(Settings()).max_connections == connections
    assert given == ([] if raised is None else [(raised, limits[1])])
    assert ("fewer connections" in log.getvalue()) == (connections < 1000)


def test_clients_that_leave_leave_nothing_behind(llm: LLM) -> None:
    body = json.dumps(LONG | {"stream": True}).encode()
    request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def leave(server: Alive, *, read: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        await writer.drain()
        if read:
            await reader.readexactly(read)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def play(server: Alive) -> None:
        await leave(server, read=1)  # what is made once is made
        await until(lambda: server.connections == server.process.bridge.open_requests == 0)
        files, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        for _ in range(10):
            await asyncio.gather(*(leave(server, read=size) for size in (0, 1, 300) for _ in range(4)))
        await until(lambda: server.connections == server.process.bridge.open_requests == 0)
        await until(lambda: len(asyncio.all_tasks()) == tasks)
        assert len(os.listdir("/proc/self/fd")) == files

    scenario(llm, play)


def test_many_streams_at_once(llm: LLM) -> None:
    body = json.dumps(
        {"prompt": "abcabc", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    request = HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def text(answer: bytes) -> str:
        lines = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])

    async def play(server: Alive) -> None:
        alone = text(await server.raw(request))
        assert alone
        answers = await asyncio.gather(*(server.raw(request) for _ in range(80)))
        assert {text(answer) for answer in answers} == {alone}
        await until(lambda: server.connections == 0)

    scenario(llm, play)


def stream(server: Alive) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(server.http.post("/v1/completions", json=LONG))


def test_a_signal_drains(llm: LLM) -> None:
    async def play(server: Alive) -> None:
        running = [stream(server) for _ in range(4)]
        await until(lambda: server.process.bridge.open_requests == 4)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: server.process.bridge.state == "draining")
        if server.process.bridge.open_requests:  # they may have been quick
            with contextlib.suppress(httpx.HTTPError):
                assert (await server.http.get("/health")).status_code == 503
        answers = await asyncio.gather(*running)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {200}
        await until(lambda: server.process.server.should_exit)

    scenario(llm, play)


def test_a_dead_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> None:
    llm = tiny_llm(tmp_path)

    def fail() -> None:
        raise RuntimeError("a bolt is loose in /secret")

    async def play(server: Alive) -> None:
        monkeypatch.setattr(llm.engine, "_step", fail)
        answers = await asyncio.gather(*(stream(server) for _ in range(5)))
        assert {answer.status_code for answer in answers} <= {500, 503}  # 503: it came after the others
        assert "secret" not in "".join(answer.text for answer in answers)
        assert "a bolt is loose" in log.getvalue()
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/v1/models")).status_code == 200
        assert (await server.http.post("/v1/completions", json=LONG)).status_code == 503

    scenario(llm, play)


def test_two_signals_abort(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(server: Alive) -> None:
        step = llm.engine.step
        many = [replace(LONG_REQUEST, id=str(i)) for i in range(3)]
        monkeypatch.setattr(llm.engine, "step", lambda: [] if not ended else step())  # as slow as can be
        ended: list[bool] = []
        streams = [server.process.bridge.submit(request) for request in many]
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: server.process.bridge.state == "draining")
        assert not server.process.server.should_exit
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(True)
        await until(lambda: server.process.server.should_exit)
        for each in streams:
            assert [event.finish async for event in each][-1] == "abort"

    from paceline.types import Request, SamplingParams

    LONG_REQUEST = Request(id="", prompt=(5, 6, 7), sampling=SamplingParams(temperature=0, max_tokens=200))  # noqa: N806 - a constant of the test class
    scenario(llm, play, drain_timeout=1000.0)


def test_a_hang_up_reloads(llm: LLM, log: io.StringIO) -> None:
    async def play(server: Alive) -> None:
        process = server.process
        process.live.source = lambda: replace(process.settings, max_waiting=7, api_keys=("sk-new",), host="::1")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: process.bridge.max_waiting == 7)
        assert (await server.http.get("/v1/models")).status_code == 401
        assert (await server.http.get("/v1/models", headers={"authorization": "Bearer sk-new"})).status_code == 200

        def fail() -> Settings:
            raise InvalidRequest("port must be a whole number")

        process.live.source = fail
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "settings not reloaded" in log.getvalue())
        assert process.bridge.max_waiting == 7

    scenario(llm, play)


def test_an_address_that_is_taken() -> None:
    with bind(Settings(port=0)) as taken:
        taken.listen()
        with pytest.raises(InvalidRequest, match="choose another with --port"):
            bind(Settings(port=taken.getsockname()[1]))
    with pytest.raises(InvalidRequest, match="cannot listen on host"):
        bind(Settings(host="no.such.host.invalid", port=0))


def test_tls_files_are_checked_first(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("nonsense")
    for name in ("cert", "missing"):
        with pytest.raises(InvalidRequest, match="for TLS"):
            bind(Settings(port=0, tls_cert=str(tmp_path / name), tls_key=str(tmp_path / "cert")))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_https(llm: LLM, tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key"), str(tmp_path / "cert")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)

    async def play(server: Alive) -> None:
        trust = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(base_url=f"https://localhost:{server.port}", verify=trust) as client:
            assert (await client.get("/health")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await server.http.get("/health")

    scenario(llm, play, tls_cert=cert, tls_key=key)


def test_what_was_chosen_is_said(llm: LLM, capsys: pytest.CaptureFixture[str], log: io.StringIO) -> None:
    facts = chosen(llm, "tiny", Settings())
    assert set(facts) == {"model", "device", "weights", "drafters", "bitwise", "kv", "sampling", "limits", "access"}
    assert "ngram: looks up tokens" in facts["drafters"]
    assert "256 a sequence" in facts["kv"]
    assert facts["sampling"].startswith("temperature 0.5, top_k 40 unless a request says otherwise; source: generation")
    assert "on this machine" in facts["access"]
    assert "THE NETWORK" in chosen(llm, "tiny", Settings(host="0.0.0.0"))["access"]
    assert "1 API keys, no admin key" in chosen(llm, "tiny", Settings(api_keys=("a",)))["access"]
    announce(facts, Settings())
    out = capsys.readouterr().out
    assert "http://127.0.0.1:8000/v1" in out
    assert facts["model"] in out
    announce(facts, Settings(log_json=True))
    assert json.loads(log.getvalue().splitlines()[-1])["url"] == "http://127.0.0.1:8000"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("paceline.cli.serve.find_spec", lambda name: None)
    assert main(["serve", "none"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err


def test_the_command(tmp_path: Path) -> None:
    """From the command line to a clean exit."""
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model")
    config = tmp_path / "settings.yaml"
    config.write_text(f"model: {model}\nport: 0\nserved_name: tiny\n")
    command = [sys.executable, "-m", "paceline.cli.main", "serve", "--config", str(config), "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ctrl-C"):
                break
        url = next(line.split()[0] for line in said if "/v1 " in line)
        [served] = httpx.get(f"{url}/models").json()["data"]
        assert served["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 0, process.stderr.read()
