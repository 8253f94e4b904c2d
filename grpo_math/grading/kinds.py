r"""What may stand in what: a set in no sum, infinity in no product, a list in no root.

>>> misplaced(("add", ("num", 1), ("num", 2))), misplaced(("add", ("num", 1), ("set", ("num", 2))))
(None, 'set in sum')

Does not read texts: expression.py asks it of each tree that it has read.
"""

from typing import Any

Tree = tuple[Any, ...]

VALUES = frozenset("num var const add mul neg div pow call fact pm percent degrees base mod big".split())  # noqa: SIM905
VECTORS = VALUES | {"tuple", "matrix"}
SETS = VECTORS | {"set", "union", "inf"}
PARTS: dict[str, frozenset[str]] = {  # a kind that is not here holds anything
    **dict.fromkeys(("add", "mul", "pm", "div", "pow", "call"), VECTORS),
    **dict.fromkeys(("fact", "percent", "degrees", "mod", "ratio"), VALUES),
    "neg": VECTORS | {"inf"},
    "big": VECTORS | {"inf", "relation"},
    "union": SETS,
    "relation": SETS | {"ratio"},
    "set": SETS | {"relation"},
    "tuple": SETS | {"relation", "ratio"},
}
NAMES = {"add": "sum", "mul": "product", "div": "fraction", "pow": "power", "fact": "factorial", "inf": "infinity",
         "call": "function"}  # fmt: skip


def misplaced(tree: Tree) -> str | None:
    """The first part of a tree that cannot stand where it does, as two words; None where there is none."""
    left = [tree]
    while left:
        whole = left.pop()
        allowed = PARTS.get(whole[0])
        for part in whole[1:]:
            for inner in part if whole[0] == "matrix" else (part,):
                if not isinstance(inner, tuple):
                    continue
                if allowed is VECTORS and inner[0] == "tuple" and any(_is_relation(part) for part in inner[1:]):
                    return f"relation in {NAMES.get(whole[0], whole[0])}"  # f(3, x = 2)
                if allowed is not None and _kind(inner) not in allowed:
                    return f"{NAMES.get(_kind(inner), _kind(inner))} in {NAMES.get(whole[0], whole[0])}"
                left.append(inner)
    return None


def _is_relation(part: object) -> bool:
    return isinstance(part, tuple) and part[0] == "relation"


def _kind(tree: Tree) -> str:
    return "inf" if tree == ("const", "inf") else str(tree[0])
