"""A simulated run of a recipe (simulation/run.py), in a process of its own: what a plan is checked against."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "simulation" / "run.py"


def simulate(config: str, *, prompt_tokens: int = 512, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Bytes that are live and reserved. Takes ten seconds to minutes."""
    command = [sys.executable, str(PROGRAM), "--config", config, "--prompt-tokens", str(prompt_tokens), *fields]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer
