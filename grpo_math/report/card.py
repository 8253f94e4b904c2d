"""A run -> the model card of its repository: what was trained, on what, the results, and how to use it.

card.md is the text; all of it comes from the run directory. The same run gives the same card, letter for letter.

Does not write to the network, and does not show what the model wrote.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_math.evaluation.compare import Results, share
from grpo_math.generation.server import served_rank
from grpo_math.planner.model import is_folder
from grpo_math.problems import contamination
from grpo_math.problems.prompts import PROBLEM, TEMPLATES, as_template
from grpo_math.problems.sources import SOURCES, hub_id, source_of
from grpo_math.reading import home
from grpo_math.report.page import diagnosis, paired_of
from grpo_math.report.render import render
from grpo_math.report.run_dir import Run
from grpo_math.report.terminal import moved, table
from grpo_math.run import metrics

# The settings that make the recipe, in the order of the card; a run's config.yaml has all of them.
RECIPE = (
    *("loss_type", "baseline", "surrogate", "scale_rewards", "advantage_eps", "epsilon", "epsilon_high", "beta"),
    *("kl_estimator", "reference_refresh_steps", "num_iterations", "staleness", "resample_groups", "rewards"),
    *("reward_weights", "prompt_template", "system_prompt", "num_generations", "temperature", "top_p"),
    *("max_completion_length", "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay"),
    *("max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps", "num_processes"),
    *("distributed_type", "difficulty_band", "curriculum", "seed"),
)
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit")
# What is pushed besides the weights and the plots.
RESULTS = {
    "config.yaml": "every setting, the hardware, the versions, the command",
    "history.jsonl": "one line a step",
    "before.json": "the evaluation before training, answer by answer",
    "after.json": "the one after training",
    "report.html": "all of it as one page: plots, findings, problems that changed, every completion",
}
LOCAL = re.compile(r"'((?:/|~/|\.\./)[^']*)'|(?<![^\s=])((?:/|~/|\.\./)[^\s'`]*)")  # a path, within quotes or not
ASKED = "A baker sells 12 loaves at 3 dollars each. How many dollars is that?"


class Base(NamedTuple):
    """The model that was trained: its name on the Hub if it is known, its folder's name, its revision, and its licence
    as in the metadata of its card."""

    hub: str | None
    folder: str
    revision: str = "main"
    licence: Mapping[str, Any] = MappingProxyType({})


def base_of(config: dict[str, Any], stated: str | None = None) -> Base:
    """Return the base of a run by its settings; ``stated`` is its name on the Hub, if the run names a folder.

    >>> base_of({"model_name_or_path": "Qwen/Qwen2.5-1.5B"}).hub
    'Qwen/Qwen2.5-1.5B'
    >>> base_of({"model_name_or_path": "/cache/models--Qwen--Qwen2.5-1.5B/snapshots/8faed761d45a"}).hub
    'Qwen/Qwen2.5-1.5B'
    >>> base_of({"model_name_or_path": "./models/mine"})
    Base(hub=None, folder='mine', revision='main', licence=mappingproxy({}))
    """
    name = str(config.get("model_name_or_path") or "unknown")
    revision, folder = str(config.get("model_revision") or "main"), Path(name).name
    if cached := re.search(r"models--([^/]+?)--([^/]+)/snapshots/(\w+)", name):
        stated = stated or f"{cached[1]}/{cached[2]}"
    return Base(stated or (None if is_folder(name) else name), folder, revision)


def licence_of(run: Run, base: Base, api: Any = None) -> dict[str, Any]:
    """Return the base's licence from its own card, in its folder or on the Hub; {} if it is not known."""
    from huggingface_hub import metadata_load

    name = str(run.config.get("model_name_or_path"))
    card, data = home(name) / "README.md", {}
    try:
        if is_folder(name) and card.exists():
            data = metadata_load(card) or {}
        elif base.hub and api is not None:
            revision = None if base.revision == "main" else base.revision
            found = api.model_info(base.hub, revision=revision).card_data
            data = found.to_dict() if found else {}
    except (ValueError, OSError):  # huggingface_hub's own errors are OSErrors
        return {}
    return {key: data[key] for key in ("license", "license_name", "license_link") if isinstance(data.get(key), str)}


def model_card(run: Run, repo_id: str, base: Base, kind: str) -> str:
    """Return the card of ``kind`` adapter, model or merged, as Markdown with its metadata at the top."""
    paired, after = paired_of(run), run.after or run.before or {}
    findings = [finding for finding in diagnosis(run, paired) if finding.level != "info"]
    names = [*RECIPE, *(LORA if kind != "model" else ())]
    recipe = {name: run.config[name] for name in names if run.config.get(name) not in (None, False)}
    return render(
        "card.md",
        run=run,
        repo_id=repo_id,
        base=base,
        kind=kind,
        metadata=_metadata(run, repo_id, base, kind),
        quantised=_quantised(run),
        paired=paired,
        after=after,
        share=share,
        outcomes=table(run.before, run.after, paired) if run.before and run.after and paired else None,
        moved=moved(run.before, paired) if run.before and paired else "",
        data=_link(_name(run.config.get("dataset"))),
        evaluated=_link(_evaluated(run)),
        sampling=_sampling(after),
        overlap=_overlap(after),
        findings=findings,
        recipe={name: _value(value) for name, value in recipe.items()},
        last_step=int(run.history[-1][metrics.STEP]) if run.history else 0,
        command=_typed(str(run.config.get("command") or ""), base),
        results={name: words for name, words in RESULTS.items() if (run.directory / name).exists()},
        plots={path.stem for path in run.directory.glob("plots/*.png")},
        **_use(run, after),
    )


