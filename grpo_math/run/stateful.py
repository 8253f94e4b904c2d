"""Objects whose state a checkpoint contains."""

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar


class Stateful:
    """An object whose state is the attributes named in ``SAVED``. Existing checkpoints contain these names.

    >>> class Counter(Stateful):
    ...     SAVED, count = ("count",), 3
    >>> counter = Counter()
    >>> counter.load_state_dict({"count": 5, "another_version": 1})
    >>> counter.state_dict()
    {'count': 5}
    """

    SAVED: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in self.SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # resume=force may switch on what the checkpoint does not contain, such as resampling.
        for name in {*self.SAVED} & {*state}:
            setattr(self, name, copy(state[name]))
