"""Chat templates that render tool calls and results, and the parsers of these calls.

TRL knows the templates of the model families that call tools. SmolLM2-Instruct, the embedded model, has a template
without calls. It gets one that renders everything else the same. If the Python tool is the only tool, a call is a
fenced block, which such a small model writes without training; with other tools it is the JSON of larger models.

Does not run a call (turns.py does).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpo_math.errors import ConfigError, first_line

Message = dict[str, Any]
Tool = Callable[..., Any]

OF_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LISTED = "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
AS_JSON = "{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}"
IN_FENCE = "{{ '```python\n' + call.function.arguments.code + '\n```' }}"
IS_CODE = "call.function.name == 'python' and call.function.arguments.code is defined"
CALL: dict[str, Any] = {"type": "function"}
FENCE = {
    "open": "```python\n",
    "close_pattern": r"\n?```\s*",
    "content": "text",
    "content_args": {"strip": False},
    "transform": {**CALL, "function": {"name": "python", "arguments": {"code": "{content}"}}},
}
JSON = {
    "open": "<tool_call>",
    "close_pattern": r"</tool_call>\s*",
    "content": "json",
    "transform": {**CALL, "function": "{content}"},
}


def prepare(tokenizer: Any, tools: Sequence[Tool]) -> str | None:
    """Make the tokenizer's ``parse_response`` parse calls of these tools. Return the chat template, or None for the
    tokenizer's own.

    Raises `ConfigError` for a model whose template renders no calls, or whose calls cannot be parsed.
    """
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    names = [tool.__name__ for tool in tools]
    tokenizer.parse_response = partial(_parsed, tokenizer)
    if tokenizer.chat_template in (OF_SMOLLM2, *map(smollm2, (True, False))):
        fenced = names == ["python"]
        tokenizer.chat_template, tokenizer.response_template = smollm2(fenced), _response(FENCE if fenced else JSON)
    if not supports_tool_calling(tokenizer):
        reason = "cannot be called: the chat template of this model renders no calls"
        raise ConfigError("tools", names, reason, "use a model that calls tools, such as Qwen2.5-1.5B-Instruct")
    try:
        if not (getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)):
            add_response_schema(tokenizer)
        return None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
    except ValueError as error:
        reason = f"cannot be called: TRL does not know this model's chat template ({first_line(error)})"
        raise ConfigError("tools", names, reason, "use a model that it knows, such as Qwen2.5-1.5B-Instruct") from None


def _parsed(tokenizer: Any, ids: Any, **settings: Any) -> Any:
    """Call the tokenizer's parser. For a thousand brackets it raises an error that TRL does not expect."""
    try:
        return type(tokenizer).parse_response(tokenizer, ids, **settings)
    except (RecursionError, LookupError, AttributeError) as error:
        raise ValueError(f"no calls: {type(error).__name__}") from None


def smollm2(fenced: bool) -> str:
    """Return SmolLM2-Instruct's chat template with calls. Without a call it renders the same as the original one."""
    call = f"{{% if {IS_CODE} %}}{IN_FENCE}{{% else %}}{AS_JSON}{{% endif %}}" if fenced else AS_JSON
    calls = f"}}}}{{% for call in message.tool_calls or [] %}}{call}{{% endfor %}}{{{{"
    template = OF_SMOLLM2.replace("message['content'] + ", f"(message['content'] or '') {calls}")
    return template if fenced else LISTED + template


def _response(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {**call, "repeats": True},
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
