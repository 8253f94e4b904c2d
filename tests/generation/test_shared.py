"""One copy of the base: where a policy's parameters are in an engine of plain modules, and in vLLM on the CPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_generation import small_model
from torch import nn
from transformers import AutoModelForCausalLM
from vllm_process import CPU

from grpo_math.errors import ConfigError
from grpo_math.generation.colocated_sampler import restored_methods
from grpo_math.generation.shared import SharedBase, find_views, storage_address

PROGRAM = str(Path(__file__).parents[1] / "processes/one_copy.py")
ROWS = {"q_proj": slice(0, 32), "k_proj": slice(32, 48), "v_proj": slice(48, 64)}  # of one tensor of the engine
PADDED = 320  # rows of a vocabulary of 258


def copy(held, part):
    held.copy_(part)


class Engine(nn.Module):
    """Holds query, key and value in one tensor, and a padded vocabulary. ``load`` copies the output projections."""

    def __init__(self, state, load=copy, dtype=torch.float32):
        super().__init__()
        self.load, self.held = load, {}
        for name, tensor in state.items():
            kind = next((kind for kind in ROWS if kind in name), None)
            if kind == "q_proj" or kind is None:
                rows = 64 if kind else PADDED if tensor.size(0) == 258 else tensor.size(0)
                held = torch.randn(rows, *tensor.shape[1:]).to(dtype)
                self.held[name] = held
                self.register_buffer(name.replace(".", "_"), held)

    def load_weights(self, weights):
        for name, tensor in weights:
            kind = next((kind for kind in ROWS if kind in name), None)
            held = self.held[name.replace(kind, "q_proj") if kind else name]
            if "o_proj" in name:
                self.load(held, tensor)
            elif kind:
                held[ROWS[kind]].copy_(tensor)
            else:
                held[: tensor.size(0)].copy_(tensor)
                if held.size(0) == PADDED:
                    held[tensor.size(0) :].fill_(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    small_model(tie_word_embeddings=True).save_pretrained(path)
    return str(path)


def make(path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


@pytest.fixture
def shared(folder):
    """The base, and a policy with an adapter on it."""
    base = SharedBase()
    model = base.create(make, folder, dtype=torch.float32)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return base, get_peft_model(model, adapter)


def attached(base, policy):
    engine = Engine(base.skeleton.state_dict())
    base.views = find_views(base.skeleton, engine)
    base.attach(policy, torch.device("cpu"))
    return engine


def test_an_empty_policy_takes_no_memory_and_draws_its_adapter_as_always(folder, shared):
    _, policy = shared
    assert all(p.untyped_storage().nbytes() <= 4 for n, p in policy.named_parameters() if "lora_" not in n)
    torch.manual_seed(3)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    usual = get_peft_model(make(folder), adapter)
    torch.manual_seed(3)
    empty = get_peft_model(SharedBase().create(make, folder, dtype=torch.float32), adapter)
    theirs = dict(usual.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in empty.named_parameters() if "lora_" in n)


def test_each_base_parameter_becomes_a_view_of_the_engine_which_does_not_change(shared):
    base, policy = shared
    engine = Engine(base.skeleton.state_dict())
    before = {name: tensor.clone() for name, tensor in engine.held.items()}
    base.views = find_views(base.skeleton, engine)
    base.attach(policy, torch.device("cpu"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.held.items())
    theirs = {storage_address(tensor) for tensor in engine.held.values()}
    parameters = {n: p for n, p in policy.named_parameters() if "lora_" not in n}
    assert parameters
    assert all(storage_address(p) in theirs and not p.requires_grad for p in parameters.values())
    # Fused, padded and tied weights have the right values.
    layer = policy.get_base_model().model.layers[1].self_attn
    for kind, rows in ROWS.items():
        weight = getattr(layer, kind).get_base_layer().weight
        assert torch.equal(weight, engine.held["model.layers.1.self_attn.q_proj.weight"][rows])
    embedding = policy.get_input_embeddings().weight
    assert torch.equal(embedding, engine.held["model.embed_tokens.weight"][:258])
    assert policy.get_output_embeddings().weight is embedding
    logits = policy(input_ids=torch.tensor([[1, 2, 3]])).logits
    logits.sum().backward()
    assert all(p.grad is not None for n, p in policy.named_parameters() if "lora_B" in n)


def test_a_transposed_weight_is_a_view_with_other_strides(shared):
    base, _ = shared
    engine = Engine(base.skeleton.state_dict(), load=lambda held, part: held.t().copy_(part))
    view = find_views(base.skeleton, engine)["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(view, engine.held["model.layers.0.self_attn.o_proj.weight"].t())


def scale_in_place(held, part):
    held.copy_(part)
    held.mul_(2)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda held, part: None, "does not load all of model.layers.0.self_attn.o_proj.weight"),
        (lambda held, part: held[:16].copy_(part[:16]), "does not load all of"),
        (lambda held, part: held.copy_(part + 1), r"computes a weight of shape \[32, 32\]"),
        (scale_in_place, "changes a weight while it loads it"),
        (lambda held, part: [held[::2].copy_(part[:16]), held[1::2].copy_(part[16:])], "not have .* in one piece"),
        (lambda held, part: held[:3].copy_(part), "not have .* in one piece"),
        (lambda held, part: part.view(7, 7), r"cannot load its weights twice \(RuntimeError"),
    ],
    ids=[
        "not loaded",
        "split over GPUs",
        "computed",
        "changed in place",
        "interleaved",
        "repacked",
        "that cannot be loaded",
    ],
)
def test_a_layout_that_is_not_a_view_is_refused(load, reason, shared):
    base, _ = shared
    with pytest.raises(ConfigError, match=reason):
        find_views(base.skeleton, Engine(base.skeleton.state_dict(), load=load))


def test_an_engine_with_fewer_bits_is_refused(shared):
    base, _ = shared
    with pytest.raises(ConfigError, match=r"in torch\.bfloat16, and the trainer in torch\.float32"):
        find_views(base.skeleton, Engine(base.skeleton.state_dict(), dtype=torch.bfloat16))


def change_a_value(engine):
    engine.held["model.norm.weight"][1] += 1


def move(engine):
    engine.model_norm_weight = engine.model_norm_weight.clone()


@pytest.mark.parametrize("prepare", [change_a_value, move, lambda engine: None])
def test_weights_that_vllm_changes_or_moves_after_it_has_loaded_them_are_named(prepare, shared, monkeypatch):
    """With a stand-in for vLLM's function."""
    base, policy = shared
    engine = Engine(base.skeleton.state_dict())
    loader = SimpleNamespace(process_weights_after_loading=prepare)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader", SimpleNamespace(base_loader=loader))
    with base.locate():
        if prepare in (change_a_value, move):
            with pytest.raises(ConfigError, match=r"vLLM repacks model\.norm\.weight for its kernels"):
                loader.process_weights_after_loading(engine)
        else:
            loader.process_weights_after_loading(engine)
            base.attach(policy, torch.device("cpu"))
    assert loader.process_weights_after_loading is prepare


