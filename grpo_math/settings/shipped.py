"""Find shipped files by their checkout names, from any folder."""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from grpo_math.errors import ConfigError, require_choice

PACKAGE = Path(__file__).parents[1]
INSTALLED = {  # a folder of the checkout -> its folder in the installed package (pyproject.toml)
    "launch/configs": "launch_configs",
    "accelerate_configs": "accelerate_configs",
    "deepspeed": "deepspeed_configs",
}


def find(path: str | Path) -> Path:
    """Return ``path``, or the shipped file of that name if ``path`` does not exist.

    >>> find("deepspeed/zero2.json").is_file(), find("deepspeed/zero9.json")
    (True, PosixPath('deepspeed/zero9.json'))
    """
    path = Path(path)
    folder = path.parent.as_posix()
    # A user's own file of that name comes first.
    if path.exists() or folder not in INSTALLED:
        return path
    shipped = _folder(folder) / path.name
    return shipped if shipped.exists() else path


def accelerate_file(name: str) -> Path:
    """Return an accelerate config by its path, or by its name in accelerate_configs/.

    >>> accelerate_file("zero2").name, accelerate_file("accelerate_configs/zero2.yaml").name
    ('zero2.yaml', 'zero2.yaml')
    >>> accelerate_file("zero9")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: accelerate_config='zero9' does not exist: give a file, or a name such as zero2
    """
    path = find(name) if name.endswith((".yaml", ".yml", ".json")) else find(f"accelerate_configs/{name}.yaml")
    if not path.is_file():
        raise ConfigError("accelerate_config", name, "does not exist", "give a file, or a name such as zero2")
    return path


def recipe_file(name: str | Path) -> Path:
    """Return a recipe by its path, or a shipped recipe by its name.

    >>> recipe_file("r1_zero_1.5b_2gpu").name, recipe_file("nowhere/mine.yaml")
    ('r1_zero_1.5b_2gpu.yaml', PosixPath('nowhere/mine.yaml'))
    """
    path, recipes = find(name), listed("launch/configs")
    # A name may contain a point: r1_zero_1.5b_2gpu.
    if path.exists() or path.name != str(name) or (path.suffix and path.name not in recipes):
        return path
    require_choice("config", path.name, tuple(recipes))
    return recipes[path.name][0]


def is_file(word: str) -> bool:
    """Return True for the name of a file or of a shipped recipe.

    >>> is_file("mine.yaml"), is_file("demo_cpu"), is_file("accuracy")
    (True, True, False)
    """
    return word.endswith((".yaml", ".yml")) or word in listed("launch/configs") or Path(word).is_file()


def target_options(target: str | None, option: str, names: Iterable[str], is_value: bool) -> list[str]:
    """Return the option for a command's first word: a recipe or, if ``is_value``, a value of ``option``.

    A word that is neither is compared with the recipes and with ``names``, the known values.

    >>> target_options("demo_cpu", "--rewards", ["gsm8k"], False), target_options("gsm8k", "--rewards", ["gsm8k"], True)
    (['--config', 'demo_cpu'], ['--rewards', 'gsm8k'])
    >>> target_options("gms8k", "--rewards", ["gsm8k"], False)
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: config='gms8k' is not known: did you mean 'gsm8k'? (gsm8k, demo_cpu, ...
    """
    if target is None or is_value:
        return [option, target] if target else []
    if not find(target).exists() and Path(target).stem == target:
        require_choice("config", target, (*names, *listed("launch/configs")))
    return ["--config", target]


def _folder(name: str) -> Path:
    """Return the folder of the shipped files: in the installed package, or in the checkout."""
    installed = PACKAGE / INSTALLED[name]
    return installed if installed.is_dir() else PACKAGE.parent / name


def listed(folder: str) -> dict[str, tuple[Path, str]]:
    """Return the shipped files of a folder by name: the path, and the first sentence of the comment.

    >>> listed("launch/configs")["demo_cpu"][1].partition(",")[0]
    'Sums with SmolLM2-135M-Instruct and LoRA'
    """
    return {path.stem: (path, _first_sentence(path)) for path in sorted(_folder(folder).glob("*.yaml"))}


def listing() -> str:
    """Return the text of `grpo-math train --list`."""
    recipes, configs = listed("launch/configs"), listed("accelerate_configs")
    return "\n".join([
        *(f"{name:<24} {sentence}" for name, (_, sentence) in recipes.items()),
        "",
        "grpo-math train NAME trains with one, train --copy NAME copies it to edit.",
        "",
        *(f"{name:<24} {path}" for name, (path, _) in configs.items()),
        "",
        "grpo-math train --accelerate_config NAME; accelerate launch --config_file PATH.",
    ])  # fmt: skip


def _first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the start of a file."""
    lines = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line[2:] for line in lines).partition(". ")[0].rstrip(".")


def copy(name: str) -> Path:
    """Copy a shipped recipe or accelerate config to the current folder. Raises `ConfigError` if the file exists."""
    shipped = {**listed("accelerate_configs"), **listed("launch/configs")}
    require_choice("copy", name.removesuffix(".yaml"), tuple(shipped))
    target = Path(f"{name.removesuffix('.yaml')}.yaml")
    if target.exists():
        raise ConfigError("copy", name, f"exists already, as {target}", "rename that, or go to another folder")
    try:
        target.write_bytes(shipped[target.stem][0].read_bytes())
    except OSError as error:
        raise ConfigError("copy", name, f"cannot be written ({error.strerror})", "go to another folder") from None
    return target
