"""Merge a LoRA adapter into its base: one model in safetensors.

Does not push (hub.py does), and merges nothing while training.
"""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from grpo_math.errors import ConfigError, first_line, one_of
from grpo_math.evaluation import of_run
from grpo_math.planner.model import read_config
from grpo_math.run.streams import Answer

DTYPES = ("bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="a finished run that trained an adapter")
    parser.add_argument("--merge", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--checkpoint", help="best, or a folder's name (default: the last weights)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")


def run(args: argparse.Namespace) -> Answer:
    """Answer `grpo-math export`."""
    folder = export(args.run_dir, args.merge, args.dtype, args.checkpoint)
    return Answer({"folder": str(folder)}, f"merged   {folder}")


def export(run_dir: str, folder: str, dtype: str = "bfloat16", checkpoint: str | None = None) -> Path:
    """Write the merged model of a finished run, with its tokenizer, into ``folder``.

    Raise `ConfigError` for a run without an adapter, a folder that is not empty, and a base that cannot be merged into.
    """
    one_of("dtype", dtype, DTYPES)
    run, target = of_run.read(run_dir, checkpoint=checkpoint), Path(folder)
    model, adapter = run.trained
    if adapter is None:
        raise ConfigError("merge", folder, "has nothing to merge: all weights were trained", f"use {model} itself")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("merge", folder, "is not empty", "name a new folder")
    merge(run.base, "main", adapter, target, dtype)
    # Training saved its tokenizer with the adapter; a script may not have.
    saved = (Path(adapter) / "tokenizer_config.json").exists()
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(adapter if saved else run.base, trust_remote_code=False).save_pretrained(target)
    return target


def merge(name: str, revision: str, adapter: str | Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Write the weights of base ``name`` with the adapter added."""
    remedy = "push the adapter alone"
    if read_config(name, revision).get("quantization_config"):
        reason = f"({name}) is stored quantised, and cannot take an adapter into its weights"
        raise ConfigError("merge", True, reason, remedy)
    with redirect_stdout(sys.stderr):  # DeepSpeed, if it is installed, prints its accelerator
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        try:
            base = AutoModelForCausalLM.from_pretrained(
                name, revision=revision, trust_remote_code=False, dtype=dtype, use_safetensors=True
            )
        except OSError as error:
            reason = f"needs the base {name}, which cannot be loaded ({first_line(error)})"
            raise ConfigError("merge", True, reason, remedy) from None
        PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(folder)
