"""Trials of the canary: a better, an equal, a slower and a failing drafter, each against a server with a real model.

    python -m peers.canary_trials --trials 20 --save canary.json
    python -m peers.canary_trials --simulate 2000

A trial is one canary in a server of this process, over HTTP. It ends with the verdict, or after `--requests` requests.
Every text is compared with that of plain decoding. `better` makes a lookup the canary of a server that decodes plainly.
`equal` compares a lookup with itself. `slower` adds a quarter of a step's time to every draft of it, `raises` raises in
the third call. `--simulate` draws log speeds instead: how often the test errs, and how many requests it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from paceline.arms import CANARY, CONTROL, ArmSpeed
from paceline.bench.machine import describe
from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.registry import register
from paceline.llm import LLM
from paceline.prompts.files import read_prompts
from paceline.server.app import create_app
from paceline.server.bridge import Bridge
from paceline.server.canary.conductor import Canary
from paceline.server.canary.evidence import NEEDED, Evidence, wealth
from paceline.server.canary.options import CanaryOptions
from paceline.server.settings import Settings
from paceline.types import SamplingParams, Speculation

KINDS = {"better": "suffix", "equal": "trial:equal", "slower": "trial:slower", "raises": "trial:raises"}
SLOWER = 0.25  # time that a draft of the slower drafter takes, in steps: 1 / 1.25 is 20 % slower
SIMULATED = ((1.0, 4000), (1.02, 4000), (0.98, 4000), (0.8, 1000), (1.2, 2000))  # speed, and requests at most
SPREAD, DRIFT = 0.25, 0.02  # deviation of a request's log speed, and of the machine's from request to request


class Trialled(NgramDrafter):
    """A lookup that the engine never pauses for its cost, and that may be slow or fail."""

    weighs_cost = True

    def __init__(self, how: str, step_seconds: float) -> None:
        super().__init__(min_ngram=2, max_ngram=3)
        self._how, self._longest, self._calls = how, 2 * step_seconds, 0
        self._ended = 0.0  # time at which the latest draft was made

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self._calls += 1
        if self._how == "raises" and self._calls > 2:
            raise RuntimeError("a trial of a drafter that raises")
        began = time.perf_counter()
        step = min(began - self._ended, self._longest)  # longer: the time between two requests
        drafts = super().propose(asks)
        while self._how == "slower" and time.perf_counter() < began + SLOWER * step:
            pass
        self._ended = time.perf_counter()
        return drafts


class Trials:
    """A model in a server, and the trials that it went through."""

    def __init__(self, llm: LLM, *, prompts: Sequence[str], tokens: int, at_once: int) -> None:
        self.llm, self._prompts, self._tokens, self._at_once = llm, prompts, tokens, at_once
        sampling = SamplingParams(temperature=0, max_tokens=tokens)
        answers = [llm.generate([prompt], sampling, speculation=Speculation(enabled=False))[0] for prompt in prompts]
        self._texts = [answer.text for answer in answers]
        steps = sum(answer.stats.output_tokens for answer in answers)
        self.step_seconds = sum(answer.stats.time_total - answer.stats.time_to_first for answer in answers) / steps

    async def run(self, kind: str, *, share: float, requests: int, min_requests: int) -> dict[str, Any]:
        """Run one trial, and tell how it ended."""
        with tempfile.TemporaryDirectory() as folder:
            bridge = Bridge(self.llm, model="trial")
            app = create_app(bridge, Settings(state_dir=folder, host="127.0.0.1"))
            canary: Canary = app.state.canary
            await bridge.start()
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
                control = "none" if kind == "better" else await app.state.drafters.add("trial:equal", "lookup")
                await app.state.drafters.choose(control)
                await canary.start(CanaryOptions(KINDS[kind], share=share, min_requests=min_requests))
                await self._begin(canary)
                outcome = await self._traffic(http, canary, requests)
            told = canary.past[-1].describe() if canary.past else canary.described()
            await self._leave(app, canary)
            await bridge.close()
        return {"kind": kind, **outcome, "canary": told}

    async def _begin(self, canary: Canary) -> None:
        """End the shadow: trials measure traffic."""
        assert canary.trial is not None, "it was started"
        canary.trial.started = 0.0
        await canary.sync()

    async def _traffic(self, http: httpx.AsyncClient, canary: Canary, requests: int) -> dict[str, Any]:
        numbers, counts = iter(range(requests)), Counter[str]()

        async def client() -> None:
            for number in numbers:
                if canary.trial is None:
                    return
                counts.update([await self._ask(http, number), "requests"])

        await asyncio.gather(*(client() for _ in range(self._at_once)))
        await canary.sync()
        return {"requests": counts["requests"], "changed": counts["changed"], "lost": counts["lost"]}

    async def _ask(self, http: httpx.AsyncClient, number: int) -> str:
        place = number % len(self._prompts)
        body = {"prompt": self._prompts[place], "max_tokens": self._tokens, "temperature": 0}
        answer = await http.post("/v1/completions", json=body, timeout=300)
        if answer.status_code != 200:
            return "lost"
        return "same" if answer.json()["choices"][0]["text"] == self._texts[place] else "changed"

    async def _leave(self, app: Any, canary: Canary) -> None:
        await app.state.drafters.set_default("suffix")
        for name in [*app.state.drafters.words]:
            await app.state.drafters.unload(name)


def simulate(speed: float, *, requests: int, share: float, generator: random.Random) -> tuple[str, int]:
    """Draw the speeds of one canary; return how it ended, and after how many requests."""
    evidence, drift = Evidence(promote_at=1.02, rollback_at=0.98), 0.0
    for number in range(1, requests + 1):
        drift += generator.gauss(0, DRIFT)
        kind, batch = generator.randrange(2), generator.choice((0, 0, 1, 2))
        arm = CANARY if generator.random() < share else CONTROL
        own = math.log(speed) if arm == CANARY else 0.0
        seconds = math.exp(-(0.5 * kind - 0.3 * batch + drift + own + generator.gauss(0, SPREAD)))
        evidence.add(arm, str(kind), ArmSpeed(batch, 100, seconds, seconds))
        if wealth(evidence.totals, "slower") >= NEEDED:
            return "rolled back", number
        if evidence.totals.get("pairs", 0) >= 50 and wealth(evidence.totals, "faster") >= NEEDED:
            return "promoted", number
    return "open", requests


def simulated(trials: int, *, share: float, seed: int = 0) -> list[dict[str, Any]]:
    generator, rows = random.Random(seed), []
    for speed, requests in SIMULATED:
        ends = [simulate(speed, requests=requests, share=share, generator=generator) for _ in range(trials)]
        counts = Counter(end for end, _ in ends)
        needed = sorted(number for end, number in ends if end != "open") or [0]
        rows.append(
            {
                "speed": speed,
                **{end: counts[end] / trials for end in ("promoted", "rolled back", "open")},
                "median": needed[len(needed) // 2],
                "95 %": needed[int(0.95 * (len(needed) - 1))],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: all")
    parser.add_argument("--requests", type=int, default=400, help="of a trial, at most")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--min-requests", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--at-once", type=int, default=1, help="requests that run side by side")
    parser.add_argument("--prompts", default="code_edit", help="a set, or a file")
    parser.add_argument("--simulate", type=int, default=0, metavar="TRIALS", help="draw speeds, and load no model")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    rows = simulated(args.simulate, share=args.share) if args.simulate else asyncio.run(measured(args))
    if args.save is not None:
        command = shlex.join(["python", "-m", "peers.canary_trials", *sys.argv[1:]])
        record = {"command": command, "machine": describe(torch.device("cpu")), "trials": rows}
        args.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows if args.simulate else ():
        print(row)


async def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    texts = [prompt.text for prompt in read_prompts(args.prompts, count=16)]
    llm = LLM(args.model, drafter="suffix", device="cpu", measure_speedup=False)
    trials = Trials(llm, prompts=texts, tokens=args.tokens, at_once=args.at_once)
    register("trial", lambda options, target, progress: trial_recipe(options, trials.step_seconds))
    rows = []
    for kind in args.kind or KINDS:
        for number in range(args.trials):
            row = await trials.run(kind, share=args.share, requests=args.requests, min_requests=args.min_requests)
            rows.append(row)
            told = row["canary"]
            ratio = "" if not told["pairs"] else f", {told['ratio_low']:.2f} to {told['ratio_high']:.2f} times as fast"
            lost = f"{row['changed']} texts changed, {row['lost']} requests lost"
            print(f"{kind} {number + 1}: {told['phase']} after {row['requests']} requests{ratio}; {lost}", flush=True)
    return rows


def trial_recipe(how: str, step_seconds: float) -> Recipe:
    def build(context: BuildContext) -> Trialled:
        return Trialled(how, step_seconds)

    return Recipe(name="trial", build=build, how=f"a lookup for trials: {how}")


if __name__ == "__main__":
    main()
