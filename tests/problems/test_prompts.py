"""prompts.py: every template, what keeps to its format and what does not, and hostile completions."""

import pytest

from grpo_math.grading.formats import FORMATS, in_format
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
    "python": ("#### 7", "It prints 1,234.\n#### 1,234", "#### -7.5\n"),
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
    "python": ("", "7", "####", "#### 12 * 34", "#### x", "#### 7\n#### 8", "#### 7 apples"),
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


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prompt_holds_the_problem_once_and_word_for_word(template):
    prompt = as_template(template).prompt(PROBLEM)
    whole = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    assert whole.count(PROBLEM) == 1
    if not isinstance(prompt, str):
        assert whole == PROBLEM
        assert not any(PROBLEM in message["content"] for message in prompt[:-1])


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        ("gsm8k", "system user assistant user"),
        ("direct", "system user assistant user"),
        ("boxed", "system user"),
        ("xml", "system user"),
        ("think", "system user"),
        ("python", "system user assistant tool assistant user"),
    ],
)
def test_a_chat_has_a_worked_example_in_the_format_that_it_teaches_or_none(template, roles):
    messages = as_template(template).prompt(PROBLEM)
    assert [message["role"] for message in messages] == roles.split()
    if len(messages) > 2:
        assert in_format(messages[-2]["content"], template)
        assert FORMATS[template].marker.findall(messages[-2]["content"]) == ["7"]
    messages[0]["content"] = "changed"
    assert as_template(template).prompt(PROBLEM)[0]["content"] != "changed"


def test_the_worked_example_of_python_calls_it_and_r1_zero_has_opened_the_thinking():
    messages = as_template("python").prompt("a?")
    (call,) = messages[2]["tool_calls"]
    assert call["function"] == {"name": "python", "arguments": {"code": "print(3 + 4)"}}
    assert messages[3]["content"] == "7"
    assert as_template("r1_zero").prompt("a?").endswith("User: a?\nAssistant: <think>")


def test_every_template_has_the_answer_format_of_its_name():
    assert set(TEMPLATES) == set(FORMATS)
    for name, answer_format in FORMATS.items():
        assert answer_format.name == name
        for piece in answer_format.tags:
            output = as_template(name).prompt("a?")
            text = output if isinstance(output, str) else " ".join(message["content"] for message in output)
            assert piece in text  # the prompt shows what it asks for


@pytest.mark.parametrize(("name", "completion"), [(name, text) for name in ACCEPTED for text in ACCEPTED[name]])
def test_a_completion_in_the_format_is_accepted(name, completion):
    assert in_format(completion, name)
    position = -1
    for tag in FORMATS[name].tags:  # partial credit finds its pieces, in order
        position = completion.find(tag if name != "boxed" else "boxed", position + 1)
        assert position >= 0


@pytest.mark.parametrize(("name", "completion"), [(name, text) for name in REJECTED for text in REJECTED[name]])
def test_a_completion_out_of_the_format_is_rejected(name, completion):
    assert not in_format(completion, name)
