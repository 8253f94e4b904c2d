"""Write the model card of a run: what was trained, on what data, the results, and how to use the model.

card.md is the template; all values come from the run directory. The same run always gives the same card.

Does not write to the network, and does not show text that a model wrote.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData, metadata_load
from yaml import YAMLError

from grpo_math.evaluation.tables import comparison_rows, moved
from grpo_math.generation.models import auto_class, config_file
from grpo_math.generation.request import Request, request_from
from grpo_math.generation.vllm_server import served_rank
from grpo_math.problems import contamination
from grpo_math.problems.prompts import PROBLEM, TEMPLATES, as_template
from grpo_math.problems.sources import SOURCES, hub_id, source_name
from grpo_math.report.outcome import outcome
from grpo_math.report.render import render
from grpo_math.report.run_dir import RunDir, hub_name
from grpo_math.system.reading import home, read_json

# The settings that make the recipe, in the order of the card; a run's config.yaml has all of them.
RECIPE = (
    *("loss_type", "baseline", "surrogate", "scale_rewards", "advantage_eps", "epsilon", "epsilon_high", "beta"),
    *("kl_estimator", "reference_refresh_steps", "num_iterations", "staleness", "resample_groups", "rewards"),
    *("reward_weights", "prompt_template", "system_prompt", "num_generations", "temperature", "top_p"),
    *("max_completion_length", "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay"),
    *("max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps", "num_processes"),
    *("distributed_type", "seed"),
)
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit")
# The files that are pushed in addition to the weights and the plots.
RESULTS = {
    "config.yaml": "every setting, the hardware, the versions, the command",
    "history.jsonl": "one line per step",
    "before.json": "the evaluation before training, answer by answer",
    "after.json": "the evaluation after training",
    "report.html": "all of it as one page: plots, findings, problems that changed, every completion",
}
QUESTION = "A baker sells 12 loaves at 3 dollars each. How many dollars is that?"


def trained_base(run: RunDir, base_model: str | None = None, api: Any = None) -> dict[str, Any]:
    """Return the model that was trained. ``base_model`` is its name on the Hub, if the run names a folder.

    ``hub`` is its name on the Hub if it is known, ``folder`` the last part of its path, ``card_data`` its licence and
    its own base, from the metadata of its card, ``class`` what loads it as it was trained.
    """
    name = str(run.config.get("model_name_or_path") or "unknown")
    hub, revision = base_model or hub_name(name), str(run.config.get("model_revision") or "main")
    card, data = home(name) / "README.md", None
    # The Hub's own answers (no such model, no access) are OSErrors: the card then has no licence.
    # A lost connection is not an OSError (httpx2). It ends the push, which needs the connection too.
    with suppress(ValueError, OSError, YAMLError):
        if card.is_file():
            data = metadata_load(card)
        elif hub and api is not None:
            data = api.model_info(hub, revision=None if revision == "main" else revision).card_data
    keys = ("license", "license_name", "license_link", "base_model")
    card_data = {key: value for key in keys if data and isinstance(value := data.get(key), str)}
    architectures = None
    with suppress(ValueError, OSError):
        architectures = read_json(config_file(name, revision, offline=True)).get("architectures")
    return {
        "hub": hub,
        "folder": Path(name).name,
        "revision": revision,
        "card_data": card_data,
        "class": auto_class(architectures),
    }


def result_files(run_dir: Path, checkpoint: str | None = None) -> dict[str, str]:
    """Return the `RESULTS` that a run has; for a checkpoint, without those of the last weights."""
    others = ("after.json", "report.html") if checkpoint else ()
    return {name: words for name, words in RESULTS.items() if name not in others and (run_dir / name).exists()}


def model_card(run: RunDir, repo_id: str, base: dict[str, Any], kind: str, checkpoint: str | None = None) -> str:
    """Return the card of ``kind`` adapter or model, as Markdown with its metadata at the top. ``checkpoint``: the name
    of the folder with the weights, if they are not the last ones."""
    evaluation, of_run = run.after or run.before, outcome(run)
    comparison = of_run.comparison
    settings = evaluation.settings if evaluation else {}
    dataset, evaluated = _name(run.config.get("dataset")), _name(evaluation and evaluation.data)
    template, system = str(run.config.get("prompt_template") or ""), run.config.get("system_prompt")
    # A function of the user cannot be printed in a card, so the example shows the bare problem.
    known = template if template in TEMPLATES or PROBLEM in template else PROBLEM
    names = [*RECIPE, *(LORA if kind != "model" else ())]
    overlap = contamination.overlap_line(evaluation.contamination) if evaluation and evaluation.contamination else ""
    request = replace(request_from(run.config), temperature=0.0)
    greedy = Request().for_vllm()
    served = {name: value for name, value in request.for_vllm().items() if value != greedy.get(name)}
    served |= {"chat_template_kwargs": request.template_kwargs} if request.template_kwargs else {}
    return render(
        "card.md",
        request=request,
        served=served,
        chat_arguments="".join(f", {name}={value!r}" for name, value in request.template_kwargs.items()),
        run=run,
        repo_id=repo_id,
        base=base,
        kind=kind,
        metadata=_metadata(run, repo_id, base, kind, dataset, evaluated),
        evaluation=evaluation,
        outcome=of_run,
        outcomes=comparison_rows(comparison) if comparison else [],
        moved=moved(comparison) if comparison else "",
        data=_link(dataset),
        evaluated=_link(evaluated),
        overlap=overlap.partition(": ")[2],
        findings=[finding for finding in of_run.findings if finding.level != "info"],
        recipe={name: run.config[name] for name in names if run.config.get(name) not in (None, False)},
        template=template if template in TEMPLATES else "",
        prompt=as_template(known, system if isinstance(system, str) else None).prompt(QUESTION),
        tokens=settings.get("max_new_tokens") or run.config.get("max_completion_length") or 256,
        start=_start(run.config.get("adapter")),
        rank=served_rank(int(run.config.get("lora_r") or 16)),
        checkpoint=checkpoint,
        files=result_files(run.directory, checkpoint),
        plots={path.stem for path in run.directory.glob("plots/*.png")},
    )


def _metadata(run: RunDir, repo_id: str, base: dict[str, Any], kind: str, dataset: str, evaluated: str) -> str:
    """Return the metadata that the Hub reads, in YAML."""
    lora = kind == "adapter"
    results = []
    if run.after:
        source = SOURCES.get(source_name(evaluated) or "")
        results = [
            EvalResult(
                task_type="text-generation",
                task_name="mathematics",
                dataset_type=source.hub if source else evaluated.partition(":")[0],
                dataset_name=evaluated,
                dataset_config=source.config if source else None,
                dataset_split=run.after.settings.get("split"),
                metric_type="accuracy",
                metric_name=f"accuracy of {run.after.summary.n} problems",
                metric_value=round(run.after.summary.accuracy.value, 4),
            )
        ]
    return ModelCardData(
        base_model=base["hub"],
        base_model_relation=("adapter" if lora else "finetune") if base["hub"] else None,
        datasets=sorted({name for name in map(hub_id, (dataset, evaluated)) if name}) or None,
        eval_results=results or None,
        library_name="peft" if lora else "transformers",
        # huggingface_hub refuses eval_results without a model_name.
        model_name=repo_id.rpartition("/")[2],
        pipeline_tag="text-generation",
        tags=["grpo", "math", "reinforcement-learning", "trl", "grpo_math", *(["lora"] if lora else [])],
        # The base's own base_model would replace the base of this run.
        **{key: value for key, value in base["card_data"].items() if key != "base_model"},
    ).to_yaml()


def _start(adapter: Any) -> str:
    """Return the adapter that was trained further, without the folders of this machine; or ""."""
    return f"`{hub_name(adapter) or Path(adapter).name}`" if adapter else ""


def _name(dataset: Any) -> str:
    """Return the name of a data set, without the folders of a local file."""
    name = str(dataset or "unknown")
    # The folders of this machine are private, and mean nothing to a reader of the card.
    return name if hub_id(name) or name.startswith("generated") else Path(name).name


def _link(dataset: str) -> str:
    if hub := hub_id(dataset):
        return f"[{hub}](https://huggingface.co/datasets/{hub})"
    return f"problems that grpo_math generates (`{dataset}`)" if dataset.startswith("generated") else f"`{dataset}`"
