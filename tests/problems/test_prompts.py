"""prompts.py: every template, what keeps to its format and what does not, and hostile completions."""

import re

import pytest

from grpo_math import load_problems
from grpo_math.errors import ConfigError
from grpo_math.grading.formats import FORMATS, in_format
from grpo_math.grading.where import find
from grpo_math.problems.prompts import TEMPLATES, as_template

PROBLEM = "What is {5} + 6? %s {0} <answer>"

ACCEPTED = {
    "gsm8k": (
        "3 + 4 = 7\n#### 7",
        "#### 7",
        "####7",
        "#### 7\n",
        "#### 7 \n\n \n",
        "first\nsecond\n\n####\t-1,250.50",
        "#### 7 apples",
    ),
    "direct": ("#### 7", "####7", "\n#### 7\n", "#### 7 apples", "#### 7 \n\n"),
    "boxed": (
        r"\boxed{7}",
        r"so $\boxed{\frac{1}{2}}$.",
        "first\nso\n" + r"\boxed {7} and no more",
        r"\fboxed{7}",
        r"<think>\boxed{1}?</think> \boxed{2}",
        r"\boxed{\{1, 2\}} \textbox{a}",
    ),
    "r1_zero": (
        "easy </think> <answer>7</answer>",
        "easy</think><answer>7</answer>",
        "</think>\n<answer>\n7\n</answer>\n",
        "first\nsecond < 3 > 2 </think> <answer> a <b> c </answer>  ",
    ),
    "xml": (
        "<reasoning>easy</reasoning><answer>7</answer>",
        "<reasoning>\n3 + 4\n= 7\n</reasoning>\n<answer>\n7\n</answer>\n",
        "\n <reasoning></reasoning> <answer>7</answer>",
    ),
    "think": (
        "<think>easy</think><answer>7</answer>",
        "<think>\n3 + 4\n= 7\n</think>\n<answer>\n7\n</answer>\n",
        "\n <think></think> <answer>7</answer>",
    ),
}
REJECTED = {
    "gsm8k": (
        "",
        "It is 7.",
        "####",
        "#### ",
        "####\n7",
        "#### 7\nand so on",
        "#### 7\n#### 8",
        "#### 7 #### 8",
        "### 7",
        "##### 7",
        "# A heading\n#### 7",
    ),
    "direct": (
        "",
        "7",
        "####",
        "####\n7",
        "3 + 4 = 7\n#### 7",
        "#### 7\n#### 8",
        "#### 7 #### 8",
        "#### 7\nso",
        "### 7",
    ),
    "boxed": (
        *("", "7", r"\boxed", r"\boxed 7", r"\boxed{7", "boxed{7}", r"\boxedd{7}", r"} \boxed{"),
        *(r"\boxed{}", r"\boxed{ }", r"\boxed{1} or \boxed{2}", r"\boxed{1}, then \boxed{2}", r"\boxed{\boxed{7}}"),
        *(r"\fbox{1} \boxed{2}", r"\boxed{1} \boxed 2", r"\boxed{2} </think>", r"\boxed{1} <think>a</think> 2"),
    ),
    "r1_zero": (
        "",
        "<answer>7</answer>",
        "easy </think> 7",
        "easy </think> <answer></answer>",
        "easy </think> <answer> \n </answer>",
        "easy </think> <answer>7",
        "easy </think> so <answer>7</answer>",
        "easy </think> <answer>7</answer> and so on",
        "<think>easy</think> <answer>7</answer>",
        "a </think> b </think> <answer>7</answer>",
        "a <answer>6</answer> </think> <answer>7</answer>",
        "a </think> <answer>6</answer> <answer>7</answer>",
        "a </think> <answer>6 <answer>7</answer>",
    ),
    "xml": (
        "",
        "<answer>7</answer>",
        "<reasoning>easy</reasoning>",
        "<reasoning>easy</reasoning><answer></answer>",
        "<reasoning>easy</reasoning><answer> </answer>",
        "<answer>7</answer><reasoning>easy</reasoning>",
        "Well: <reasoning>easy</reasoning><answer>7</answer>",
        "<reasoning>easy</reasoning><answer>7</answer> done",
        "<reasoning>a</reasoning><reasoning>b</reasoning><answer>7</answer>",
        "<reasoning>a <answer>6</answer></reasoning><answer>7</answer>",
    ),
    "think": (
        "",
        "<answer>7</answer>",
        "<think>easy</think>",
        "<think>easy</think><answer></answer>",
        "<think>easy</think><answer> </answer>",
        "<answer>7</answer><think>easy</think>",
        "Well: <think>easy</think><answer>7</answer>",
        "<think>easy</think><answer>7</answer> done",
        "<think>a</think><think>b</think><answer>7</answer>",
        "<think>a <answer>6</answer></think><answer>7</answer>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_holds_the_problem_once_word_for_word_and_shows_its_format_and_nothing_is_shared(name):
    prompt = as_template(name).prompt(PROBLEM)
    messages = [{"role": "text", "content": prompt}] if isinstance(prompt, str) else prompt
    text = "\n".join(message["content"] for message in messages)
    assert text.count(PROBLEM) == messages[-1]["content"].count(PROBLEM) == 1
    assert all(tag in text for tag in FORMATS[name].tags)
    if len(messages) > 2:  # a worked example
        assert in_format(messages[-2]["content"], name)
        assert find(messages[-2]["content"], name).text == "7"
    messages[0]["content"] = "changed"
    assert as_template(name).prompt(PROBLEM)[0] != "changed"


def test_rows_of_a_script_have_its_system_prompt_and_its_format():
    (row,) = load_problems("generated:sums", limit=1, system_prompt="Think.", answer_format="direct")
    assert (row["prompt"][0]["content"], len(row["prompt"]), row["answer_format"]) == ("Think.", 2, "direct")


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "its own"}]


