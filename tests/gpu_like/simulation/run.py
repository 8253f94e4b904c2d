"""Two steps of a recipe's own trainer at full size on a GPU that is pretended: what a plan is checked against.

    python tests/gpu_like/simulation/run.py --config RECIPE [--FIELD VALUE ...] [--prompt-tokens N]

prints what was live and reserved, as JSON. Takes minutes, and neither weights nor memory.

It needs a separate process, because it changes torch for good. One process and one GPU, without DeepSpeed, FSDP or
8 bit. Completions are made up, at full length, and rewards, so that every group has a signal.

Does not train, grade or sample, and reads no weights.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpu_like.device import load

if __name__ == "__main__":  # before torch looks for a GPU, and in no process that goes on as itself
    load()

import torch
from gpu_like import tensors
from gpu_like.simulation import device, generation
from gpu_like.simulation.model import without_weights
from gpu_like.simulation.record import GENERATION, TRAINING, Record
from small_trainers import save_small
from transformers import AutoTokenizer, PrinterCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from grpo_math.algorithm.losses import Loss
from grpo_math.planner.model import read_config
from grpo_math.settings import recipe
from grpo_math.trainer import build
from grpo_math.trainer.recipe_settings import build as settings_from

STEPS, PARTS = 2, 2  # optimizer steps, and the parts of each that are computed: those after them are no larger


def prompts(tokens: int) -> list[str]:
    """4,096 different texts of so many characters, each of which is a token of `small_trainers.save_small`."""
    return ["".join(letters).ljust(tokens, "a")[:tokens] for letters in product("abcd", repeat=6)]


def reward(completions: list[Any], **columns: Any) -> list[float | None]:
    return [float(number % 2) for number, _ in enumerate(completions)]


def compute_few(trainer: Any) -> None:
    """Compute no more parts of a step than `PARTS`."""
    loss_of = trainer.grpo_math.updates.loss_of
    done = [0] * STEPS
    largest: list[Any] = []

    def few(model: Any, rows: Any, optimizer_step: Any) -> Any:
        if not largest:  # the trial of the longest comes first
            largest.append(rows)
            return loss_of(model, rows, optimizer_step)
        step = trainer.state.global_step
        done[step] += 1
        if done[step] > PARTS:
            zero = torch.zeros((), device="cuda", requires_grad=True)
            return Loss(zero, zero.detach(), torch.zeros(2, device="cuda"), {})
        # The largest part can come when gradients and the optimizer's state are there.
        if step > 0 and done[step] == min(2, done[0]):
            # Without metrics, which are of other rows than those of this part.
            return loss_of(model, largest[0], optimizer_step)._replace(metrics={})
        return loss_of(model, rows, optimizer_step)

    trainer.grpo_math.updates.loss_of = few


def settings_of(argv: list[str], folder: Path) -> Any:
    """The recipe's settings, with a folder that holds config.json in the model's place."""
    fixed = [f"--output_dir={folder / 'run'}", f"--max_steps={STEPS}", "--report_to=none", "--save_strategy=no"]
    fixed += ["--eval_strategy=no", "--disable_tqdm=true", "--longest_first=true", "--log_completions=false"]
    settings = settings_from(recipe.read([*argv, *fixed, "--dataloader_pin_memory=false"]))
    config, model = settings.config, settings.model
    shape = read_config(model.model_name_or_path, model.model_revision)
    shape["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape["model_type"]]]
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    model.model_name_or_path = str(folder)
    config.optim = type(config.optim)(config.optim.value.removeprefix("paged_"))  # paged state counts as on the GPU
    return settings


def simulate(argv: list[str], prompt: int, folder: Path) -> Record:
    settings = settings_of(argv, folder)
    config, record = settings.config, Record()
    engine, config.use_vllm = config.use_vllm, False
    save_small(folder / "small")
    tokenizer = AutoTokenizer.from_pretrained(folder / "small")
    device.install()
    without_weights()
    tensors.heard = record.heard
    torch.cuda.empty_cache = lambda: record.happened(0)
    rows = [{"prompt": text, "answer": "1"} for text in prompts(prompt)]
    trainer: Any = build.build_trainer(config, settings.model, rows, tokenizer, [reward])
    trainer.grpo_math.grader.grade = lambda *args: None
    generates, length = trainer._generate_single_turn, config.max_completion_length

    def made_up(prompts: list[list[int]], *others: Any) -> Any:
        if not engine:
            record.phase = GENERATION
            generation.generate(trainer, generates, prompts, *others)
            record.phase = TRAINING
        logps = [[0.0] * length for _ in prompts] if engine else None
        return [[device.TOKEN] * length for _ in prompts], logps

    trainer._generate_single_turn, trainer.use_vllm = made_up, engine
    compute_few(trainer)
    trainer.remove_callback(PrinterCallback)
    record.phase = TRAINING
    trainer.train()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    extra, argv = parser.parse_known_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        answer = simulate(argv, extra.prompt_tokens, Path(folder)).answer()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
