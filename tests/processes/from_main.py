"""`broadcast_from_main` and `gather_when_done` in each of two processes of gloo: FOLDER -> FOLDER/RANK.json.

Collectives time out after 3 seconds; one process works for 5. The processes come together before that holds.
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
from grpo_math.system.collectives import broadcast_from_main, gather_when_done


def slow() -> list[int]:
    time.sleep(5)
    return [1, 2]


CALLS = (slow, Mock(side_effect=UserError("this cannot be")), Mock(side_effect=KeyError("nothing there")), lambda: "on")

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    (folder / f"{rank}.here").touch()
    while len(list(folder.glob("*.here"))) < 2:
        time.sleep(0.05)
    state = PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=3))
    seen = []
    for call in CALLS:
        try:
            seen.append(broadcast_from_main(call))
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    seen.append(gather_when_done(slow if rank == "1" else lambda: rank))
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    state.destroy_process_group()  # whose threads may otherwise outlive the interpreter
