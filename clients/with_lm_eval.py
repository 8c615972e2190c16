"""lm-eval's local-completions: batches of token ids with echo and log-probabilities.

With --plain-url, of a server that decodes plainly, the likelihoods of both must be the same to the last bit.

python clients/with_lm_eval.py --url http://127.0.0.1:8000/v1 --tokenizer DIRECTORY
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from checks import Checks, expect
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROOT = Path(__file__).parent.parent
TASKS = ROOT / "clients" / "lm_eval_tasks"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tokenizer", required=True, help="a directory with the model's tokenizer.json")
    options.add_argument("--plain-url", help="of a server started with --drafter none")
    checks = Checks("lm-eval", options)
    tokenizer = str(Path(checks.options.tokenizer).resolve())
    os.chdir(ROOT)  # the task's data are named from here

    with checks("multiple choice in batches of eight"):
        scores = likelihoods(checks.url, checks.model, tokenizer, batch=8)
        expect(len(scores) == 24, f"three likelihoods a question: {len(scores)}")
        expect(all(score < 0 for score, _ in scores), "likelihoods")

    with checks("the same one by one"):
        expect(likelihoods(checks.url, checks.model, tokenizer, batch=1) == scores, "the same likelihoods")

    if checks.options.plain_url:
        with checks("the same from a plain server"):
            expect(
                likelihoods(checks.options.plain_url, checks.model, tokenizer, batch=8) == scores,
                "the same likelihoods",
            )

    checks.end()


def likelihoods(url: str, model: str, tokenizer: str, *, batch: int) -> list[tuple[float, bool]]:
    outcome: Any = simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url.rstrip('/')}/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=["paceline_choice"],
        batch_size=batch,
        task_manager=TaskManager(include_path=str(TASKS)),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(outcome["samples"]["paceline_choice"], key=lambda sample: sample["doc_id"])
    return [tuple(score) for sample in samples for score in sample["filtered_resps"]]


if __name__ == "__main__":
    main()