def test_a_parameter_that_was_copied_is_named(shared):
    base, policy = shared
    engine = attached(base, policy)
    base.check(policy)
    norm = policy.get_base_model().model.norm
    norm.weight = nn.Parameter(norm.weight.clone(), requires_grad=False)
    with pytest.raises(ConfigError, match=r"norm\.weight was copied"):
        base.check(policy)
    assert engine.held


@pytest.mark.parametrize("call", ["merge_adapter", "unmerge_adapter", "merge_and_unload"])
def test_merging_is_refused_and_leaves_the_base_as_it_is(call, shared):
    base, policy = shared
    engine = attached(base, policy)
    before = engine.held["model.layers.0.mlp.up_proj.weight"].clone()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1)
    with pytest.raises(ConfigError, match="must not be merged"):
        getattr(policy, call)()
    assert torch.equal(engine.held["model.layers.0.mlp.up_proj.weight"], before)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"quantization_config": object()}, "nf4, with nested constants"),
        ({"revision": "v2"}, "vLLM loads the revision main, not v2"),
    ],
)
def test_a_base_that_the_engine_would_not_load_is_refused(kwargs, reason, folder):
    with pytest.raises(ConfigError, match=f"^vllm_share_weights=True does not work here: .*{reason}: leave it out$"):
        SharedBase().create(make, folder, **kwargs)


def test_a_quantised_checkpoint_and_a_model_without_a_name_are_refused():
    with pytest.raises(ConfigError, match="the checkpoint is quantised"):
        SharedBase().create(
            lambda path, **kwargs: SimpleNamespace(config=SimpleNamespace(quantization_config={1})), "m"
        )
    with pytest.raises(ConfigError, match="the trainer got a model instead of a name"), SharedBase().locate():
        pass


def test_methods_that_vllm_replaces_are_restored_for_the_trainer():
    class Body(torch.nn.Module):
        def forward(self, x):
            return x

    def refuse(module, **settings):
        raise AssertionError("Current vLLM config is not set")

    body, engines, calls = Body(), Body(), []
    engines.do_not_compile = True
    body.register_forward_hook(lambda *_: calls.append("hook"))
    with restored_methods(torch.nn.ModuleList([body])):
        Body.__init__ = refuse
        Body.__call__ = lambda module, x: calls.append("vLLM")
    body(1)
    Body()(1)
    assert calls == ["hook"]
    engines(1)
    assert calls == ["hook", "vLLM"]


@pytest.fixture(scope="module")
def families(tmp_path_factory, tokenizer):
    """Folders of random models with a base of 50 MB, which vLLM's CPU build serves."""
    sizes = {"vocab_size": 49152, "hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True}
    folders = []
    # vLLM runs olmo2 through transformers, and decorates the classes that the trainer uses, too.
    for family in ("qwen2", "olmo2"):
        path = tmp_path_factory.mktemp("families") / family
        for part in (small_model(family, scale=1.0, **sizes), tokenizer):
            part.save_pretrained(path)
        folders.append(str(path))
    return folders


@pytest.mark.full
def test_a_run_on_shared_weights_is_the_run_on_two_copies(vllm_python, families, tmp_path):
    """Adapters, completions and answers bit for bit, with a sleeping engine, for two families. The memory is smaller
    by the base. A run that is killed and resumed has the same adapter."""
    launching.run([vllm_python, PROGRAM, str(tmp_path / "record.json"), *families], **CPU)
    for family, record in json.loads((tmp_path / "record.json").read_text()).items():
        two, one = record["two"], record["one"]
        assert one["completions"] == two["completions"], family
        assert one["adapter"] == two["adapter"], family
        assert one["moved"] > 0
        assert (one["shared"], two["shared"]) == (1.0, 0.0)
        assert one["answers"] == two["answers"]
        assert one.get("resumed", one["adapter"]) == one["adapter"], family
        saved = two["bytes"] - one["bytes"]
        assert saved > 0.8 * record["base_bytes"], (family, saved, record["base_bytes"])
