"""Which families of transformers' causal language models are packed: `python tests/benchmarks/families.py > table.md`.

Every family that a tiny random model can be made of is scored by TRL's method and by ours, in float32 on a CPU: the
table of docs/reference.md. About half an hour; names of families as arguments run those alone.

Does not load weights: what only a trained checkpoint of a family has (another layer, a longer window) is not seen.
"""

import logging
import sys
import tempfile
import warnings
from logging.handlers import BufferingHandler
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_families import compared, tiny_model, try_first
from small_trainers import make
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import set_verbosity_error

from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

CLOSE = (1e-4, 1e-5)  # log-probs, gradient


def outcome(family: str, tokenizer: object, logged: BufferingHandler) -> tuple[str, str]:
    """One of packed, plain, either of them unpadded, wrong, not tried; and why, or how close."""
    logged.flush()
    try:
        for prompts in ((7, 3, 12), (7, 7, 7)):
            with tempfile.TemporaryDirectory() as folder:
                trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny_model(family), tokenizer, folder)
                try_first(trainer)
                packed, (logps, gradient) = trainer.grpo_math.scorer.packed is not None, compared(trainer, prompts)
            if close := logps <= CLOSE[0] and gradient <= CLOSE[1]:
                break
    except Exception as error:
        message = str(error).partition("\n")[0]
        return "not tried", f"{type(error).__name__}: {message[:80]}"
    figures = f"{logps:.0e}, {gradient:.0e}" + (
        ", except for padding, which TRL counts" if prompts == (7, 7, 7) else ""
    )
    kind = ("packed" if packed else "plain") + (", unpadded" if prompts == (7, 7, 7) else "")
    reasons = [text for record in logged.buffer if "pack_updates" in (text := record.getMessage())]
    reason = "".join(reasons[-1:]).partition(" has ")[2].partition("; rows are")[0]
    return kind if close else "wrong", figures if packed or not close else reason


def main() -> None:
    set_verbosity_error()
    warnings.simplefilter("ignore")
    logged = BufferingHandler(1_000_000)
    logging.getLogger("grpo_math.packing.scoring").addHandler(logged)
    tokenizer = load_tokenizer(model_path("embedded"))
    print("| family | | log-probs and gradient off by, or why not |\n|---|---|---|")
    for family in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        print(f"| {family} | {' | '.join(outcome(family, tokenizer, logged))} |", flush=True)


if __name__ == "__main__":
    main()