@pytest.fixture
def own_prompts(tmp_path, monkeypatch):
    (tmp_path / "test_prompts_own.py").write_text("""
def chat(problem): return [{"role": "system", "content": "old"}, {"role": "user", "content": f"<answer> {problem}"}]
def nothing(problem): return []
def number(problem): return 7
""")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "row_prompt", "contents", "answer_format"),
    [
        (["as_is"], None, ["a?"], "boxed"),
        (["as_is"], CHAT, ["Be brief.", "its own"], "boxed"),
        (["{problem} {x} ####"], CHAT, ["a? {x} ####"], "gsm8k"),
        (["{problem}", "Say <reasoning></reasoning><answer></answer>"], None, [1, "a?"], "xml"),
        (["{problem} <answer></answer> <think></think>"], None, [0], "think"),
        (["{problem}: <think>"], None, ["a?: <think>"], "r1_zero"),
        (["gsm8k", "New."], None, ["New.", "What is 3 + 4?", "3 + 4 = 7\n#### 7", "a?"], "gsm8k"),
        (["gsm8k", None, "boxed"], None, [0, 0, 0, "a?"], "boxed"),
        (["test_prompts_own:chat", "new"], None, ["new", "<answer> a?"], "boxed"),
    ],
)
def test_a_users_prompt_is_made_and_its_format_is_the_one_that_it_shows(
    arguments, row_prompt, contents, answer_format, own_prompts
):
    template = as_template(*arguments)
    prompt = template.prompt("a?", row_prompt)
    # A number stands for any text.
    assert [isinstance(text, int) or message["content"] for message, text in zip(prompt, contents, strict=True)] == [
        isinstance(text, int) or text for text in contents
    ]
    assert (str(template), template.answer_format) == (arguments[0], answer_format)
    assert as_template(template) is template


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Solve it."], "='Solve it.' does not contain {problem}: write {problem} in the problem's place"),
        (["r1_zero", "Be brief."], "system_prompt='Be brief.' would be ignored: r1_zero makes plain text"),
        (["boxed", None, "latex"], "answer_format='latex' is not known"),
        (["test_prompts_own:nothing"], "returned a list: return text, or messages with role and content"),
        (["test_prompts_own:number"], "prompt_template='test_prompts_own:number' returned a int"),
    ],
)
def test_a_prompt_that_cannot_be_made_or_used_is_refused(arguments, message, own_prompts):
    with pytest.raises(ConfigError, match=re.escape(message)):
        as_template(*arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_a_completion_is_in_the_format_or_not(name):
    assert [text for text in (*ACCEPTED[name], *REJECTED[name]) if in_format(text, name)] == [*ACCEPTED[name]]
