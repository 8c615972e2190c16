"""Agent-like traffic: requests of agents that come back to the same tools and files, with no request twice.

    python -m peers.agent_traffic --data DIRECTORY > agents.jsonl
    paceline bench offline smollm2 --drafter ngram --drafter suffix --prompts agents.jsonl

A session is one agent at work, each of whose requests stands alone. With a tool of BFCL it asks for the call that a
question needs, then for the same with other numbers. With a file of the code edits it asks for one edit after another.
Several sessions run at once, in an order that a seed fixes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.prompts.files import Prompt, read_prompts

SEED = 0
SESSIONS = 40  # half of them with tools, half with files
REQUESTS = 4  # of a session
AT_ONCE = 4  # sessions
NUMBER = re.compile(r"(?<![\w.,])[1-9]\d{0,3}(?![.,]?\d|\w)")  # whole ones: no decimals, dates or names
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
RETURN = "Return the complete code and change nothing else."
Session = list[str]


def tool_session(prompt: Prompt, draw: random.Random) -> Session | None:
    """Ask for a call, then for calls with other numbers; None: the question has no numbers."""
    question, rest = prompt.text.split("\n\n", 1)
    if not NUMBER.search(question):
        return None
    others = [NUMBER.sub(lambda found: _other(found[0], draw), question) for _ in range(5 * REQUESTS)]
    asked = list(dict.fromkeys([question, *others]))[:REQUESTS]
    return [f"{each}\n\n{rest}" for each in asked] if len(asked) == REQUESTS else None


def _other(number: str, draw: random.Random) -> str:
    """Draw a number with as many digits."""
    return str(draw.randrange(10 ** (len(number) - 1), 10 ** len(number)))


def file_session(prompt: Prompt, draw: random.Random) -> Session | None:
    """Ask for several edits of one file; None: the file has no function."""
    found = CODE.search(prompt.text)
    function = re.search(r"def (\w+)\(", found[1]) if found else None
    if found is None or function is None:
        return None
    edits = [
        "Add Python type hints to every function signature in this code.",
        f"Add a print statement at the start of the function `{function[1]}` that prints its arguments.",
        "Add a short comment above each loop and each return statement.",
        f"Rename the function `{function[1]}` to `{function[1]}_v2` everywhere in this code.",
        f"Add an assertion at the start of the function `{function[1]}` that checks its arguments.",
    ]
    draw.shuffle(edits)
    return [f"{edit} {RETURN}\n\n{found[0]}" for edit in edits[:REQUESTS]]


def sessions_of(
    source: str, make: Callable[[Prompt, random.Random], Session | None], data: Path | None, draw: random.Random
) -> Iterator[Session]:
    """Yield the sessions that can be made from a set, in random order."""
    prompts = read_prompts(source, data=data)
    draw.shuffle(prompts)
    for prompt in prompts:
        session = make(prompt, draw)
        if session is not None:
            yield session


def interleaved(sessions: Sequence[Session], draw: random.Random) -> Iterator[tuple[int, int, str]]:
    """Yield (session, request, text) as AT_ONCE sessions make them; when one ends, the next begins."""
    waiting, running = list(enumerate(sessions)), list[tuple[int, Iterator[tuple[int, str]]]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, session = waiting.pop(0)
            running.append((number, iter(enumerate(session))))
        chosen = draw.randrange(len(running))
        number, requests = running[chosen]
        following = next(requests, None)
        if following is None:
            del running[chosen]
        else:
            yield number, *following


def traffic(*, data: Path | None = None, sessions: int = SESSIONS, seed: int = SEED) -> list[dict[str, str]]:
    """Make the requests, as lines of a prompt file."""
    draw = random.Random(seed)
    sources = [sessions_of("bfcl", tool_session, data, draw), sessions_of("code_edit", file_session, data, draw)]
    made = [next(sources[i % 2]) for i in range(sessions)]
    lines = [
        {"id": f"session {number}, request {place}", "category": "agents", "prompt": text}
        for number, place, text in interleaved(made, draw)
    ]
    texts = {line["prompt"] for line in lines}
    assert len(texts) == len(lines), f"{len(lines) - len(texts)} requests stand twice"
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the prompt sets (default: the shipped ones)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="(default: %(default)s)")
    args = parser.parse_args()
    for line in traffic(data=args.data, sessions=args.sessions, seed=args.seed):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