def _metadata(run: Run, repo_id: str, base: Base, kind: str) -> str:
    """Return the metadata that the Hub reads, in YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    lora, results = kind == "adapter", []
    if run.after and not (kind == "merged" and _quantised(run)):
        evaluated = _evaluated(run)
        source = SOURCES.get(source_of(evaluated) or "")
        result = EvalResult(
            task_type="text-generation",
            task_name="mathematics",
            dataset_type=source.hub if source else evaluated.partition(":")[0],
            dataset_name=evaluated,
            dataset_config=source.config if source else None,
            dataset_split=run.after.get("split"),
            metric_type="accuracy",
            metric_name=f"accuracy of {_count(run.after)} problems, {_sampling(run.after)}",
            metric_value=round(share(run.after), 4),
        )
        results.append(result)
    known = {name for name in map(hub_id, (_name(run.config.get("dataset")), _evaluated(run))) if name}
    data = ModelCardData(
        base_model=base.hub,
        base_model_relation=("adapter" if lora else "finetune") if base.hub else None,
        datasets=sorted(known) or None,
        eval_results=results or None,
        library_name="peft" if lora else "transformers",
        model_name=repo_id.rpartition("/")[2],
        pipeline_tag="text-generation",
        tags=["grpo", "math", "reinforcement-learning", "trl", "grpo_math", *(["lora"] if lora else [])],
        **base.licence,
    )
    return data.to_yaml()


def _use(run: Run, after: Results) -> dict[str, Any]:
    """Return the values of the part that says how to use the model: a prompt as in training, and its settings."""
    template, system = str(run.config.get("prompt_template") or ""), run.config.get("system_prompt")
    known = template if template in TEMPLATES or PROBLEM in template else PROBLEM  # a function is not in the card
    first = next(iter(after.get("rows") or [{}])).get("problem")
    problem = first if isinstance(first, str) and 0 < len(first) <= 300 else ASKED
    prompt: Any = as_template(known, system if isinstance(system, str) else None).prompt(problem)
    tokens = after.get("max_new_tokens") or run.config.get("max_completion_length") or 256
    chat = isinstance(prompt, list)
    lines = [f"    {json.dumps(message, ensure_ascii=False)}," for message in prompt] if chat else []
    asked = {"messages" if chat else "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return {
        "template": template if template in TEMPLATES else "",
        "chat": chat,
        "tokens": tokens,
        "prompt": "\n".join(["[", *lines, "]"]) if chat else repr(prompt),
        "asked": json.dumps(asked, ensure_ascii=False)[1:].replace("'", "'\\''"),
        "rank": served_rank(int(run.config.get("lora_r") or 16)),
        "quantisation": _quantisation(run.config),
    }


def _typed(command: str, base: Base) -> str:
    """Return the command as another can type it: of a local path only its last part, or the base's name on the Hub.

    >>> _typed("grpo_math.train --config /data/me/a.yaml --dataset=../b.jsonl --seed 1", Base("me/base", "base"))
    'python -m grpo_math.train --config a.yaml --dataset=b.jsonl --seed 1'
    >>> _typed("python /data/me/sums.py --model /data/base", Base("me/base", "base"))
    'python sums.py --model me/base'
    >>> _typed("grpo_math.train --config '/data/my own/a b.yaml' --hub_token ***", Base("me/base", "base"))
    "python -m grpo_math.train --config 'a b.yaml' --hub_token ***"
    """

    def last(found: re.Match[str]) -> str:
        name = Path(found[1] or found[2]).name
        return base.hub if base.hub and name == base.folder else shlex.quote(name)

    shown = LOCAL.sub(last, command)
    return shown if not shown or shown.startswith("python ") else f"python -m {shown}"


def _evaluated(run: Run) -> str:
    results = run.after or run.before or {}
    return _name(results.get("data") or run.config.get("eval_dataset") or run.config.get("dataset"))


def _name(dataset: Any) -> str:
    """Return the name of a data set, without the folders that a file of the user's is in."""
    name = str(dataset or "unknown")
    return name if hub_id(name) or name.startswith("generated") else Path(name).name


def _link(dataset: str) -> str:
    if hub := hub_id(dataset):
        return f"[{hub}](https://huggingface.co/datasets/{hub})"
    generated = dataset.partition(":")[0] == "generated"
    return f"problems that grpo_math generates (`{dataset}`)" if generated else f"`{dataset}`"


def _count(results: Results) -> int:
    return len({str(row["id"]) for row in results["rows"]})


def _sampling(results: Results) -> str:
    samples, temperature = results.get("samples", 1), results.get("temperature", 0)
    return f"{samples} samples each at temperature {temperature:g}" if temperature else "greedy"


def _overlap(results: Results) -> str:
    """Return what is known of problems that were also trained on, as a sentence."""
    words = contamination.text_of(results["contamination"]).partition(": ")[2] if results.get("contamination") else ""
    return f" {words[:1].upper()}{words[1:]}." if words else ""


def _quantised(run: Run) -> bool:
    return bool(run.config.get("load_in_4bit") or run.config.get("load_in_8bit"))


def _quantisation(config: dict[str, Any]) -> str:
    if not config.get("load_in_4bit"):
        return "BitsAndBytesConfig(load_in_8bit=True)"
    kind, nested = config.get("bnb_4bit_quant_type") or "nf4", bool(config.get("use_bnb_nested_quant"))
    return (
        f'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{kind}", '
        f'bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant={nested})'
    )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
