"""Answer `grpo-math export`: merge a run's LoRA adapter into its base, as one model in safetensors."""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from grpo_math.errors import ConfigError
from grpo_math.evaluation import from_run
from grpo_math.generation.models import load_adapter, load_base, loading
from grpo_math.system.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="a finished run that trained an adapter")
    parser.add_argument("--merge", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument("--checkpoint", help="best, or a folder's name (default: the last weights)")


def run(args: argparse.Namespace) -> Answer:
    """Write the merged model, in bfloat16, with its tokenizer."""
    trained = from_run.read(args.run_dir, checkpoint=args.checkpoint)
    base, adapter = trained.models["trained"]
    if adapter is None:
        reason = "has nothing to merge: all weights were trained"
        raise ConfigError("merge", args.merge, reason, f"use {base} itself")
    if Path(args.merge).exists():
        raise ConfigError("merge", args.merge, "exists", "name a new folder")
    # Stdout is for the answer, which --json makes a JSON object. DeepSpeed prints its accelerator there, if installed.
    with redirect_stdout(sys.stderr), loading(base, "weights"):
        from transformers import AutoTokenizer

        # A pickle could run anything while it is loaded.
        model = load_base(base, dtype="bfloat16", use_safetensors=True, **trained.request.model_init_kwargs)
        # Adding an adapter to weights in 4 bit rounds most of it away.
        if getattr(model, "is_quantized", False):
            reason = f"is not possible: the base {base} is stored quantised"
            raise ConfigError("merge", args.merge, reason, "use base and adapter side by side")
        load_adapter(model, adapter, base).merge_and_unload().save_pretrained(args.merge)
        # Training saved its tokenizer with the adapter; a script may not have.
        has_tokenizer = (Path(adapter) / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(adapter if has_tokenizer else base, trust_remote_code=False)
        tokenizer.save_pretrained(args.merge)
    return Answer({"folder": args.merge}, f"merged   {args.merge}")
