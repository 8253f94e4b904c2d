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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpu_like.device import register

if __name__ == "__main__":  # before torch looks for a GPU, and in no process that goes on as itself
    register()
    from gpu_like.simulation import pretend

    pretend.install()

import torch
from gpu_like.simulation import device, generation
from gpu_like.simulation.live import Live
from gpu_like.simulation.model import folder_of, without_weights
from gpu_like.simulation.record import GENERATION, TRAINING
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.utils import logging

from grpo_math.planner.model import read_config
from grpo_math.settings import recipe
from grpo_math.trainer import build
from grpo_math.trainer.from_recipe import build as settings_from

STEPS, PARTS = 2, 2  # optimizer steps, and the parts of each that are computed: those after them are no larger
END, WORD = 1, "a"


def tokenizer() -> Any:
    """One word is one token."""
    words = {"<pad>": 0, "<end>": END, **{chr(ord(WORD) + n): 2 + n for n in range(4)}}
    whole = Tokenizer(models.WordLevel(words, unk_token=WORD))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<end>", padding_side="left")


def prompts(tokens: int, number: int = 4096) -> list[str]:
    """So many different texts of so many tokens.

    >>> prompts(3, 2)
    ['a a a', 'b a a']
    """
    digits = [[chr(ord(WORD) + (row >> 2 * position) % 4) for position in range(6)] for row in range(number)]
    return [" ".join([*row, *[WORD] * tokens][:tokens]) for row in digits]


def reward(completions: list[Any], **columns: Any) -> list[float | None]:
    return [float(number % 2) for number, _ in enumerate(completions)]


class Names(TrainerCallback):
    """Say which storages are gradients, and which the optimizer's state."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            self.live.name(parameter.grad, "gradients")

    def on_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for state in getattr(optimizer, "optimizer", optimizer).state.values():
            for value in state.values():
                self.live.name(value, "optimizer state")


def name_weights(live: Live, trainer: Any) -> None:
    """Parameters, buffers and what bitsandbytes keeps beside a 4-bit weight; the reference where it has a model."""
    for model, frozen in ((trainer.model, "weights"), (trainer.ref_model, "reference")):
        for module in model.modules() if model is not None else ():
            for parameter in module.parameters(recurse=False):
                adapter = hasattr(model, "peft_config") and parameter.requires_grad
                live.name(parameter, "adapter" if adapter else frozen)
            for buffer in module.buffers(recurse=False):
                live.name(buffer, frozen)
            if (state := getattr(module, "quant_state", None)) is not None:
                nested = (state.offset, *vars(state.state2).values()) if state.nested else ()
                for value in (state.absmax, state.code, *nested):
                    live.name(value, frozen)


def compute_few(trainer: Any) -> None:
    """Compute no more parts of a step than `PARTS`."""
    loss_of = trainer._loss_of
    done = [0] * STEPS
    largest: list[Any] = []

    def few(model: Any, rows: Any) -> Any:
        if not largest:  # the trial of the longest comes first
            largest.append(rows)
            return loss_of(model, rows)
        step = trainer.state.global_step
        done[step] += 1
        if done[step] > PARTS:
            return torch.zeros((), device=device.CUDA, requires_grad=True)
        # The largest part can come when gradients and the optimizer's state are there.
        comes = step > 0 and done[step] == min(2, done[0])
        return loss_of(model, largest[0] if comes else rows)

    trainer._loss_of = few


def settings_of(argv: list[str], folder: Path) -> Any:
    """The recipe's settings, with a folder that holds config.json in the model's place."""
    settings = settings_from(recipe.read([*argv, "--output_dir", str(folder / "run"), "--max_steps", str(STEPS)]))
    config, model = settings.config, settings.model
    shape = read_config(model.model_name_or_path, model.model_revision)
    model.model_name_or_path = str(folder_of(shape, folder))
    config.report_to, config.save_strategy, config.eval_strategy, config.disable_tqdm = [], "no", "no", True
    config.longest_first = True
    config.optim = type(config.optim)(config.optim.value.removeprefix("paged_"))  # paged state counts as on the GPU
    config.dataloader_pin_memory = config.log_completions = False
    return settings


def simulate(argv: list[str], prompt: int, folder: Path) -> Live:
    settings = settings_of(argv, folder)
    config, live = settings.config, Live()
    engine, config.use_vllm = config.use_vllm, False
    torch.cuda.empty_cache = live.emptied
    pretend.pretend_triton()
    rows = [{"prompt": text, "answer": "1"} for text in prompts(prompt)]
    without_weights()
    with device.FakeCuda(live.after):
        trainer: Any = build.trainer_of(config, settings.model, rows, tokenizer(), [reward])
        name_weights(live, trainer)
        trainer._grade = lambda *args: None
        generates, length = trainer._generate_single_turn, config.max_completion_length

        def made_up(prompts: list[list[int]], *others: Any) -> Any:
            if not engine:
                live.phase = GENERATION
                generation.generate(trainer, generates, prompts, *others)
                live.phase = TRAINING
            logps = [[0.0] * length for _ in prompts] if engine else None
            return [[device.TOKEN] * length for _ in prompts], logps

        trainer._generate_single_turn, trainer.use_vllm = made_up, engine
        compute_few(trainer)
        trainer.add_callback(Names(live))
        trainer.remove_callback(PrinterCallback)
        live.phase = TRAINING
        trainer.train()
    return live


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    extra, argv = parser.parse_known_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        answer = simulate(argv, extra.prompt_tokens, Path(folder)).record.answer()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
