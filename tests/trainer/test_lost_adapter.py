"""A vLLM server that loses the adapter in the middle of a run."""

import pytest
from small_vllm import SmallVLLM, move, trainer_of

from grpo_math.errors import UserError


class Losing(SmallVLLM):
    """Serves the base under the names of all adapters from ``lost`` on."""

    lost = 10**6

    def served(self, path, request):
        answer = super().served(path, request)
        if path == "/v1/load_lora_adapter" and int(request["lora_name"].rpartition("-")[2]) >= self.lost:
            for name, parameter in self.adapters[request["lora_name"]].named_parameters():
                parameter.data *= "lora_B" not in name
        return answer


@pytest.fixture
def losing(small):
    server = Losing(small)
    yield server
    server.stop()


@pytest.mark.slow
def test_an_adapter_that_is_lost_at_step_5_ends_the_run_after_two_rollouts(losing, small, chars, tmp_path):
    trainer = trainer_of(losing.url, small, chars, tmp_path, max_steps=12, staleness=1, learning_rate=1e-4)
    move(trainer.model, 0.3)  # as far as a long training goes
    generation = trainer.vllm_generation
    sync = generation.sync_weights

    def sync_and_lose():
        if trainer.state.global_step == 5:
            losing.lost = generation.sampler.store.sent + 1
        sync()

    generation.sync_weights = sync_and_lose
    with pytest.raises(UserError, match="vLLM samples the wrong model: after sync"):
        trainer.train()
    # The second rollout that differs is not trained on: one is ahead.
    assert trainer.state.global_step == 7
