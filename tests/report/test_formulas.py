r"""Formulas on the page: what becomes MathML, what stays text, and that nothing hostile gets through."""

import pytest

from grpo_math.report.formulas import MOST_IN_A_TEXT, Formulas, mathml

FORMULAS = {
    r"$\frac{1}{2}$": "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>",
    r"\(x^2\)": "<msup><mi>x</mi><mn>2</mn></msup>",
    r"\boxed{-3}": '<mrow class="boxed"><mrow><mo>\N{MINUS SIGN}</mo><mn>3</mn></mrow></mrow>',
    r"\[\sqrt[3]{8}\]": "<mroot><mrow><mn>8</mn></mrow><mn>3</mn></mroot>",
    r"\begin{cases} 1 & x \\ 0 \end{cases}": "<mtable><mtr>",
    r"\boxed{\frac{1}{\sqrt{2}}}": "<msqrt>",
}


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_mathml(text):
    formulas = Formulas()
    assert list(formulas.split(f"so {text}.")) == [("so ", None), (text, 0), (".", None)]
    assert FORMULAS[text] in formulas.markup[0]


@pytest.mark.parametrize(
    "text",
    [
        "He pays $5 and she pays $10.",
        "It costs $5 a day and $ 6 at night, so $11$0",
        "One is $5 for two,$6 for three.",
        "Betty has only 100 / 2 = $<<100/2=50>>50. Her grandfather gave her 15 * 2 = $30.",
        r"$\frac{1}{2",
        r"$\begin{tabular}{c}x$\end{tabular}",
        r"\(x",
        "$$",
        r"\boxed{1",
    ],
)
def test_what_is_no_formula_stays_as_it_is(text):
    assert list(Formulas().split(text)) == [(text, None)]


@pytest.mark.parametrize(
    "latex",
    [
        r"\text{<img/src=x/onerror=alert(1)>}",
        r"\text{</mtext></math><script>alert(1)</script>}",
        r"\text{<b>x</b>}",
        r"\text{a & b}",
        r"\sqrt{" * 600 + "x" + "}" * 600,
        r"\frac" * 300,
        "x" * 2001,
    ],
)
def test_what_is_not_mathml_alone_stays_text(latex):
    assert mathml(latex) is None


def test_a_link_and_a_width_that_would_cover_the_page_are_left_out():
    assert mathml(r"\href{javascript:alert(1)}{x}") == (
        '<math display="inline"><mrow><mrow><mrow><mi>x</mi></mrow></mrow></mrow></math>'
    )
    assert "999" not in mathml(r"a\hspace{-999em}b")


def test_a_formula_is_converted_once_and_a_text_has_a_limit():
    formulas = Formulas()
    pieces = list(formulas.split("$x$ " * (MOST_IN_A_TEXT + 1)))
    assert [number for _, number in pieces if number is not None] == [0] * MOST_IN_A_TEXT
    assert len(formulas.markup) == 1


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"\(a \(x\)", [r"\(x\)"]),
        (r"\[a \[x\]", [r"\[x\]"]),
        (r"\begin{array}a \begin{array}{c}x\end{array}", [r"\begin{array}{c}x\end{array}"]),
        (r"\$5, and $x$; \\$y$", ["$x$", "$y$"]),
        (r"$\$5 = \$x$", [r"$\$5 = \$x$"]),
    ],
)
def test_an_opening_mark_begins_a_formula_at_its_last_place_and_no_escaped_dollar_does(text, formulas):
    # So that a text of many marks is searched once, and not once for each of them.
    assert [piece for piece, number in Formulas().split(text) if number is not None] == formulas


def test_rejected_formulas_count_in_the_limit_of_a_text():
    rejected = "".join(rf"$\left({number}$ " for number in range(MOST_IN_A_TEXT))
    assert len(list(Formulas().split(rejected + "$x$"))) == 1
