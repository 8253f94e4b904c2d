"""`AdapterStore`: the folders from which vLLM loads the trained adapter, one for each sync.

vLLM could also load in place under one name. But then vLLM reads the folder again for every batch of requests, and its
engine dies if the folder is missing. The prefix cache identifies an adapter by name and path, and so reuses the old
adapter's keys and values. Both happened with vLLM 0.31.

The folders are in the run directory, which a server on another machine must see under the same path. The end of the run
removes them; a run that resumes removes what a killed run has left.
"""

import shutil
import uuid
import weakref
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from grpo_math.generation.adapters import ADAPTER


class AdapterStore:
    """Writes the adapter of ``model`` into folders, and removes the folders that no request needs.

    ``gathered(parameters)``: a context in which sharded parameters are whole (TRL's `gather_params`). ``current``: the
    newest folder, whose name is the adapter's name in vLLM. ``requested``: the folder of each request that has not
    ended.
    """

    def __init__(self, model: Any, gathered: Callable[[Any], Any], output_dir: Path, rank: int) -> None:
        self.model = model
        self.gathered = gathered
        self.sent = 0  # adapters; each has its own folder
        self.current = Path()
        self.requested: list[Path] = []
        self.run = uuid.uuid4().hex[:8]
        # Each rank removes only its own leftovers. Without the last underscore, rank 1 would also match those of rank
        # 10.
        name = f"vllm_adapters_{rank}_"
        for leftover in output_dir.glob(f"{name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self.root = output_dir / f"{name}{self.run}"
        # `finalize` also runs when the interpreter exits, which `__del__` need not.
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def gather_next(self) -> dict[str, Tensor]:
        """Return the trained tensors on the CPU, under the names of a saved adapter, and name the folder for them.

        All ranks call this.
        """
        self.sent += 1
        self.current = self.root / f"{self.run}-{self.sent}"
        parameters = self.model.named_parameters()
        named = {name: p for name, p in parameters if "lora_" in name and f".{ADAPTER}." in name}
        with self.gathered(list(named.values())):
            # FSDP 2 has sharded DTensors. peft itself would read them, and every base weight, from
            # `model.state_dict()`.
            full = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in named.items()}
            # With "auto", peft would ask the Hub for config.json, unless the base is a local folder.
            saved = get_peft_model_state_dict(
                self.model, state_dict=full, adapter_name=ADAPTER, save_embedding_layers=False
            )
            # Cloned: ZeRO-3 splits the parameters again at the end of this context, and `cpu` copies nothing on a CPU.
            return {name: tensor.cpu().clone().contiguous() for name, tensor in saved.items()}

    def write(self, tensors: dict[str, Tensor], scale: float) -> None:
        """Write the tensors into the current folder. ``scale`` multiplies the adapter's effect."""
        self.current.mkdir(parents=True)
        save_file(tensors, self.current / "adapter_model.safetensors", metadata={"format": "pt"})
        # A copy, because the trainer's own lora_alpha must not change.
        config = copy(self.model.peft_config[ADAPTER])
        config.lora_alpha *= scale
        config.save_pretrained(str(self.current))

    def unused(self) -> set[Path]:
        return {*self.root.iterdir()} - {self.current, *self.requested}

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
