r"""Matrices and determinants in LaTeX environments.

>>> from grpo_math.grading.equal.expression import parse
>>> parse(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}").widths
(2, 2)
"""

from itertools import chain
from typing import Any

from grpo_math.grading.equal import notation
from grpo_math.grading.equal.scanner import Unreadable
from grpo_math.grading.equal.tree import Call, Matrix, Tree


def read_matrix(reader: Any) -> Tree:
    """Return the matrix at the position of a reader of expressions, or its determinant."""
    environment = reader.match(notation.MATRIX)
    if environment is None:
        raise Unreadable("an environment that is no matrix")
    rows: list[list[Tree]] = [[reader.sum()]]
    while sign := reader.take("&", "\\\\"):
        if sign == "&":
            rows[-1].append(reader.sum())
        elif reader.peek("\\end"):
            break
        else:
            rows.append([reader.sum()])
    reader.need("\\end")
    reader.need("{" + environment[1] + "}")
    matrix = Matrix(tuple(chain(*rows)), tuple(map(len, rows)))
    return Call((matrix,), "det") if environment[1] in ("vmatrix", "Vmatrix") else matrix
