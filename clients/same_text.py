"""The same text over HTTP: with speculation and without, streamed and whole, alone, 32 and 256 at once.

python clients/same_text.py                 with Paceline's own environment

What is compared with is each request alone, whole, from a server that was started with --drafter none. The other server
drafts whatever it costs, so that there is something to go wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from typing import Any

from checks import Tally, expect
from prompts import request, said
from served import Served, served
from wire import post, send

Said = tuple[str, str]
PLAIN = {"speculation": {"enabled": False}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve-python", default=sys.executable, help="of Paceline's environment (default: this one)")
    parser.add_argument("--requests", type=int, default=32, help="for every way of asking (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=256, help="at once, at the end (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer at most (default: %(default)s)")
    args = parser.parse_args()
    tally = Tally("same_text")
    with served(args.serve_python, "--drafter", "none", "--kv-memory", "256M") as plain:
        alone = asyncio.run(texts(plain, args.streams, at_once=1, tokens=args.tokens, fields={}))
    print(f"{len(alone)} answers alone and plain, {len({text for text, _ in alone})} of them different", flush=True)
    most = str(args.streams)
    options = ("--max-sequences", most, "--max-draft-batch", most, "--no-measure-cost", "--kv-memory", "1G")
    with served(args.serve_python, *options) as server:
        compare(server, alone[: args.requests], args.tokens, tally)
        with tally(f"{args.streams} streams at once"):
            running = asyncio.run(crowd(server, alone, args.tokens))
            expect(running >= args.streams * 3 // 4, f"only {running} of them ran at the same time")
        with tally("nothing is left"):
            state = server.speculation()
            expect(not state["running"] and not state["waiting"] and not state["pages_held"], state)
    tally.end()


def compare(server: Served, alone: list[Said], tokens: int, tally: Tally) -> None:
    ways = itertools.product((1, len(alone)), (False, True), (True, False))
    for at_once, stream, speculative in ways:
        kind = f"{'speculative' if speculative else 'plain'}, {'streamed' if stream else 'whole'}, {at_once} at once"
        before = accepted(server)
        with tally(kind):
            fields = {"stream": stream} | ({} if speculative else PLAIN)
            found = asyncio.run(texts(server, len(alone), at_once=at_once, tokens=tokens, fields=fields))
            expect_same(alone, found)
            gained = accepted(server) - before
            expect((gained > 0) == speculative, f"{gained:g} drafted tokens were accepted")


def accepted(server: Served) -> float:
    return server.metric("vllm:spec_decode_num_accepted_tokens_total")


async def texts(server: Served, count: int, *, at_once: int, tokens: int, fields: dict[str, Any]) -> list[Said]:
    places = asyncio.Semaphore(at_once)

    async def one(index: int) -> Said:
        path, body = request(index, tokens=tokens)
        async with places:
            return said(await send(server.port, post(path, body | fields)))

    return await asyncio.gather(*(one(index) for index in range(count)))


async def crowd(server: Served, alone: list[Said], tokens: int) -> int:
    """All at once as streams; the most that ran at the same time."""
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, (await asyncio.to_thread(server.speculation))["running"])
            await asyncio.sleep(0.05)

    looking = asyncio.create_task(look())
    try:
        found = await texts(server, len(alone), at_once=len(alone), tokens=tokens, fields={"stream": True})
    finally:
        looking.cancel()
    expect_same(alone, found)
    return most


def expect_same(alone: list[Said], found: list[Said]) -> None:
    differ = [i for i, (one, other) in enumerate(zip(alone, found, strict=True)) if one != other]
    expect(not differ, f"{len(differ)} of {len(alone)} differ: {[(alone[i], found[i]) for i in differ[:2]]}")


if __name__ == "__main__":
    main()
