"""`broadcast_from_main` in each of two processes of gloo: FOLDER -> FOLDER/RANK.json.

Collectives time out after 4 seconds; the main process works for 6. The processes come together before that holds.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

from accelerate import PartialState

from grpo_math.errors import UserError
from grpo_math.system.collectives import broadcast_from_main


def slow() -> list[int]:
    time.sleep(6)
    return [1, 2]


CALLS = (slow, Mock(side_effect=UserError("this cannot be")), Mock(side_effect=KeyError("nothing there")), lambda: "on")

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    (folder / f"{rank}.here").touch()
    while len(list(folder.glob("*.here"))) < 2:
        time.sleep(0.05)
    state = PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=4))
    seen = []
    for call in CALLS:
        try:
            seen.append(broadcast_from_main(call))
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    state.destroy_process_group()  # whose threads may otherwise outlive the interpreter
