"""`grpo-math export`: merge a run's LoRA adapter into its base, as one model in safetensors, or as one GGUF file
for Ollama, LM Studio and llama.cpp, whose converter writes it."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings, filterwarnings

from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation import from_run
from grpo_math.generation.models import SAMPLE, load_adapter, load_base, loading
from grpo_math.run.bar import transformers_bars
from grpo_math.run.files import require_new
from grpo_math.system.streams import Answer, say

CONVERTER = "convert_hf_to_gguf.py"
# The logits of models in bfloat16 differ by 1 to 2% if an adapter is merged.
ROUNDING = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", help="a finished run")
    add("--merge", metavar="DIR", help="write the merged model to this new folder, as safetensors")
    add("--gguf", metavar="FILE", help="write this new file for Ollama and LM Studio, with llama.cpp's converter")
    add("--checkpoint", help="best, or a folder's name (default: the last weights)")
    parser.epilog = f"GGUF_CONVERTER names llama.cpp's {CONVERTER} (default: in PATH).\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> Answer:
    """Write the merged model, in bfloat16, with its tokenizer; the GGUF file; or both."""
    trained = from_run.read(args.run_dir, checkpoint=args.checkpoint)
    base, adapter = trained.models["trained"]
    if not (args.merge or args.gguf):
        raise UserError("export needs --merge DIR, --gguf FILE, or both")
    if adapter is None and args.merge:
        reason = "has nothing to merge: all weights were trained"
        raise ConfigError("merge", args.merge, reason, f"use {base} itself")
    for name, path, kind in (("merge", args.merge, "folder"), ("gguf", args.gguf, "file")):
        if path:
            require_new(name, path, kind)
    # A missing converter is reported before the merge, which takes minutes.
    converter = _converter(args.gguf) if args.gguf else ""
    with ExitStack() as stack:
        model = args.merge or base
        if args.gguf:
            parent = Path(args.gguf).parent
            parent.mkdir(parents=True, exist_ok=True)
            if adapter is not None and not args.merge:  # not in /tmp, which may be small
                model = stack.enter_context(TemporaryDirectory(prefix=".export-", dir=parent))
        if adapter is not None:
            _merge(base, adapter, model, trained.request.model_init_kwargs)
        if args.gguf:
            _convert(converter, model, args.gguf)
    written = {name: path for name, path in (("folder", args.merge), ("gguf", args.gguf)) if path}
    return Answer(written, "\n".join(f"{'merged' if name == 'folder' else name:8} {written[name]}" for name in written))


def _merge(base: str, adapter: str, target: str, model_init_kwargs: Mapping[str, Any]) -> None:
    # Stdout is for the answer, which --json makes a JSON object. DeepSpeed prints its accelerator there, if installed.
    with redirect_stdout(sys.stderr), loading(base, "weights"):
        from transformers import AutoTokenizer

        # A pickle could run anything while it is loaded.
        model = load_base(base, dtype="bfloat16", use_safetensors=True, **model_init_kwargs)
        # Adding an adapter to weights in 4 bit rounds most of it away.
        if getattr(model, "is_quantized", False):
            reason = f"is not possible: the base {base} is stored quantised"
            raise ConfigError("merge", target, reason, "use base and adapter side by side")
        # Training saved its tokenizer with the adapter; a script may not have.
        has_tokenizer = (Path(adapter) / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(adapter if has_tokenizer else base, trust_remote_code=False)
        ids = tokenizer(SAMPLE, return_tensors="pt").input_ids
        with transformers_bars(0), catch_warnings():
            # peft prints a page; the comparison says in one line if the merge is wrong.
            filterwarnings("ignore", ".*tie", UserWarning)
            model = load_adapter(model, adapter, base)
            trained = _logits(model, ids)
            with model.disable_adapter():
                untrained = _logits(model, ids)
            try:
                model.merge_and_unload().save_pretrained(target)
                # Two models at a time would need twice the memory.
                del model
                # As others load it: tied weights become one tensor then.
                merged = _logits(load_base(target, dtype="bfloat16"), ids)
                if difference := _difference(merged, trained, untrained):
                    remedy = "use base and adapter side by side, or train without the tied embeddings"
                    raise ConfigError("merge", target, difference, f"{remedy} (embed_tokens, lm_head)")
                tokenizer.save_pretrained(target)
            # After Ctrl-C too: a part of a model looks like a model.
            except BaseException:
                shutil.rmtree(target, ignore_errors=True)
                raise


def _logits(model: Any, ids: Any) -> Any:
    """Return the logits (T, V) of token ids (1, T), minus the mean of each row, in float32."""
    import torch

    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0].float()
    return logits - logits.mean(dim=-1, keepdim=True)


def _difference(merged: Any, trained: Any, untrained: Any) -> str | None:
    """Return how the logits of a merged model differ from those with its adapter if rounding does not explain it.

    >>> import torch
    >>> base, trained = torch.tensor([[4.0, -4.0]]), torch.tensor([[5.0, -5.0]])
    >>> _difference(trained * 1.01, trained, base)
    >>> _difference(base, trained, base)
    'gives another model than base and adapter: its logits differ by 1, and the adapter itself changes them by 1'
    """
    apart, effect = merged - trained, trained - untrained
    if apart.norm() <= max(ROUNDING * trained.norm(), effect.norm() / 4):
        return None
    sizes = (
        f"its logits differ by {apart.abs().max():.2g}, and the adapter itself changes them by {effect.abs().max():.2g}"
    )
    return f"gives another model than base and adapter: {sizes}"


def _converter(target: str) -> str:
    """Return the path of llama.cpp's converter. Raises `ConfigError` if the converter is missing."""
    path = os.environ.get("GGUF_CONVERTER") or shutil.which(CONVERTER)
    if not path or not Path(path).is_file():
        reason = f"needs {CONVERTER} of llama.cpp, which {'is not at ' + path if path else 'is not in PATH'}"
        remedy = "clone https://github.com/ggml-org/llama.cpp, and set GGUF_CONVERTER to that file"
        raise ConfigError("gguf", target, reason, remedy)
    return path


def _convert(converter: str, model: str, target: str) -> None:
    """Write a folder with a model as one GGUF file. Raises `UserError` with the converter's last line if it fails."""
    say("gguf", f"{converter} writes {target}")
    command = [sys.executable, converter, model, "--outfile", target, "--outtype", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not Path(target).is_file():
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        raise UserError(f"{converter} failed: {last}: correct that, or export --merge, and run the converter yourself")
