"""The files that come with the package go by the names that they have in the checkout, wherever one works.

Does not read what it finds.
"""

from pathlib import Path

from grpo_math.errors import ConfigError

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
        for place in (PACKAGE / INSTALLED[folder], PACKAGE.parent / folder):
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
