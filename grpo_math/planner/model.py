"""config.json -> the shapes of a decoder: every linear map of a layer, and the exact number of parameters.

Knows the families whose layers it has formulas for (`FAMILIES`), and refuses any other by name. The shapes of common
base models are shipped (shapes.json), so that they need no network.

Does not read weights, and imports neither torch nor transformers.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError, first_line
from grpo_math.generation.models import EMBEDDED, EMBEDDED_ON_HUB
from grpo_math.planner.settings import NotPlanned
from grpo_math.reading import Unreadable, home, read_json

# What a config.json may leave out, as transformers fills it in. None: the key is needed, or is derived below.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    "mistral": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False, "attention_bias": False, "head_dim": 128},
    "gemma": {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 256, "sliding_window": 4096},
    "granite": {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    "smollm3": {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
}
OWN_WINDOW = ("qwen2", "qwen3", "smollm3")  # has one only where `use_sliding_window` says so
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


class Linear(NamedTuple):
    """A linear map of one layer; ``path`` is its name within the layer."""

    path: str
    n_in: int
    n_out: int
    bias: bool

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def weights(self) -> int:
        return self.n_in * self.n_out


@dataclass(frozen=True)
class Shape:
    """A decoder's shape, in the words of config.json.

    >>> shape = shape_of("qwen2", shipped()["Qwen/Qwen2.5-1.5B"])
    >>> shape.parameters()
    {'embedding': 233373696, 'attention': 154198016, 'mlp': 1156055040, 'norms': 87552, 'head': 0}
    >>> shape.total
    1543714304
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    max_tokens: int | None
    sliding_window: int | None
    prequantized: bool  # the checkpoint itself is bitsandbytes' 4 bit

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "gemma3_text")

    @property
    def norms_per_layer(self) -> int:
        return 4 if self.family in ("gemma2", "gemma3_text") else 2

    def linears(self) -> tuple[Linear, ...]:
        """The linear maps of one layer, in the order of the forward pass."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        return (
            Linear("self_attn.q_proj", h, q, self.qkv_bias),
            Linear("self_attn.k_proj", h, kv, self.qkv_bias),
            Linear("self_attn.v_proj", h, kv, self.qkv_bias),
            Linear("self_attn.o_proj", q, h, self.o_bias),
            Linear("mlp.gate_proj", h, i, self.mlp_bias),
            Linear("mlp.up_proj", h, i, self.mlp_bias),
            Linear("mlp.down_proj", i, h, self.mlp_bias),
        )

    def parameters(self) -> dict[str, int]:
        """Parameters by group; a tied head has none of its own."""
        sizes = {linear.name: linear.weights + linear.bias * linear.n_out for linear in self.linears()}
        norms = self.norms_per_layer * self.hidden + 2 * self.head_dim * self.qk_norm
        return {
            "embedding": self.vocab * self.hidden,
            "attention": self.layers * sum(sizes[name] for name in ATTENTION),
            "mlp": self.layers * sum(sizes[name] for name in MLP),
            "norms": self.layers * norms + self.hidden,
            "head": 0 if self.tied else self.vocab * self.hidden,
        }

    @property
    def total(self) -> int:
        return sum(self.parameters().values())

    def kv_bytes_per_token(self, element: int = 2) -> int:
        """Keys and values of one token in all layers: 2 x layers x kv_heads x head_dim x ``element`` bytes.

        A sliding window caps what a layer keeps; the plan counts whole sequences, an upper bound.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * element


def shape_of(source: str, config: Mapping[str, Any]) -> Shape:
    """A config.json, read -> `Shape`. Raises `ConfigError` that says what the plan does not know, or what is missing.

    >>> shape_of("mine", {"model_type": "mamba"})
    Traceback (most recent call last):
    ...
    grpo_math.planner.settings.NotPlanned: model_name_or_path='mine' has model_type='mamba', whose layers the plan has \
no formula for: it knows llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, granite, smollm3
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        reason = f"has model_type={family!r}, whose layers the plan has no formula for"
        raise NotPlanned("model_name_or_path", source, reason, f"it knows {', '.join(FAMILIES)}")
    config = {**FAMILIES[family], **{name: value for name, value in config.items() if value is not None}}

    def whole(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refusal(source, f"has {name}={value!r} in its config.json, which is not a positive whole number")
        return value

    hidden, heads = whole("hidden_size"), whole("num_attention_heads")
    if "head_dim" not in config and hidden % heads:
        what = f"hidden_size={hidden}, which is not a multiple of num_attention_heads={heads}, and no head_dim"
        raise _refusal(source, f"has {what}")
    bias = bool(config.get("attention_bias")) if family != "qwen2" else False
    window = config.get("sliding_window")
    if family in OWN_WINDOW and not config.get("use_sliding_window", False):
        window = None
    return Shape(
        family=family,
        layers=whole("num_hidden_layers"),
        hidden=hidden,
        intermediate=whole("intermediate_size"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads if family in ("llama", "granite") else None),
        head_dim=whole("head_dim", hidden // heads),
        vocab=whole("vocab_size"),
        tied=bool(config["tie_word_embeddings"]),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_tokens=config.get("max_position_embeddings"),
        sliding_window=window,
        prequantized=_prequantized(source, config),
    )


def _prequantized(source: str, config: Mapping[str, Any]) -> bool:
    how = config.get("quantization_config")
    if not how or (how.get("quant_method") == "bitsandbytes" and how.get("load_in_4bit")):
        return bool(how)
    reason = f"is stored quantised by {how.get('quant_method')!r}, whose sizes the plan does not know"
    raise NotPlanned("model_name_or_path", source, reason, "name the unquantised model")


def shipped() -> dict[str, dict[str, Any]]:
    """Hub id -> the config.json figures of common base models."""
    return json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))


def read_config(name: str | None, revision: str = "main", offline: bool = False) -> dict[str, Any]:
    """The config.json of a local folder, of a shipped model, or of the Hub, in this order; a `UserError` otherwise."""
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", f"give a folder, a Hub id, or {EMBEDDED!r}")
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise _refusal(name, "has no config.json", "give the folder of a model")
    elif os.path.lexists(path):
        raise _refusal(name, "is not a folder", "give the folder of a model")
    else:
        shapes, known = shipped(), EMBEDDED_ON_HUB if name == EMBEDDED else name
        # A model and its post-trained form have one shape.
        for same in (known, *(known.removesuffix(suffix) for suffix in ("-Instruct", "-it", "-Base"))):
            if same in shapes:
                return shapes[same]
        path = _download(name, revision, offline)
    try:
        config = read_json(path)
    except Unreadable as error:
        raise _refusal(name, f"has a config.json that {error}") from None
    if not isinstance(config, dict):
        raise _refusal(name, "has a config.json that is not an object")
    return config


def _refusal(name: str, reason: str, remedy: str = "check its config.json") -> ConfigError:
    return ConfigError("model_name_or_path", name, reason, remedy)


def is_folder(name: str) -> bool:
    """Whether a model of this name is a local folder and not on the Hub.

    >>> is_folder("Qwen/Qwen2.5-1.5B"), is_folder("./models/mine"), is_folder("models/mine/checkpoint-3")
    (False, True, True)
    """
    return os.path.exists(home(name)) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _download(name: str, revision: str, offline: bool) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision, local_files_only=offline))
    except Exception as error:
        # The Hub's client raises a dozen kinds, from a bad name to no network; each means: no shapes.
        raise UserError(
            f"model_name_or_path={name!r} is not a folder here nor a shipped shape, and its config.json did not come "
            f"from the Hub ({first_line(error)}): give a folder that holds its config.json"
        ) from None
