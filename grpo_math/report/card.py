"""A run -> the model card of its repository: what was trained, on what, what it came to, and how to use it.

All of it comes from the run directory; the base's licence is asked for by hub.py. The same run gives the same card,
letter for letter, so that a push that is tried again has nothing new to upload.

Does not write to the network, and does not show what the model wrote.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_math.evaluation.compare import share
from grpo_math.evaluation.stats import PairedDifference
from grpo_math.generation.models import EMBEDDED, EMBEDDED_ON_HUB
from grpo_math.generation.server import served_rank
from grpo_math.planner.model import is_folder
from grpo_math.problems import contamination
from grpo_math.problems.prompts import TEMPLATES
from grpo_math.problems.sources import SOURCES, hub_id, source_of
from grpo_math.report.page import diagnosis, paired_of
from grpo_math.report.run_dir import Run, mapping
from grpo_math.report.terminal import moved, table
from grpo_math.run import metrics
from grpo_math.run.history import number

KINDS = {"adapter": "LoRA adapter", "model": "full model", "merged": "full model, base and LoRA adapter merged,"}
# The settings that make the recipe, in the order of the card; a run's config.yaml has all of them.
RECIPE = (
    *("loss_type", "baseline", "surrogate", "scale_rewards", "advantage_eps", "epsilon", "epsilon_high", "beta"),
    *("kl_estimator", "reference_refresh_steps", "num_iterations", "staleness", "resample_groups", "rewards"),
    *("reward_weights", "template", "num_generations", "temperature", "top_p", "max_completion_length"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes", "distributed_type"),
    *("difficulty_band", "curriculum", "seed"),
)
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit")
# What is pushed beside the weights and the plots, where it is there.
RESULTS = {
    "config.yaml": "every setting, the hardware, the versions, the command",
    "history.jsonl": "one line a step",
    "before.json": "the evaluation before training, answer by answer",
    "after.json": "the one after training",
    "report.html": "all of it as one page: plots, findings, problems that changed, every completion",
}
PLOTS = {"training": "reward, accuracy and loss by step", "details": "more of them: entropy, lengths, time, memory"}
LOCAL = re.compile(r"'((?:/|~/|\.\./)[^']*)'|(?<![^\s=])((?:/|~/|\.\./)[^\s'`]*)")  # a path, within quotes or not
ASKED = "A baker sells 12 loaves at 3 dollars each. How many dollars is that?"


class Base(NamedTuple):
    """The model that was trained: its name on the Hub (None: not known), its folder's name, its revision, its licence
    as a card's metadata has it ({}: not known)."""

    hub: str | None
    folder: str
    revision: str = "main"
    licence: Mapping[str, Any] = MappingProxyType({})

    @property
    def shown(self) -> str:
        return f"[{self.hub}](https://huggingface.co/{self.hub})" if self.hub else f"`{self.folder}`, a local folder"


def base_of(config: dict[str, Any], stated: str | None = None) -> Base:
    """The base of a run by its settings; ``stated`` is its name on the Hub, where the run names a folder.

    >>> base_of({"model_name_or_path": "Qwen/Qwen2.5-1.5B"}).hub
    'Qwen/Qwen2.5-1.5B'
    >>> base_of({"model_name_or_path": "/cache/models--Qwen--Qwen2.5-1.5B/snapshots/8faed761d45a"}).hub
    'Qwen/Qwen2.5-1.5B'
    >>> base_of({"model_name_or_path": "./models/mine"})
    Base(hub=None, folder='mine', revision='main', licence=mappingproxy({}))
    """
    name = str(config.get("model_name_or_path") or "unknown")
    revision = str(config.get("model_revision") or "main")
    folder = Path(name).name
    if stated:
        return Base(stated, folder, revision)
    if name == EMBEDDED:
        return Base(EMBEDDED_ON_HUB, "smollm2-135m-instruct", revision)
    if cached := re.search(r"models--([^/]+?)--([^/]+)/snapshots/(\w+)", name):
        return Base(f"{cached[1]}/{cached[2]}", folder, revision)
    return Base(None if is_folder(name) else name, folder, revision)


