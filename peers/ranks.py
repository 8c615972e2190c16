"""A model over two CPU ranks: the same text with a drafter and without, and the same bits as on one rank.

Replays prompts by `paceline audit` with two ranks, the drafter whole and split, greedy and at temperature 1, alone and
eight at once: each answer must equal the plain one. Then asks servers with one rank, with two, and with two and a split
drafter, all with --same-bits-across-degrees, for the same answers: text, tokens and log-probabilities must be equal in
every bit. The exit status is 1 if anything differs; --save writes what was found as JSON.

    python -m peers.ranks --target qwen2.5-coder-1.5b.gguf --drafter qwen2.5-coder-0.5b.gguf --save ranks.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from paceline.bench.machine import describe
from paceline.models.resolve import served_name
from peers.agree import paceline_server
from peers.page_source import Paths, load, source
from peers.run import note
from peers.systems import ROOT
from peers.tables import markdown

AT_ONCE = 8
KEPT = ("drafter", "at_once", "sampling", "compared", "identical", "drafted", "accepted")  # of a case of an audit
MEMORY = ("--kv-memory", "512M")
TWO = ("--tensor-parallel", "2", "--threads", "1", *MEMORY)
SPLIT = ("--drafter-tensor-parallel", "2")
SAME = ("--same-bits-across-degrees", "--no-measure-cost")  # drafts whatever it costs, so that there is what may differ
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    what = ["--prompts", args.prompts, "--count", str(args.count), "--max-tokens", str(args.max_tokens)]
    what += ["--temperature", "0,1", "--no-edits"]
    audits = [audited(args, what, split=split) for split in (False, True)]
    record = facts(args) | {"audits": audits, "across": across(args, what)}
    if args.save is not None:
        args.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(text(record))
    sys.exit(0 if passed(record) else 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a GGUF file or a directory")
    parser.add_argument("--drafter", type=Path, required=True, help="a smaller model that drafts for it")
    parser.add_argument("--prompts", default="humaneval", help="a set or a file (default: %(default)s)")
    parser.add_argument("--count", type=int, default=8, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what was found as JSON")
    return parser.parse_args(argv)


def audited(args: argparse.Namespace, what: list[str], *, split: bool) -> dict[str, Any]:
    """Compare answers with the drafter to plain ones, on two ranks. `split`: the drafter is, too."""
    note(f"two ranks, the drafter {'split' if split else 'whole'}")
    words = [
        str(args.target.resolve()),
        "--drafter",
        f"model:{args.drafter.resolve()}",
        *TWO,
        *(SPLIT if split else ()),
    ]
    found = audit([*words, *what, "--rule", "coupled", "--at-once", f"1,{AT_ONCE}"])
    cases = [{name: case[name] for name in KEPT} for case in found["cases"] if case["compared"]]
    return {"split": split, "how": found["how"], "verdict": found["verdict"], "passed": found["passed"], "cases": cases}


def across(args: argparse.Namespace, what: list[str]) -> dict[str, Any]:
    """Compare servers with one rank and with two, in every bit."""
    note("one rank beside two")
    target, drafter = str(args.target.resolve()), f"model:{args.drafter.resolve()}"
    servers: dict[str, tuple[str, ...]] = {
        "1 rank, plain": (target, "--drafter", "none", *MEMORY, *SAME),
        "2 ranks, plain": (target, "--drafter", "none", *TWO, *SAME),
        "2 ranks, a split drafter": (target, "--drafter", drafter, *TWO, *SPLIT, *SAME),
    }
    with ExitStack() as stack:
        urls = {name: stack.enter_context(paceline_server(*words)) for name, words in servers.items()}
        named = [word for url in urls.values() for word in ("--url", url)]
        found = audit([*named, "--logprobs", *what, "--at-once", str(AT_ONCE)])
        accepted = {name: metric(url, ACCEPTED) for name, url in urls.items()}
    return {
        "accepted": accepted,
        "different": len(found["differences"]),
        "failed": len(found["failed"]),
        **{name: found[name] for name in ("requests", "answers", "tokens", "logprobs", "passed")},
    }


def audit(words: Sequence[str]) -> dict[str, Any]:
    """Run `paceline audit`, and return its record."""
    command = [sys.executable, "-m", "paceline.cli.main", "audit", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    try:
        record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"the audit ended with {done.returncode}") from None
    return record


def metric(url: str, name: str) -> float:
    """Sum a metric over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def passed(record: Mapping[str, Any]) -> bool:
    """Tell whether everything was the same, and something was drafted in each part."""
    audits, across = record["audits"], record["across"]
    drafted = all(any(case["accepted"] for case in each["cases"]) for each in audits)
    return drafted and all(each["passed"] for each in audits) and across["passed"] and any(across["accepted"].values())


def facts(args: argparse.Namespace) -> dict[str, Any]:
    target, drafter = args.target.name, args.drafter.name
    return {
        "benchmark": "ranks",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m peers.ranks --target {target} --drafter {drafter} --prompts {args.prompts} "
        f"--count {args.count} --max-tokens {args.max_tokens}",
        "target": served_name(target),
        "drafter": served_name(drafter),
        "machine": describe(torch.device("cpu")),
    }


def text(record: Mapping[str, Any]) -> str:
    """Say what was the same: each answer on two ranks, and the bits of one rank and two."""
    header = ["two ranks", "at once", "sampling", "same as plain", "drafted", "accepted"]
    rows = [
        [_way(each, case), str(case["at_once"]), case["sampling"], f"{case['identical']} of {case['compared']}",
         str(case["drafted"]), str(case["accepted"])]
        for each in record["audits"]
        for case in each["cases"]
    ]  # fmt: skip  # a field a line would hide what belongs together
    found = record["across"]
    said = "equal in every bit" if found["passed"] else f"{found['different']} differ, {found['failed']} failed"
    accepted = max(found["accepted"].values())
    line = (
        f"One rank and two, with and without drafts, in one order of sums: {found['answers']} answers with "
        f"{found['tokens']} tokens to {found['requests']} requests, text, tokens and log-probabilities {said}; "
        f"{accepted:.0f} drafted tokens were accepted."
    )
    return "\n".join([markdown(header, rows), "", line])


def _way(audit: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    return "plain" if case["drafter"] is None else f"drafter {'split' if audit['split'] else 'whole'}"


def ranks(paths: Paths) -> str:
    """The part of docs/benchmarks.md."""
    [path] = paths
    record = load(path)
    return "\n".join([text(record), "", source(path, record)])


if __name__ == "__main__":
    main()
