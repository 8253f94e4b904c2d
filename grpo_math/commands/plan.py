"""`grpo-math plan`: does a recipe fit these GPUs?"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from grpo_math import planner
from grpo_math.checks.check_services import cache_only
from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.vllm_env import needed_in_training
from grpo_math.planner.cards import Card
from grpo_math.planner.model import shipped_config, stored
from grpo_math.settings.accelerate import accelerate_config, shipped_configs
from grpo_math.settings.recipe import read
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system import gpus, torch_build
from grpo_math.system.gpus import count_and_gb
from grpo_math.system.machine import main_memory
from grpo_math.system.streams import Answer, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="a file, or the name of a shipped recipe")
    add("--list_models", action="store_true", help="list the models that need no network")
    add("--gpus", type=int, metavar="N", help="number of GPUs (default: this machine's)")
    add("--nodes", type=int, metavar="N", help="nodes of a SLURM job, with --gpus each: print its sbatch line, too")
    add("--gpu_memory", type=float, metavar="GB", help="memory of one GPU (default: this machine's)")
    add("--card", metavar="NAME", help="the GPU, for its memory and number formats; list: print the cards")
    add("--cpu_memory", type=float, metavar="GB", help="main memory (default: this machine's)")
    add("--prompt_tokens", type=int, metavar="N", help="the longest prompt (default: 512)")
    add("--accelerate_config", metavar="FILE", help="a file or a name (default: as train chooses)")


class Job(NamedTuple):
    """The GPUs that the options describe. None: those of this machine."""

    card: Card | None
    nodes: int
    gpus: int | None  # of each node
    gpu_gb: float | None
    cpu_gb: float  # of each node
    prompt_tokens: int | None
    separate_server: bool  # the last of several nodes runs the server, as in launch/slurm/multi_node.sbatch

    @property
    def per_gpu(self) -> dict[str, Any]:
        capability = self.card.capability if self.card else None
        return {"gpu_gb": self.gpu_gb, "capability": capability, "prompt_tokens": self.prompt_tokens}

    def machine(self, nodes: int) -> dict[str, Any]:
        """Return the arguments of `planner.plan` for this many nodes."""
        return {**self.per_gpu, "gpus": self.gpus and self.gpus * nodes, "cpu_gb": self.cpu_gb * nodes}


def run(args: argparse.Namespace) -> Answer:
    """Plan the memory and the layout of one recipe."""
    if args.list_models or args.card == "list":
        return _list(args)
    recipe = _read_recipe(args)
    job = _job(args, recipe)
    # Training tries the same configs in the same order (train/layout.py).
    name = args.accelerate_config
    configs = {"": accelerate_config(name)} if name else shipped_configs(recipe)
    trained = recipe.changed(vllm_server_host="the last node") if job.separate_server else recipe
    answer = planner.plan(trained, configs, **job.machine(job.nodes - job.separate_server))
    plans = [plan for plan in (answer, answer["best"]) if plan]
    if job.separate_server:
        _add_server(plans, recipe, job)
    notes = _notes_about_gpus(recipe, job.card, args.gpu_memory)
    for plan in plans:
        plan["notes"] = [*_note_about_idle(plan, recipe, configs, job), *notes, *plan["notes"]]
    answer |= _command(answer, recipe, args)
    return Answer(answer, planner.picture(answer), answer["fits"])


def _list(args: argparse.Namespace) -> Answer:
    """List the models that need no network, or the cards."""
    if args.list_models:
        names = list(stored("shapes.json"))
        return Answer({"models": names}, "\n".join(names))
    memory = {name: card["gb"] for name, card in planner.TABLES["cards"].items()}
    return Answer({"cards": memory}, "\n".join(f"{name:<15} {gb:>5.4g} GB" for name, gb in memory.items()))


def _job(args: argparse.Namespace, recipe: RunSettings) -> Job:
    card = planner.find_card(args.card) if args.card else None
    return Job(
        card=card,
        nodes=args.nodes or 1,
        # A named card need not be in this machine, so the GPUs of this machine do not count.
        gpus=args.gpus or (1 if args.card or args.nodes else None),
        gpu_gb=args.gpu_memory or (card.gb if card else None),
        cpu_gb=args.cpu_memory or main_memory(),
        prompt_tokens=args.prompt_tokens,
        separate_server=(args.nodes or 1) > 1 and recipe.starts_server,
    )


def _add_server(plans: list[dict[str, Any]], recipe: RunSettings, job: Job) -> None:
    """Add the node of the server to each plan."""
    machine = {**job.per_gpu, "gpus": job.gpus, "gpu_gb": job.gpu_gb or count_and_gb()[1]}
    layout, terms = planner.serve_layout(recipe, **machine)
    for plan in plans:
        first = sum(len(role["gpus"]) for role in plan["layout"])
        plan["layout"] += [{**role, "gpus": [first + n for n in role["gpus"]]} for role in layout.roles()]
        plan["phases"]["server"] = terms
        plan["why"] = "the last node runs the server, and every GPU of the others trains"


def _command(answer: Mapping[str, Any], recipe: RunSettings, args: argparse.Namespace) -> dict[str, Any]:
    """Return the line to paste, and the extras of this package that it needs; None and [] if nothing fits."""
    if not (answer["best"] or answer["fits"]):
        return {"command": None, "extras": []}
    chosen, suggestions = answer["best"] or answer, answer["suggestions"]
    words = _sbatch(args, chosen) if args.nodes else ["grpo-math", "train", "--config", args.config]
    lines = dict(line.split(": ", 1) for suggestion in suggestions for line in suggestion["set"])
    options = [word for name, value in lines.items() for word in (f"--{name}", value)]
    changes = {name: value for one in suggestions for name, value in one["change"].items()}
    return {
        "command": shlex.join([*words, *args.fields, *options, *_options(args, chosen)]),
        "extras": _extras(recipe.changed(**changes), chosen),
    }


def _notes_about_gpus(recipe: RunSettings, card: Card | None, gpu_memory: float | None) -> list[str]:
    """Return a note if the installed torch cannot use the planned GPUs, and notes about this machine's GPUs."""
    if recipe.use_cpu or (gpu_memory and not card):
        return []
    findings = [] if card else [(finding.message, finding.remedy) for finding in gpus.warnings()]
    lacking = torch_build.lacks_kernels(card.capability) if card else gpus.unusable()
    return [f"{reason}: {remedy}" for reason, remedy in [*findings, *([lacking] if lacking else [])]]


