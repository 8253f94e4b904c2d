"""A LoRA adapter added into its base: the whole model in safetensors, whose log-probs are held to the adapter's.

Does not push (hub.py does), and merges nothing while training.
"""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation import of_run
from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.planner.model import read_config
from grpo_math.problems.prompts import build_prompt
from grpo_math.run.redact import one_line

NATS = {"bfloat16": 0.2, "float32": 0.02}  # a token may be apart on average: the bound of vLLM's canary, too
PROBE = "A baker sells 12 loaves at 3 dollars each. How many dollars is that?"
ANSWER = "12 loaves at 3 dollars each are 12 * 3 = 36 dollars.\n#### 36"


class Merged(NamedTuple):
    """``apart``: by how many nats a token the merged model's log-probs differ from those of base and adapter, on
    average; ``moved``: by how many the adapter moves those of the base."""

    folder: Path
    apart: float
    moved: float


def export(run_dir: str, folder: str, dtype: str = "bfloat16") -> Merged:
    """The model of a finished run as one, in ``folder``: weights in safetensors, tokenizer, generation settings.

    `ConfigError` for a run without an adapter, a folder that holds something, and a base that cannot be merged into;
    `UserError` where the merged model is not what base and adapter were.
    """
    if dtype not in NATS:
        raise ConfigError("dtype", dtype, "is not known", f"use one of {', '.join(NATS)}")
    run = of_run.read(run_dir)
    model, adapter = run.trained
    if adapter is None:
        raise ConfigError("merge", folder, "has nothing to merge: all weights were trained", f"take {model} as it is")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("merge", folder, "is not empty", "name a new folder")
    try:
        prompt = build_prompt(PROBE, run.template)
        return merge(run.base, "main", adapter, target, dtype, probe=prompt)
    except UserError as error:
        raise error if isinstance(error, ConfigError) else UserError(f"{error}: {folder} is not to be used") from None


def merge(
    name: str, revision: str, adapter: str | Path, folder: Path, dtype: str = "bfloat16", probe: Any = None
) -> Merged:
    """The weights of base ``name`` with the adapter in them, in ``folder``.

    ``probe``: a prompt. The tokenizer is then saved too, and the log-probs of an answer to the prompt are compared:
    `UserError` if they are apart.
    """
    if read_config(name, revision).get("quantization_config"):
        reason = "is stored quantised, and cannot take an adapter into its weights"
        raise ConfigError("merge", True, f"({name}) {reason}", "push the adapter alone")
    with redirect_stdout(sys.stderr):  # DeepSpeed, where it is installed, tells stdout of its accelerator
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        def load(path: str, revision: str) -> Any:
            precision = getattr(torch, dtype)
            return AutoModelForCausalLM.from_pretrained(
                path, revision=revision, dtype=precision, use_safetensors=True, trust_remote_code=False
            )

        try:
            base = load(model_path(name), revision)
        except OSError as error:
            reason = f"needs the base {name}, which cannot be loaded ({one_line(error)})"
            raise ConfigError("merge", True, reason, "push the adapter alone") from None
        both = PeftModel.from_pretrained(base, str(adapter))
        if probe is None:
            both.merge_and_unload().save_pretrained(folder)
            return Merged(folder, 0.0, 0.0)
        tokenizer = _tokenizer(adapter, name)
        ours = logps(both, tokenizer, probe)
        with both.disable_adapter():
            before = logps(both, tokenizer, probe)
        both.merge_and_unload().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        after = logps(load(str(folder), "main"), tokenizer, probe)  # what was written, not what is in memory
    apart, moved = ((one - ours).abs().mean().item() for one in (after, before))
    if not apart <= NATS[dtype]:
        raise UserError(f"the merged model's log-probs are {apart:.2f} nats a token from those of base and adapter")
    return Merged(folder, apart, moved)


def _tokenizer(adapter: str | Path, name: str) -> Any:
    """The adapter's, which training saved beside it; else the base's."""
    from transformers import AutoTokenizer

    if (Path(adapter) / "tokenizer_config.json").exists():
        return AutoTokenizer.from_pretrained(str(adapter), trust_remote_code=False)
    return load_tokenizer(model_path(name))


def logps(model: Any, tokenizer: Any, prompt: Any) -> Any:
    """Log-probs (T,) of the tokens of `ANSWER` after a prompt."""
    import torch

    from grpo_math.generation.completions import token_ids

    chat = isinstance(prompt, str) or tokenizer.chat_template
    (ids,) = token_ids(tokenizer, [prompt if chat else PROBE])
    answer = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    inputs = torch.tensor([ids + answer])
    model.eval()
    with torch.no_grad():
        scores = model(input_ids=inputs).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    return scores.gather(1, inputs[0, len(ids) :, None]).squeeze(1)


def next_steps(folder: Path) -> str:
    """The lines that make a GGUF file of a merged model, with llama.cpp, and take it into ollama."""
    name = folder.resolve().name.lower()
    gguf = f"{name}.gguf"
    return (
        f"GGUF     python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {gguf} --outtype q8_0\n"
        f'ollama   echo "FROM ./{gguf}" > Modelfile && ollama create {name} -f Modelfile && ollama run {name}'
    )
