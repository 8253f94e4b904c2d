r"""Verdicts -> numbers: plain functions with TRL's signature, and the `REWARDS` table of their names.

Every function takes ``(prompts, completions, **columns)``. It returns one number per completion, or None if the answer
could not be graded. TRL leaves None out of the sum, so None is never counted as 0. Completions are texts or chat
messages. The functions read the columns ``answer`` (the gold answer; TRL's name ``solution`` works too),
``answer_format`` and ``completion_ids``, and what the trainer adds under reserved keys (inputs.py). A reward
with other numbers is a function of your own (``my_rewards:overlong``).

>>> accuracy(["1 + 1?", "1 + 1?"], ["#### 2", "#### 3"], answer=["2", "2"])
[1.0, 0.0]
>>> gsm8k(["1 + 1?", "1 + 1?"], ["#### 2", "It is 2."], answer=["2", "2"])
[1.0, 0.0]

TRL weighs and sums the rewards (``reward_weights``).
"""

from grpo_math.errors import ConfigError, require_choice
from grpo_math.rewards.functions import REWARDS, accuracy, gsm8k
from grpo_math.rewards.inputs import Reward, completion_text
from grpo_math.system.user_functions import is_user_function, load_function

__all__ = ["REWARDS", "Reward", "accuracy", "completion_text", "gsm8k", "load_reward"]


def load_reward(name: str) -> Reward:
    """Return the reward function with this name.

    The name is a key of `REWARDS`, or ``module:function`` from the Python path or the current folder.

    >>> load_reward("accuracy") is accuracy
    True
    >>> load_reward("acuracy")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: reward_funcs='acuracy' is not known: did you mean 'accuracy'? ...
    """
    if is_user_function(name):
        return load_function("reward_funcs", name)
    module, dot, function = name.rpartition(".")
    if dot:  # as `trl grpo` writes a function of the user
        raise ConfigError("reward_funcs", name, "is not known", f"did you mean {module}:{function}?")
    require_choice("reward_funcs", name, tuple(REWARDS))
    return REWARDS[name]
