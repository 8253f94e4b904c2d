"""YAML files are read alike with libyaml and with PyYAML's own code."""

import importlib.util
from pathlib import Path

import yaml

from grpo_math.system.yaml_files import as_yaml, read_yaml

ROOT = Path(__file__).parents[2]


def test_without_libyaml_each_shipped_file_is_read_as_with_it(monkeypatch):
    spec = importlib.util.find_spec("grpo_math.system.yaml_files")
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    monkeypatch.delattr(yaml, "CSafeDumper", raising=False)
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)
    assert (slow.Loader, slow.Dumper) == (yaml.SafeLoader, yaml.SafeDumper)
    files = [
        path for folder in ("grpo_math", "launch", "accelerate_configs") for path in (ROOT / folder).rglob("*.yaml")
    ]
    assert {"trl_fields.yaml", "demo_cpu.yaml", "zero2.yaml"} <= {path.name for path in files}
    for path in files:
        assert slow.read_yaml(path) == read_yaml(path), path
    assert slow.as_yaml({"beta": 1e-3, "rewards": ["é"]}) == as_yaml({"beta": 1e-3, "rewards": ["é"]})