def model_card(run: Run, repo_id: str, base: Base, kind: str) -> str:
    """The card of ``kind`` adapter, model or merged, as Markdown with its metadata at the top."""
    paired = paired_of(run)
    parts = [_opening(run, base, kind), _results(run, paired, kind), _use(run, repo_id, base, kind)]
    parts += [_training(run, base, kind), _plots(run), _findings(run, paired), _licence(base), _files(run, kind)]
    head = f"---\n{_metadata(run, repo_id, base, kind)}\n---\n\n# {repo_id.rpartition('/')[2]}"
    return "\n\n".join([head, *filter(None, parts)]) + "\n"


# The metadata that the Hub reads


def _metadata(run: Run, repo_id: str, base: Base, kind: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    lora = kind == "adapter"
    known = {name for name in map(hub_id, (_data(run), _evaluated(run))) if name}
    results = []
    if run.after and not (kind == "merged" and _quantised(run)):
        source = SOURCES.get(source_of(_evaluated(run)) or "")
        words = f"accuracy of {len(_problems(run.after))} problems, {_sampling(run.after)}"
        results.append(
            EvalResult(
                task_type="text-generation",
                task_name="mathematics",
                dataset_type=source.hub if source else _evaluated(run).partition(":")[0],
                dataset_name=_evaluated(run),
                dataset_config=source.config if source else None,
                dataset_split=run.after.get("split"),
                metric_type="accuracy",
                metric_name=words,
                metric_value=round(share(run.after), 4),
            )
        )
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


# The parts of the card


def _opening(run: Run, base: Base, kind: str) -> str:
    data = _data_link(_data(run))
    text = f"A {KINDS[kind]} of {base.shown}, trained with GRPO on {data} by grpo_math, a plugin on TRL."
    if run.config.get("model_name_or_path") == EMBEDDED:
        text += (
            "\n\nThe base that was trained is a 4-bit version of these weights, read back into bfloat16. On the "
            "published weights the figures below will differ a little."
        )
    if kind == "merged":
        figures = "The figures below are of base and adapter side by side; merging rounds."
        if _quantised(run):
            trained = "The adapter was trained on the base in 4 bit"
            figures = f"{trained}: the figures below are of that model, and not of this one."
        text += f"\n\nThe weights are the base's in bfloat16 with the adapter added. {figures}"
    return text


def _results(run: Run, paired: PairedDifference | None, kind: str) -> str:
    after = run.after or run.before
    if after is None:
        return "## Results\n\nThis run holds no evaluation."
    n = len(_problems(after))
    about = f"Evaluated on {n} held-out problems: {_data_link(_evaluated(run))}"
    if after.get("split"):
        about += f", split `{after['split']}`"
    about += f"; {_sampling(after)}, at most {after.get('max_new_tokens')} tokens, template `{after.get('template')}`."
    if overlap := after.get("contamination"):
        said = contamination.text_of(overlap).partition(": ")[2]
        about += f" {said[:1].upper()}{said[1:]}."
    about += (
        " Accuracy counts a right answer in whatever form; in format, one that stands where the prompt asks for it."
    )
    if run.before and run.after and paired:
        text = (
            f"**{share(run.before):.1%} before, {share(run.after):.1%} after: {100 * paired.difference:+.1f} points**, "
            f"95% paired interval {100 * paired.lo:+.1f} to {100 * paired.hi:+.1f}, n = {n}."
        )
        if paired.lo <= 0 <= paired.hi:
            text += " The interval holds zero: no clear change."
        body = f"{_table(table(run.before, run.after, paired), right=True)}\n\n{moved(run.before, paired)}."
    else:
        lo, hi = after.get("ci95") or (None, None)
        interval = f", 95% interval {lo:.1%} to {hi:.1%}" if isinstance(lo, float) and isinstance(hi, float) else ""
        when = "after" if run.after else "before"
        text = f"**{share(after):.1%} {when} training**{interval}, n = {n}."
        body = "There is no evaluation of the same problems before training to compare it with." if run.after else ""
    return "\n\n".join(part for part in (f"## Results\n\n{text}", about, body) if part)


def _training(run: Run, base: Base, kind: str) -> str:
    config, last = run.config, run.history[-1] if run.history else {}
    facts = [
        ["base model", base.shown + ("" if base.revision == "main" else f", revision `{base.revision}`")],
        ["training data", f"{_data_link(_data(run))}, split `{config.get('dataset_split')}`"],
        ["steps", f"{last.get(metrics.STEP, 0):.0f}"],
        ["hardware", _hardware(config)],
        ["software", _software(mapping(config.get("versions")))],
    ]
    names = [*RECIPE, *(LORA if kind != "model" else ())]
    said = {name: value for name in names if (value := config.get(name)) is not None and value is not False}
    recipe = [[f"`{name}`", _value(value)] for name, value in said.items()]
    parts = [
        "## Training",
        _table([["", ""], *facts]),
        f"<details><summary>The recipe, {len(recipe)} settings; all of them are in config.yaml</summary>",
        _table([["setting", "value"], *recipe]),
        "</details>",
    ]
    if command := config.get("command"):
        n = config.get("num_processes", 1)
        words = "The command:" if n == 1 else f"The command, on {n} processes that `accelerate launch` started:"
        parts += [words, _fence("bash", _typed(str(command), base))]
    return "\n\n".join(parts)


def _typed(command: str, base: Base) -> str:
    """The command as another can type it: of a path of the machine that trained only the last part, or the Hub's name.

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

    said = LOCAL.sub(last, command)
    return said if said.startswith("python ") else f"python -m {said}"


def _plots(run: Run) -> str:
    there = {name: words for name, words in PLOTS.items() if (run.directory / "plots" / f"{name}.png").exists()}
    images = {name: f"![{words}](plots/{name}.png)" for name, words in there.items()}
    if "details" in images:
        images["details"] = f"<details><summary>More plots</summary>\n\n{images['details']}\n\n</details>"
    return "\n\n".join(images.values())


def _findings(run: Run, paired: PairedDifference | None) -> str:
    found = [finding for finding in diagnosis(run, paired) if finding.level != "info"]
    lines = "\n".join(f"- {finding.level}: {_cell(finding.message)}" for finding in found)
    return f"What the diagnosis of the run found:\n\n{lines}" if found else ""


def _use(run: Run, repo_id: str, base: Base, kind: str) -> str:
    name, path, adapter = repo_id.rpartition("/")[2], base.hub or "PATH_OF_THE_BASE", kind == "adapter"
    quantised = adapter and _quantised(run)
    after = run.after or run.before or {}
    template = str(run.config.get("template") or "")
    own = [{"role": "user", "content": _asked(after)}]  # of a script, whose prompts are its own
    prompt = TEMPLATES[template](_asked(after)) if template in TEMPLATES else own
    tokens = after.get("max_new_tokens") or run.config.get("max_completion_length") or 256
    asked, inputs, where = repr(prompt), 'tokenizer(prompt, return_tensors="pt")', "completions"
    if chat := isinstance(prompt, list):
        asked = "\n".join(["[", *(f"    {json.dumps(message, ensure_ascii=False)}," for message in prompt), "]"])
        options = 'prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True'
        inputs, where = f"tokenizer.apply_chat_template({options})", "chat/completions"
    settings = 'dtype="bfloat16", device_map="auto"'
    if adapter and base.revision != "main":
        settings += f', revision="{base.revision}"'
    if quantised:
        settings += f", quantization_config={_quantisation(run.config)}"
    load = f'AutoModelForCausalLM.from_pretrained("{path if adapter else repo_id}", {settings})'
    both = [f"base = {load}", f'model = PeftModel.from_pretrained(base, "{repo_id}")']
    lines = [
        *(["from peft import PeftModel"] if adapter else []),
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{', BitsAndBytesConfig' * quantised}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")',
        *(both if adapter else [f"model = {load}"]),
        "",
        f"prompt = {asked}",
        f"inputs = {inputs}",
        f"output = model.generate(**inputs.to(model.device), max_new_tokens={tokens}, do_sample=False)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    served, serve = repo_id, f"vllm serve {repo_id}"
    if adapter:
        rank = served_rank(int(number(run.config.get("lora_r")) or 16))
        at = "" if base.revision == "main" else f" --revision {base.revision}"
        served = name
        serve = f"vllm serve {path}{at} --enable-lora --max-lora-rank {rank} --lora-modules {name}={repo_id}"
    body = {"model": served, "messages" if chat else "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    ask = f"curl http://127.0.0.1:8000/v1/{where} -H 'Content-Type: application/json' \\\n    -d '{quoted}'"
    said = f"With the prompt that it was trained on, the template `{template}`" if template else "As a chat"
    parts = [
        f"## Use\n\n{said}:",
        _fence("python", "\n".join(lines)),
        "With vLLM, where the base is not quantised:" if quantised else "With vLLM:",
        _fence("bash", f"{serve}\n\n{ask}"),
    ]
    return "\n\n".join(parts)


def _licence(base: Base) -> str:
    name = base.licence.get("license_name") or base.licence.get("license")
    if not name:
        text = "The licence of the base model is not known to this card. Look it up before you use or share this."
        return f"## Licence\n\n{text}"
    link = base.licence.get("license_link")
    shown = f"[{name}]({link})" if isinstance(link, str) and link.startswith("http") else f"`{name}`"
    return f"## Licence\n\nThat of the base model: {shown}."


def _files(run: Run, kind: str) -> str:
    weights = "`adapter_model.safetensors`, `adapter_config.json`" if kind == "adapter" else "`*.safetensors`"
    there = [[f"`{name}`", words] for name, words in RESULTS.items() if (run.directory / name).exists()]
    rows = [["file", "what it holds"], [weights, "weights"], *there]
    return f"## Files\n\n{_table(rows)}"


# Words and tables


def _data(run: Run) -> str:
    return _shown(str(run.config.get("dataset") or "unknown"))


def _evaluated(run: Run) -> str:
    results = run.after or run.before or {}
    return _shown(str(results.get("data") or run.config.get("eval_dataset") or run.config.get("dataset") or "unknown"))


def _shown(dataset: str) -> str:
    """A name, or the name of a file or folder without the folders that it is in."""
    return dataset if hub_id(dataset) or dataset.startswith("generated") else Path(dataset).name


def _data_link(dataset: str) -> str:
    if hub := hub_id(dataset):
        return f"[{hub}](https://huggingface.co/datasets/{hub})"
    if dataset.partition(":")[0] == "generated":
        return f"problems that grpo_math generates (`{dataset}`)"
    return f"`{dataset}`"


def _problems(results: dict[str, Any]) -> set[str]:
    return {str(row["id"]) for row in results["rows"]}


def _sampling(results: dict[str, Any]) -> str:
    samples, temperature = results.get("samples", 1), results.get("temperature", 0)
    return "greedy" if not temperature else f"{samples} samples each at temperature {temperature:g}"


def _hardware(config: dict[str, Any]) -> str:
    found, processes = mapping(config.get("hardware")), config.get("num_processes", 1)
    if "gpu" in found and not config.get("use_cpu"):
        text = f"{found.get('gpus')} x {found['gpu']}, {found.get('gpu_memory_gb')} GB each"
    else:
        text = f"{found.get('cpus')} CPU cores, {found.get('memory_gb')} GB"
    return f"{text}; {processes} process{'' if processes == 1 else 'es'}"


def _software(versions: dict[str, Any]) -> str:
    first = ("grpo_math", "trl", "transformers", "peft", "accelerate", "torch", "python")
    names = [*(name for name in first if name in versions), *(name for name in versions if name not in first)]
    return ", ".join(f"{name} {versions[name]}" for name in names)


def _asked(results: dict[str, Any]) -> str:
    """A problem to ask: the first of the evaluation, where it is short."""
    first = next(iter(results.get("rows") or [{}])).get("problem")
    return first if isinstance(first, str) and 0 < len(first) <= 300 else ASKED


def _quantised(run: Run) -> bool:
    return bool(run.config.get("load_in_4bit") or run.config.get("load_in_8bit"))


def _quantisation(config: dict[str, Any]) -> str:
    if not config.get("load_in_4bit"):
        return "BitsAndBytesConfig(load_in_8bit=True)"
    kind = config.get("bnb_4bit_quant_type") or "nf4"
    nested = bool(config.get("use_bnb_nested_quant"))
    return (
        f'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{kind}", '
        f'bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant={nested})'
    )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(rows: list[list[str]], right: bool = False) -> str:
    """A table whose first row is its head; ``right``: all columns but the first hold figures."""
    head, *body = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([head, "|---" + ("|---:" if right else "|---") * (len(rows[0]) - 1) + "|", *body])


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _fence(language: str, text: str) -> str:
    """A block of code, whatever runs of backticks stand in it."""
    longest = max([2, *(len(run) for run in re.findall(r"`+", text))])
    return f"{'`' * (longest + 1)}{language}\n{text}\n{'`' * (longest + 1)}"
