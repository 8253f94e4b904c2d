"""A stand-in for a vLLM server, in a thread: the paths that the sync uses, answered by transformers and peft; and a
small trainer with LoRA that samples from it.

It reads an adapter once, when it is loaded, as vLLM does.
"""

import json
import threading
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from small_http import AnsweringHTTP
from small_trainers import make
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_math import MathGRPOConfig, MathGRPOTrainer
from grpo_math.generation.sync import AdapterGeneration


class SmallVLLM(AnsweringHTTP):
    version = "0.31.0"
    name = "base"  # of the base

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.settings: dict[str, Any] = {
            "lora_config": {"max_lora_rank": 16, "max_loras": 2},
            "model_config": {"dtype": "torch.float32", "max_model_len": 512, "logprobs_mode": "processed_logprobs"},
        }
        self.adapters: dict[str, Any] = {}
        # Called with each request for completions. May return a status and a text to answer instead.
        self.sampling: Any = lambda body: None
        self.lock = threading.Lock()

    def answer(self, path: str, body: bytes) -> tuple[int, str]:
        request = json.loads(body or "{}")
        answer = self.sampling(request) if path == "/v1/completions" else None
        with self.lock:
            return answer or self.served(path.partition("?")[0], request)

    def served(self, path: str, request: dict[str, Any]) -> tuple[int, str]:
        fixed = {
            "/health": {},
            "/version": {"version": self.version},
            "/server_info": {"vllm_config": self.settings},
            "/v1/models": {
                "data": [
                    {"id": name, "max_model_len": self.settings["model_config"]["max_model_len"]}
                    for name in [self.name, *self.adapters]
                ]
            },
        }
        if path in fixed:
            return 200, json.dumps(fixed[path])
        if path == "/v1/load_lora_adapter":
            with torch.random.fork_rng():  # a real server draws from no generator of the trainer's
                base = AutoModelForCausalLM.from_pretrained(self.model)
                self.adapters[request["lora_name"]] = PeftModel.from_pretrained(base, request["lora_path"]).eval()
            return 200, "Success"
        if request.get("model") == self.name:
            return 200, json.dumps(self.of_base(path, request))
        if request.get("model", request.get("lora_name")) not in self.adapters:
            return 404, json.dumps({"error": {"message": "not found"}})
        if path == "/v1/unload_lora_adapter":
            del self.adapters[request["lora_name"]]
            return 200, "Success"
        return 200, json.dumps({"choices": self.complete(request)})

    @torch.no_grad()
    def of_base(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """The base's tokens, and its log-probs of the tokens of a prompt, as vLLM gives them to a teacher's client."""
        if path == "/tokenize":
            return {"tokens": self.tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]}
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode(request["tokens"])}
        (prompt,) = request["prompt"]
        logps = self.base(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        rows = zip(logps, prompt[1:], strict=False)
        return {"choices": [{"prompt_logprobs": [None, *({str(t): {"logprob": row[t].item()}} for row, t in rows)]}]}

    @cached_property
    def base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.model).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.model)

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        model, choices = self.adapters[request["model"]], []
        for prompt in request["prompt"]:
            for sample in range(request["n"]):
                generator = torch.Generator().manual_seed(request.get("seed", 0) + sample)
                ids, logprobs = list(prompt), []
                for _ in range(request["max_tokens"]):
                    row = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                    drawn = torch.multinomial(row.exp(), 1, generator=generator)
                    token = int(drawn if request["temperature"] else row.argmax())
                    ids.append(token)
                    logprobs.append(row[token].item())
                made = {"token_ids": ids[len(prompt) :], "logprobs": {"token_logprobs": logprobs}}
                choices.append({"index": len(choices), **made})
        return choices


@pytest.fixture
def server(small):
    """A server of the model in the folder ``small``."""
    server = SmallVLLM(small)
    yield server
    server.stop()


def adapted(base, **settings):
    """The base with a random adapter."""
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(base, LoraConfig(**{**config, **settings}))


@torch.no_grad()
def move(model, size):
    """Add ``size`` to each weight of the adapter's B, or subtract it, at random."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.add_(torch.randn_like(parameter).sign() * size)


def generation_of(model, url, folder, kind=AdapterGeneration, args=None, **settings):
    """The generation of a trainer alone, without the trainer."""
    base = {"processing_class": None, "mode": "server", "server_base_url": url, "max_completion_length": 8}
    of_trainer = SimpleNamespace(**{"output_dir": folder, "seed": 3, **(args or {})})
    # A test before this one may have trained in bfloat16.
    AcceleratorState._reset_state()
    return kind(of_trainer, None, model=model, **{"accelerator": Accelerator(cpu=True), **base, **settings})


def trainer_of(url, model, tokenizer, folder, **settings):
    """``settings``: those of `small_trainers.make`, in place of the ones below."""
    base = {
        "rows": [{"prompt": prompt} for prompt in ("x", "What is 3 + 4?", "Hello") * 8],
        "peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 1.0,
    }
    return make(MathGRPOTrainer, MathGRPOConfig, model, tokenizer, folder, **{**base, **settings})
