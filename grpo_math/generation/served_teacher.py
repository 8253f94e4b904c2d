"""A teacher on a vLLM server (``reference_model: http://HOST:PORT``): the log-probs of tokens that the policy sampled.

vLLM returns them as ``prompt_logprobs`` of prompt and completion. Temperature and filters do not apply to the tokens of
a prompt, so settings/rules.py refuses another temperature than 1. The server has the key of VLLM_API_KEY, and may serve
several runs.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from grpo_math.errors import ConfigError
from grpo_math.generation.completions import MAX_REQUESTS
from grpo_math.generation.lost_server import ServerUnavailable, repeat_after_restart, wait
from grpo_math.generation.models import SAMPLE
from grpo_math.generation.vllm_server import Server
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.http import ServerError

COMMAND = "grpo-math serve --teacher --model_name_or_path TEACHER"
START = f"Start the teacher: {COMMAND}"
PIECES = 1000  # tokens of the vocabulary that are compared
Row = tuple[list[int], int]  # prompt and completion, and the number of the completion's tokens


class ServedTeacher:
    """Stands in place of a reference model. The main process asks the server.

    ``seconds``: to wait for a server that is lost. A request may take ``timeout``.
    """

    def __init__(self, url: str, seconds: float, timeout: float = 3600.0) -> None:
        # `repeat_after_restart` repeats a request, so the client does not.
        self.server = Server(url, timeout=timeout, retries=0)
        self.timeout = timeout
        self.seconds = seconds
        self.model = ""

    def connect(self, tokenizer: Any, max_completion_length: int) -> None:
        """Check the server. Raises `ConfigError` if it cannot score the tokens of ``tokenizer``."""
        try:
            wait(self.server, self.seconds, START)
            base = self.server.http.ask("/v1/models")["data"][0]
            self.model, length = base["id"], int(base["max_model_len"])
            self._check_tokens(tokenizer)
        except ServerError as error:
            raise ConfigError("reference_model", self.server.url, f"is not a teacher ({error})", COMMAND) from None
        # Any program may listen at that address.
        except (KeyError, IndexError, TypeError, AttributeError):
            reason = "is not a teacher (its answers are not those of vLLM)"
            raise ConfigError("reference_model", self.server.url, reason, COMMAND) from None
        # vLLM samples a token after the completion, and a prompt has a token at least.
        if length < max_completion_length + 2:
            reason = f"leaves no room for a prompt in the {length} tokens of {self.server.url}"
            remedy = "start the teacher with a larger --max-model-len"
            raise ConfigError("max_completion_length", max_completion_length, reason, remedy)

    def _check_tokens(self, tokenizer: Any) -> None:
        """Raise `ConfigError` for another tokenizer, and `ServerError` for a model without log-probs of all tokens."""
        last = max(tokenizer.get_vocab().values())
        # All added tokens are in the text, among them those of the chat template.
        pieces = [tokenizer.decode([token]) for token in range(0, last, last // PIECES + 1)]
        text = "\n".join([SAMPLE, *tokenizer.get_added_vocab(), *pieces])
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        theirs = self._ask("tokenize", prompt=text, add_special_tokens=False)["tokens"]
        # A tokenizer with more tokens is another one.
        more = self._ask("detokenize", tokens=[last + 1])["prompt"]
        if theirs != tokens or more:
            remedy = "serve a model of the same family, because the log-probs of the same tokens are compared"
            raise ConfigError("reference_model", self.server.url, "has another tokenizer than the model", remedy)
        self.server.score([last, last], 1, model=self.model)

    def _ask(self, path: str, **body: Any) -> Any:
        return self.server.http.ask(f"/{path}", {"model": self.model, **body})

    def gather_logps(self, ids: Tensor, mask: Tensor, kept: int) -> Tensor:
        """Return the log-probs (B, T) of the last ``kept`` tokens of rows, 0 where masked. All ranks call this.

        Raises `ServerUnavailable` if the server does not come back, or gives no log-prob of a token.
        """
        masks = mask.cpu().bool()
        rows = [
            (row[has_token].tolist(), int(has_token[-kept:].sum()))
            for row, has_token in zip(ids.cpu(), masks, strict=True)
        ]
        all_rows = gather_object([rows])
        answers = broadcast_from_main(lambda: self._score_all(all_rows))[PartialState().process_index]
        scores = torch.zeros(len(ids), kept)
        scores[masks[:, -kept:]] = torch.tensor([logp for logps in answers for logp in logps])
        return scores.to(ids.device)

    def _score_all(self, all_rows: list[list[Row]]) -> list[list[list[float]]]:
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            # All requests are sent before the first answer is read.
            answers = [pool.map(self._score, rows) for rows in all_rows]
            try:
                return [list(rank_answers) for rank_answers in answers]
            finally:
                # After an error, no further request waits for a server that hangs.
                pool.shutdown(cancel_futures=True)

    def _score(self, row: Row) -> list[float]:
        tokens, n = row
        # The completion is masked as a whole.
        if n == 0:
            return []
        started = 0.0

        def call() -> list[float]:
            nonlocal started
            started = time.monotonic()
            return self.server.score(tokens, n, model=self.model)

        def restore() -> None:
            # A server that hangs is not lost, and would not answer the same request later.
            if time.monotonic() - started >= self.timeout:
                raise ServerUnavailable(f"{self.server.url} has not answered for {self.timeout:g} s: see its log")
            wait(self.server, self.seconds, START)

        try:
            return repeat_after_restart(self.server.url, call, restore, "to the teacher")
        except ServerError as error:
            raise ServerUnavailable(str(error)) from None
