"""Network ports of this machine: whether one is free, and one that is.

Does not reserve it: another program may take it before it is used.
"""

import socket


def is_free(port: int) -> bool:
    """Nobody listens at this port of the machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
