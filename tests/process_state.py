"""What a library call must not change in the process of its caller."""

import locale
import os
import signal
import warnings


def process_state() -> dict:
    import torch

    return {
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "threads": torch.get_num_threads(),
        "warnings": [str(one) for one in warnings.filters],
    }
