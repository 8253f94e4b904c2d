"""The files that come with the package go by the names that they have in the checkout, wherever one works.

Does not read what it finds, but for the comment that a file begins with.
"""

from itertools import takewhile
from pathlib import Path

from grpo_math.errors import ConfigError, one_of

PACKAGE = Path(__file__).parents[1]
INSTALLED = {  # a folder of the checkout -> the package that pyproject.toml makes of it
    "launch/configs": "launch_configs",
    "accelerate_configs": "accelerate_configs",
    "deepspeed": "deepspeed_configs",
}


def find(path: str | Path) -> Path:
    """``path``, unless there is no such file and one of that name is shipped.

    >>> find("deepspeed/zero2.json").is_file(), find("deepspeed/zero9.json")
    (True, PosixPath('deepspeed/zero9.json'))
    """
    path = Path(path)
    folder = path.parent.as_posix()
    if not path.exists() and folder in INSTALLED:
        for place in _places(folder):
            if (place / path.name).exists():
                return place / path.name
    return path


def accelerate_file(name: str) -> Path:
    """An accelerate config by its path, or by its name in accelerate_configs/.

    >>> accelerate_file("zero2").name, accelerate_file("accelerate_configs/zero2.yaml").name
    ('zero2.yaml', 'zero2.yaml')
    """
    path = find(name) if name.endswith((".yaml", ".yml", ".json")) else find(f"accelerate_configs/{name}.yaml")
    if not path.is_file():
        raise ConfigError("accelerate_config", name, "is not there", "give a file, or a name such as zero2")
    return path


def recipe_file(name: str | Path) -> Path:
    """A recipe by its path, or a shipped one by its name.

    >>> recipe_file("demo_cpu").name, recipe_file("nowhere/mine.yaml")
    ('demo_cpu.yaml', PosixPath('nowhere/mine.yaml'))
    """
    path = find(name)
    if path.exists() or path.name != str(name) or path.suffix:
        return path
    recipes = listed("launch/configs")
    one_of("config", path.name, tuple(recipes))
    return recipes[path.name][0]


def _places(folder: str) -> tuple[Path, ...]:
    """Where the files of a folder of the checkout are: in an installed copy, in the checkout itself."""
    return (PACKAGE / INSTALLED[folder], PACKAGE.parent / folder)


def listed(folder: str) -> dict[str, tuple[Path, str]]:
    """The shipped files of a folder by their names: where each is, and the first sentence of its comment.

    >>> listed("launch/configs")["demo_cpu"][1][:23]
    "The quickstart's recipe"
    """
    files = sorted({path.name for place in _places(folder) for path in place.glob("*.yaml")})
    found = {Path(name).stem: find(f"{folder}/{name}").resolve() for name in files}
    return {name: (path, _first_sentence(path)) for name, path in found.items()}


def listing() -> str:
    """The text of `grpo-math train --list`."""
    recipes, configs = listed("launch/configs"), listed("accelerate_configs")
    return "\n".join([
        *(f"{name:<24} {about}" for name, (_, about) in recipes.items()),
        "",
        "grpo-math train NAME, or train --config FILE for a recipe of your own; train --copy NAME copies one to edit.",
        "",
        *(f"{name:<24} {path}" for name, (path, _) in configs.items()),
        "",
        "grpo-math train --accelerate_config NAME; accelerate launch --config_file takes the path.",
    ])  # fmt: skip


def _first_sentence(path: Path) -> str:
    """Of the comment that a file begins with."""
    lines = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line[2:] for line in lines).partition(". ")[0].rstrip(".")


def copy(name: str) -> Path:
    """A shipped recipe or accelerate config, by its name, as a file in the current folder; one that is there stays."""
    every = {**listed("accelerate_configs"), **listed("launch/configs")}
    one_of("copy", name.removesuffix(".yaml"), tuple(every))
    target = Path(f"{name.removesuffix('.yaml')}.yaml")
    if target.exists():
        raise ConfigError("copy", name, f"is here already, as {target}", "rename that, or go to another folder")
    target.write_bytes(every[target.stem][0].read_bytes())
    return target
