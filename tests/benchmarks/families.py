"""Which families of transformers' causal language models are packed: `python tests/benchmarks/families.py > table.md`.

Every family that a tiny random model can be made of is scored by TRL's method and by ours, in float32 on a CPU: the
table of docs/models.md. About half an hour; names of families as arguments run those alone.

Does not load weights: what only a trained checkpoint of a family has (another layer, a longer window) is not seen.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_families import compared, tiny_model

CLOSE = (1e-4, 1e-5)  # log-probs, gradient


class Said(logging.Handler):
    """The last reason that a trainer gave for not packing."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "pack_updates" in text:
            self.reason = text.partition(" has ")[2].partition("; rows are")[0]


def outcome(family: str, tokenizer: object, output: Said) -> tuple[str, str]:
    """One of packed, packed unpadded, plain, wrong, not tried; and why, or how close."""
    output.reason = ""
    try:
        model = tiny_model(family)
        with tempfile.TemporaryDirectory() as folder:
            packed, logps, gradient = compared(model, tokenizer, folder)
            figures, kind = f"{logps:.0e}, {gradient:.0e}", "packed" if packed else "plain"
            if not (logps <= CLOSE[0] and gradient <= CLOSE[1]):
                _, logps, gradient = compared(tiny_model(family), tokenizer, folder, prompts=(7, 7, 7))
                figures, kind = f"{logps:.0e}, {gradient:.0e}, but for padding, which TRL counts", f"{kind}, unpadded"
    except Exception as error:
        message = str(error).partition("\n")[0]
        return "not tried", f"{type(error).__name__}: {message[:80]}"
    close = logps <= CLOSE[0] and gradient <= CLOSE[1]
    return kind if close else "wrong", figures if packed or not close else output.reason


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils.logging import set_verbosity_error

    from grpo_math.generation.models import load_tokenizer, model_path

    set_verbosity_error()
    warnings.simplefilter("ignore")
    output = Said()
    logging.getLogger("grpo_math.trainer.scoring").addHandler(output)
    tokenizer = load_tokenizer(model_path("embedded"))
    rows: dict[str, list[str]] = {}
    for family in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        kind, why = outcome(family, tokenizer, output)
        print(f"{family}: {kind}: {why}", file=sys.stderr, flush=True)
        rows.setdefault(kind, []).append(f"| {family} | {kind} | {why} |")
    print("| family | | log-probs and gradient off by, or why not |\n|---|---|---|")
    print(
        "\n".join(
            line
            for kind in ("packed", "packed, unpadded", "plain", "wrong", "not tried")
            for line in rows.get(kind, [])
        )
    )


if __name__ == "__main__":
    main()
