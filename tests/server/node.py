"""Node, to run the modules of the playground that need no page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import paceline.server.playground as playground

HERE = Path(playground.__file__).parent
MODULES = {path.name: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.js"))}
PURE = (
    "answer",
    "api",
    "charts",
    "inline",
    "markdown",
    "race",
    "store",
    "tree",
    "words",
)  # importing them needs no page


def run(code: str, tmp_path: Path) -> Any:
    """What `code` returns, with everything that these modules export in reach."""
    node = shutil.which("node")
    if node is None:
        pytest.skip(reason="the modules of the page are run by Node, which is not installed")
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    exported = re.compile(r"^export (?:function|class|const) (\w+)", flags=re.MULTILINE)
    imports = [
        f'import {{ {", ".join(exported.findall(MODULES[f"{name}.js"]))} }} from "./{name}.js";' for name in PURE
    ]
    main = "\n".join(imports) + f"\nconsole.log(JSON.stringify((() => {{ {code} }})()));"
    (tmp_path / "test.js").write_text(main, encoding="utf-8")
    told = subprocess.run([node, str(tmp_path / "test.js")], capture_output=True, text=True, timeout=200)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)
