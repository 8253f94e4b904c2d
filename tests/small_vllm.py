"""A stand-in for a vLLM server, in a thread: the paths that the sync uses, answered by transformers and peft; and a
small trainer with LoRA that samples from it.

It reads an adapter once, when it is loaded, as vLLM does. `stop` closes it; `start` opens it again at the same port,
with no adapters, as after a restart.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from small_http import SmallHTTP, body_of, send
from small_trainers import letters
from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer

from grpo_math.generation.sync import AdapterGeneration
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

SETTINGS = {
    "lora_config": {"max_lora_rank": 16, "max_loras": 2},
    "model_config": {"dtype": "torch.float32", "max_model_len": 512, "logprobs_mode": "processed_logprobs"},
    "cache_config": {"block_size": 16},
}


class SmallVLLM(SmallHTTP):
    def __init__(self, model: str | None = None, version: str = "0.31.0", **settings: Any) -> None:
        self.model, self.version, self.settings = model, version, {**SETTINGS, **settings}
        self.name = "base"  # of the base
        self.asked: list[str] = []  # the paths of all requests
        self.headers: list[Any] = []
        self.trouble: list[tuple[int, str]] = []  # what the next requests are answered instead
        self.sampling: Any = lambda body: None  # called with each request for completions, before it is answered
        self.instead: Any = lambda body: None  # the same; may return a status and a text instead of completions
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(0)
        super().__init__()

    def start(self) -> None:
        self.adapters: dict[str, Any] = {}
        super().start()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(body_of(request) or "{}")
        self.asked.append(request.path)
        self.headers.append(request.headers)
        answer = None
        if request.path == "/v1/completions":
            self.sampling(body)
            answer = self.instead(body)
        if self.http is not request.server:  # stopped meanwhile
            return
        with self.lock:
            answer = answer or (self.trouble.pop(0) if self.trouble else self.answer(request.path, body))
        send(request, answer[0], answer[1].encode())

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        path = path.partition("?")[0]
        fixed = {
            "/health": {},
            "/version": {"version": self.version},
            "/server_info": {"vllm_config": self.settings},
            "/v1/models": {"data": [{"id": name} for name in [self.name, *self.adapters]]},
        }
        if path in fixed:
            return 200, json.dumps(fixed[path])
        if path == "/v1/load_lora_adapter":
            with torch.random.fork_rng():  # a real server draws from no generator of the trainer's
                base = AutoModelForCausalLM.from_pretrained(self.model)
                self.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None)
            return (200, "Success") if known is not None else (404, json.dumps({"error": {"message": "not found"}}))
        if path == "/v1/completions":
            if body["model"] not in self.adapters:
                return 404, json.dumps({"error": {"message": f"The model `{body['model']}` does not exist."}})
            return 200, json.dumps({"choices": self.complete(body)})
        return 404, json.dumps({"detail": "Not Found"})

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        model, choices = self.adapters[body["model"]], []
        for prompt in body["prompt"]:
            for sample in range(body["n"]):
                if "seed" in body:
                    self.generator.manual_seed(body["seed"] + sample)
                ids, logprobs = list(prompt), []
                for _ in range(body["max_tokens"]):
                    row = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                    greedy = body["temperature"] == 0
                    token = int(row.argmax() if greedy else torch.multinomial(row.exp(), 1, generator=self.generator))
                    ids.append(token)
                    logprobs.append(row[token].item())
                made = {"token_ids": ids[len(prompt) :], "logprobs": {"token_logprobs": logprobs}}
                choices.append({"index": len(choices), **made})
        return choices


def adapted(base, **settings):
    """The base with a random adapter."""
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(base, LoraConfig(**{**config, **settings}))


def generation_of(model, url, folder, kind=AdapterGeneration, args=None, **settings):
    """The generation of a trainer alone, without the trainer."""
    given = {"output_dir": folder, "seed": 3, **(args or {})}
    base = {"processing_class": None, "mode": "server", "server_base_url": url, "max_completion_length": 8}
    accelerator = Accelerator(cpu=True)
    return kind(SimpleNamespace(**given), model=model, accelerator=accelerator, **{**base, **settings})


PROMPTS = ("x", "What is 3 + 4?", "Hello") * 8


def trainer_of(url, tiny, tokenizer, folder, lora=None, prompts=PROMPTS, row=None, **settings):
    """``lora``: over the adapter's settings, or False for no adapter; ``row``: what each row has beside its prompt."""
    trls = grpo_trainer.VLLMGeneration
    peft = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **(lora or {})}
    base = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 1.0,
    }
    try:
        return MathGRPOTrainer(
            model=tiny(),
            reward_funcs=letters,
            args=MathGRPOConfig(str(folder), **{**base, **settings}),
            train_dataset=Dataset.from_list([{"prompt": prompt, **(row or {})} for prompt in prompts]),
            processing_class=tokenizer,
            peft_config=None if lora is False else LoraConfig(**peft),
        )
    finally:
        assert grpo_trainer.VLLMGeneration is trls  # ours stood there for the constructor alone
