"""Chat templates that render tool calls and results, and the parsers of these calls.

TRL knows the templates of the model families that call tools. SmolLM2-Instruct, the embedded model, has a template
without calls. With the Python tool as the only tool it gets a template that renders everything else the same. A call is
a fenced block, which such a small model writes without training.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpo_math.errors import ConfigError, as_config_error

Message = dict[str, Any]
Tool = Callable[..., Any]

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A fenced block for python, and JSON for any other call: TRL's probes call tools with other names and arguments.
CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "{% if call.function.name == 'python' and call.function.arguments.code is defined %}"
    "{{ '```python\n' + call.function.arguments.code + '\n```' }}"
    "{% else %}{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endif %}{% endfor %}"
)
WITH_CALLS = SMOLLM2_TEMPLATE.replace("message['content'] + ", f"(message['content'] or '') }}}}{CALLS}{{{{")
# How transformers parses a turn of SmolLM2: a fenced block is a call of python.
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "```python\n",
            "close_pattern": r"\n?```\s*",
            "content": "text",
            "content_args": {"strip": False},
            "transform": {"type": "function", "function": {"name": "python", "arguments": {"code": "{content}"}}},
            "repeats": True,
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
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
    # On the instance: TRL's own `parse_response` calls this method of the tokenizer.
    tokenizer.parse_response = partial(_parsed, tokenizer)
    # WITH_CALLS, if a tokenizer is prepared for the second time.
    if tokenizer.chat_template in (SMOLLM2_TEMPLATE, WITH_CALLS) and names == ["python"]:
        tokenizer.chat_template = WITH_CALLS
        tokenizer.response_template = RESPONSE
    if not supports_tool_calling(tokenizer):
        reason = "cannot be called: the chat template of this model renders no calls"
        raise ConfigError("tools", names, reason, "use a model that calls tools, such as Qwen2.5-1.5B-Instruct")
    reason = "cannot be called: TRL does not know this model's chat template"
    with as_config_error("tools", names, reason, "use a model that it knows, such as Qwen2.5-1.5B-Instruct"):
        if not (getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)):
            add_response_schema(tokenizer)
        # Results are appended to the sampled tokens. TRL has a variant of a template that renders an earlier turn
        # differently when a result follows.
        return None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)


def _parsed(tokenizer: Any, ids: Any, **settings: Any) -> Any:
    """Call the tokenizer's parser. For a thousand brackets it raises an error that TRL does not expect."""
    try:
        # The method of the class: the instance's own is this function.
        parsed = type(tokenizer).parse_response(tokenizer, ids, **settings)
        # JSON can name half of a character, which no tokenizer takes and no file stores.
        return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    except (RecursionError, LookupError, AttributeError) as error:
        raise ValueError(f"no calls: {type(error).__name__}") from None
