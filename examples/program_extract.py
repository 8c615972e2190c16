"""Extraction: 100 rows of text become 100 objects that follow a schema, in one batch.

python examples/program_extract.py
"""

from __future__ import annotations

import json

from paceline import LLM
from paceline.program import State, gen, program

SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 20},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["item", "count"],
    "additionalProperties": False,
}
ITEMS = ["pencils", "red boxes", "cups", "chairs", "green bottles"]
ROWS = [f"Order {i}: please send {(7 * i) % 90 + 1} {ITEMS[i % len(ITEMS)]} to the office." for i in range(100)]


@program
def extract(s: State, row: str, max_tokens: int) -> dict[str, object] | None:
    s += "Text: Order 0: please send 12 lamps to the school.\n" + 'JSON: {"item": "lamps", "count": 12}\n\n'
    s += f"Text: {row}\nJSON: "
    s += gen("json", schema=SCHEMA, max_tokens=max_tokens, temperature=0)
    cut = s.sample("json").finish == "length"
    return None if cut else json.loads(s["json"])


def main(max_tokens: int = 40, rows: int = len(ROWS)) -> None:
    llm = LLM("smollm2", drafter="ngram")
    states = extract.run_batch([(row, max_tokens) for row in ROWS[:rows]], on=llm, seed=1, progress=True)
    for row, state in zip(ROWS, states[:3], strict=False):
        print(f"{row} → {state['json']}")
    good = sum(state.error is None and state.value is not None for state in states)
    print(f"{good} of {len(states)} rows extracted")


if __name__ == "__main__":
    main()
