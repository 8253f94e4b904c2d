"""Replace attributes of an object or names of a module for a while, if TRL or transformers has no hook."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values inside this context. A replaced method is the class's again afterwards.

    >>> import types
    >>> args = types.SimpleNamespace(beta=0.5)
    >>> with replaced(args, beta=0.0, other=1):
    ...     print(args)
    namespace(beta=0.0, other=1)
    >>> args
    namespace(beta=0.5)
    """
    # Not with `setattr`: a method of the class is not in the instance's dictionary, and deleting the entry restores it.
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)
