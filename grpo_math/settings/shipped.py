"""The files that come with the package go by the names that they have in the checkout, wherever one works.

Does not read what it finds.
"""

from pathlib import Path

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
