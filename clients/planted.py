"""`paceline` with a fault that waits: after SIGUSR1 the engine's next step raises. For kill.py, and for nobody else.

python clients/planted.py serve smollm2
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

FAULT = "a bolt is loose in /srv/secret"


def run() -> int:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from paceline.cli.main import main
    from paceline.engine.engine import Engine

    def fails(_engine: Engine) -> None:
        raise RuntimeError(FAULT)

    signal.signal(signal.SIGUSR1, lambda *_: setattr(Engine, "_step", fails))
    return main()


if __name__ == "__main__":
    sys.exit(run())
