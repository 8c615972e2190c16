"""Every kind of bad request against a server in a process of its own: is each refused well, and is nothing left?

python clients/bad_requests.py              with Paceline's own environment

Refused well: with a status that is right for it (bad_cases.py has the list), within a second, or within a second of the
limit on time that it runs into; with OpenAI's error body; without a word of the server's insides. After each group the
server still says what it said before. A case that takes longer gets two more tries: other programs run here, too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Collection
from itertools import groupby

import odd_clients
from bad_cases import ADMIN, AUTH, KEY, Case, cases
from checks import Tally, expect
from prompts import COMPLETIONS, said
from served import ROOT, Served, served
from wire import Answer, get, head, post, send

SLOW = 1.0  # seconds, the server's limits on heads and bodies
CUT_OFF = 2.0  # seconds for a client that reads nothing
SOON = 1.0
TRIES = 3
CONTEXT = 512
LEAKS = ("Traceback", 'File "', "site-packages", ".py", "0x", str(ROOT), sys.prefix)
CANARY = post(COMPLETIONS, {"prompt": "One, two, three,", "max_tokens": 16, "temperature": 0}, AUTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, action="append", help="numbers of items")
    parser.add_argument("--serve-python", default=sys.executable, help="of Paceline's environment (default: this one)")
    args = parser.parse_args()
    limits = ("--header-timeout", str(SLOW), "--read-timeout", str(SLOW), "--write-timeout", str(CUT_OFF))
    sizes = ("--max-context", str(CONTEXT), "--kv-memory", "256M")
    tally = Tally("bad_requests")
    with served(args.serve_python, *limits, *sizes, "--api-keys", KEY, "--admin-key", ADMIN) as server:
        asyncio.run(check(server, tally, only=args.only or range(1, 16)))
    tally.end()


async def check(server: Served, tally: Tally, *, only: Collection[int]) -> None:
    before = said(await send(server.port, CANARY))
    descriptors, slowest, count = server.descriptors, 0.0, 0
    chosen = [case for case in cases() if case.item in only]
    for item, group in groupby(chosen, key=lambda case: case.item):
        for case in group:
            with tally(f"{item}. {case.name}"):
                slowest, count = max(slowest, await well_refused(server, case)), count + 1
        with tally(f"{item}. the server is as before"):
            await as_before(server, before)
    with tally("9. HEAD says as much as GET, without a body"):
        answers = [await send(server.port, head(method, "/v1/nothing", AUTH)) for method in ("GET", "HEAD")]
        expect([answer.status for answer in answers] == [404, 404], answers)
    for number in sorted(odd_clients.PLAYS.keys() & set(only)):
        play = odd_clients.PLAYS[number]
        with tally(f"{number}. {play.__doc__}"):
            await play(server)
            await as_before(server, before)
    with tally("nothing is left"):
        await odd_clients.idle(server)
        expect(server.descriptors <= descriptors + 1, f"{server.descriptors} descriptors, {descriptors} before")
        wrong = [line for line in server.log.read_text().splitlines() if "Traceback" in line or "ERROR" in line]
        expect(not wrong, wrong[:3])
    print(f"{count} requests; the slowest answer took {slowest:.3f} s, limits on time not counted")


async def well_refused(server: Served, case: Case) -> float:
    """The seconds that it took."""
    taken = []
    for _ in range(TRIES):
        answer = await send(server.port, case.request)
        check_answer(answer, case)
        taken.append(answer.seconds - SLOW * case.waits)
        if taken[-1] <= SOON:
            break
    expect(min(taken) <= SOON, f"took {taken} s")
    return min(taken)


def check_answer(answer: Answer, case: Case) -> None:
    expect(answer.status in case.statuses, f"{answer.status} instead of {set(case.statuses)}: {answer.body[:300]!r}")
    if answer.status == 200:
        return
    error = answer.json()
    expect(error.keys() == {"error"} and error["error"].keys() == {"message", "type", "param", "code"}, error)
    expect(0 < len(error["error"]["message"]) <= 1000, error)
    text = answer.body.decode() + str(answer.headers)
    expect(not any(leak in text for leak in LEAKS), f"tells too much: {text[:500]}")


async def as_before(server: Served, before: tuple[str, str]) -> None:
    expect((await send(server.port, get("/health"))).status == 200, "not healthy")
    expect(said(await send(server.port, CANARY)) == before, "another text than before")


if __name__ == "__main__":
    main()
