"""Build the trainer of a recipe from model, tokenizer, adapter and rows.

settings/rules.py and checks/ check settings, and train/program.py chooses the problems.
"""

from typing import Any

from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, PeftModel
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from grpo_math.generation.dtypes import fast_dtype, number_formats
from grpo_math.generation.models import explain_weight_errors, load_adapter, model_path, refuse_expert_dropout
from grpo_math.redact import without_secrets
from grpo_math.rewards.inputs import Reward
from grpo_math.run.bar import transformers_bars
from grpo_math.run.weights import checkpoint_kinds
from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.start_adapter import FILES, adapter_folder
from grpo_math.system.replaced import replaced
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.console import replace_printers
from grpo_math.trainer.trainer import MathGRPOTrainer
from grpo_math.trainer.trainer_parts import Program


def build_trainer(
    config: MathGRPOConfig,
    model_args: ModelConfig,
    rows: Any,
    tokenizer: Any,
    rewards: list[Reward],
    adapter: str | None = None,
) -> MathGRPOTrainer:
    """Return the trainer of a recipe, with its weights loaded.

    ``rows``: a list of problems or a `datasets.Dataset`. ``adapter``: an adapter that is trained further.
    """
    path = model_path(model_args.model_name_or_path)
    stated = {"dtype": model_args.dtype, "use_peft": model_args.use_peft, "bf16": config.bf16, "fp16": config.fp16}
    model_args.dtype = number_formats(
        RunSettings(stated), fast_dtype(config.use_cpu), has_copy=bool(checkpoint_kinds(config))
    ).dtype
    options: Any = config.model_init_kwargs or {}
    config.model_init_kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        **options,
    }
    quantisation = get_quantization_config(model_args)
    how: dict[str, Any] = {"peft_config": get_peft_config(model_args), "quantization_config": quantisation}
    with explain_weight_errors(path, options):
        model: Any = path
        if adapter:
            model, how = load_to_train(path, adapter, config, model_args.lora_dropout, quantisation), {}
        # transformers refuses an eval_strategy without a data set, and the held-out sets are no data set of the
        # trainer. TRL warns about arguments of a model that is loaded already.
        replaces = {"eval_strategy": "no", **({"model_init_kwargs": None} if adapter else {})}
        try:
            with replaced(config, **replaces):
                trainer = MathGRPOTrainer(
                    model=model,
                    reward_funcs=rewards,
                    args=config,
                    train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
                    processing_class=tokenizer,
                    **how,
                )
        except ValueError as error:
            refuse_expert_dropout(str(error), str(path))
            raise
    trainer.grpo_math.program = Program(is_recipe=True)
    replace_printers(trainer)
    # transformers sends the training arguments to trackers.
    config.model_init_kwargs = without_secrets(config.model_init_kwargs)
    return trainer


def load_to_train(path: str, adapter: str, config: MathGRPOConfig, dropout: float, quantisation: Any) -> PeftModel:
    """Return a model with an adapter that is trained further. The base is loaded as TRL loads it by its name.

    ``quantisation``: transformers' configuration, or None.
    """
    given: Any = config.model_init_kwargs
    options, plugin = {**given, "trust_remote_code": False}, config.deepspeed_plugin
    if quantisation:
        options["quantization_config"] = quantisation
    if config.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    folder = str(adapter_folder(adapter, FILES))
    peft_config = LoraConfig.from_pretrained(folder)
    # The folder may come from another machine, which had the base elsewhere.
    peft_config.base_model_name_or_path, peft_config.lora_dropout = path, dropout
    # As TRL for a new adapter: ZeRO-3 needs one dtype.
    one_dtype = plugin is not None and plugin.zero_stage == 3 and not quantisation
    with transformers_bars(int(PartialState().is_main_process)):
        base = create_model_from_path(path, **options)
    return load_adapter(base, folder, path, is_trainable=True, config=peft_config, autocast_adapter_dtype=not one_dtype)