def _read_recipe(args: argparse.Namespace) -> RunSettings:
    """Return the settings to plan. Print the notes about them, and one if the Hub does not answer."""
    if args.config is None:
        raise UserError("the following arguments are required: RECIPE: see grpo-math plan --help")
    for name in ("gpus", "nodes", "gpu_memory", "cpu_memory", "prompt_tokens"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e6:
            remedy = "describe the hardware, for example --gpus 1 --gpu_memory 24"
            raise ConfigError(name, value, "is out of range", remedy)
    parsed = read(["--config", args.config, *args.fields])
    for note in parsed.notes:
        print(f"warning: {note}", file=sys.stderr)
    for line in parsed.replaced:
        print(line, file=sys.stderr)
    recipe = parsed.raise_first_problem().settings
    if recipe.use_cpu and args.gpus:
        raise ConfigError("gpus", args.gpus, "contradicts use_cpu=True", "leave one of them out")
    if not shipped_config(recipe.model_name_or_path) and (note := cache_only([], recipe.model_name_or_path)):
        say("hub", note)
    return recipe


def _note_about_idle(
    plan: Mapping[str, Any], recipe: RunSettings, configs: Mapping[str, Any], job: Job
) -> Iterator[str]:
    idle = [str(gpu) for role in plan["layout"] if role["role"] == "idle" for gpu in role["gpus"]]
    if idle:
        yield f"idle: GPU {', '.join(idle)}; {_setting_for_idle(recipe, configs, job)}"


def _setting_for_idle(recipe: RunSettings, configs: Mapping[str, Any], job: Job) -> str:
    """Return the setting with which a recipe uses every GPU, in words."""
    prompts = recipe.prompts_per_step
    batches: list[dict[str, Any]] = [
        {},
        *({"prompts_per_step": n} for n in range(prompts + 1, 2 * prompts + 1) if prompts),
    ]
    batches += [{"per_device_train_batch_size": recipe.num_generations}]
    engines: list[dict[str, Any]] = [{}, {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True}][
        job.separate_server :
    ]
    for change in (engine | sizes for engine in engines for sizes in batches):
        with suppress(UserError):
            _, plan = planner.choose(recipe.changed(**change), configs, offline=True, **job.machine(job.nodes))
            if plan.fits and not plan.layout.idle:
                fields = ", ".join(f"{name}: {value}" for name, value in change.items())
                return f"{fields.replace('True', 'true')} would use every GPU"
    return "no change of the batch or of vllm_mode uses every GPU"


def _extras(settings: RunSettings, chosen: Mapping[str, Any]) -> list[str]:
    """Return the extras of this package that the line to paste needs."""
    needs = {
        "quant": settings.load_in_4bit or "8bit" in settings.optim,
        **dict.fromkeys(needed_in_training(settings), True),
        "deepspeed": "zero" in (chosen["accelerate_config"] or ""),
    }
    return [name for name, needed in needs.items() if needed]


def _options(args: argparse.Namespace, chosen: Mapping[str, Any]) -> list[str]:
    """Return the options of `grpo-math train` that are not fields. A SLURM job gets them from its sbatch line."""
    options = {"--gpus": args.gpus, "--accelerate_config": chosen["accelerate_config"] or args.accelerate_config}
    return [str(word) for pair in options.items() for word in pair if pair[1] and not args.nodes]


def _sbatch(args: argparse.Namespace, chosen: Mapping[str, Any]) -> list[str]:
    """Return the words that submit a job, up to the settings of the recipe."""
    several = args.nodes > 1
    config = args.accelerate_config or chosen["accelerate_config"] or ("multi_node" if several else "multi_gpu")
    file = config if "/" in config or config.endswith(".yaml") else f"accelerate_configs/{config}.yaml"
    if several:
        nodes = [
            "sbatch",
            f"--nodes={args.nodes}",
            f"--gpus-per-node={args.gpus or 1}",
            "launch/slurm/multi_node.sbatch",
        ]
        return [*nodes, args.config, file]
    served, trained = (
        sum(len(role["gpus"]) for role in chosen["layout"] if role["role"].startswith(start))
        for start in ("vLLM server", "policy")
    )
    server = [f"VLLM_GPUS={served}"] if served else []
    return [*server, "sbatch", f"--gpus-per-node={served + trained}", "launch/slurm/one_node.sbatch", args.config, file]
