"""Is a simulated replay right? Record traffic, replay it against a fresh server, simulate it, and compare both.

python clients/replayed.py                           10 minutes of chats, code and edits at 1 request a second
python clients/replayed.py --minutes 1 --rate 0.5    a first look
python clients/replayed.py --keep results            keeps record, both results and the page

Run it with Paceline's own environment, on a quiet machine: the model's passes are timed in between. Throughput and
medians may be off by 10 %, 99th percentiles by 20 %; the exit status is 1 if any is further off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from served import PROGRAM, ROOT, served

SETS = ("mt_bench", "humaneval", "code_edit", "gsm8k", "spec_bench")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic (default: 10)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, Poisson (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument("--keep", type=Path, help="directory for the results (default: none are kept)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = (args.keep or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        record, real, simulated = place / "served.jsonl", place / "real.json", place / "simulated.json"
        record.unlink(missing_ok=True)
        _record(record, args)
        with served(sys.executable) as server:
            _paceline("replay", record, "--real", server.root, "--save", real)
        _paceline("replay", record, "--against", real, "--save", simulated, "--html", place / "replay.html")
        errors = json.loads(simulated.read_text())["errors_against"]
    far = [each["figure"] for each in errors if not each["holds"]]
    print(f"too far: {', '.join(far)}" if far else "every figure holds")
    return 1 if far else 0


def _record(record: Path, args: argparse.Namespace) -> None:
    """Serve the traffic once, and record all of it."""
    count = max(1, round(60 * args.minutes * args.rate))
    sets = [word for name in SETS for word in ("--prompts", name)]
    load = ["--count", count, "--rate", args.rate, "--max-tokens", args.max_tokens, "--warm-up", 0, "--no-cache-salt"]
    with served(sys.executable, "--record", str(record), "--record-share", "1") as server:
        _paceline("bench", "serve", "--url", server.root, *sets, *load)


def _paceline(*words: object) -> None:
    subprocess.run([sys.executable, *PROGRAM, *map(str, words)], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
