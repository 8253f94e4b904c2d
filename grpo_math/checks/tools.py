"""The check of the Python tool: its walls, tried on this machine.

Does not import torch, and does not look at tools of one's own.
"""

from collections.abc import Iterator

from grpo_math.checks.setup import Said, Setup
from grpo_math.tools import read_tools
from grpo_math.tools.limits import read_limits
from grpo_math.tools.python import server
from grpo_math.tools.walls import layers, refuse_without, walls


def python_tool(setup: Setup) -> Iterator[Said]:
    """Programs of the tool `python` cannot get at the network, files, processes, memory or the trainer: each wall is
    tried on this machine."""
    names, limits = setup.settings.get("tools") or (), read_limits(setup.settings.get("python") or {})
    read_tools(names, limits)
    if "python" not in names:
        return
    lines = refuse_without(limits)
    for line in lines:
        yield Said("warning", line, "run where Landlock and seccomp are allowed", {"layers": server().layers})
    if not lines:
        held = ", ".join(wall.name for wall in walls(limits))
        yield Said("info", f"the Python tool's walls hold: {held} ({layers(server().layers)})", "")
