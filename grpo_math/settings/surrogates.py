"""Surrogate and reduction are two settings, ``surrogate`` and ``loss_type``. Three of TRL's loss types name both."""

# TRL's loss_type -> the surrogate that it names, and the loss_type with which TRL reduces it.
TRL_LOSSES = {"cispo": ("cispo", "dapo"), "sapo": ("sapo", "grpo"), "vespo": ("vespo", "dapo")}
# A surrogate -> the settings that it reads, of those that only surrogates read.
READ_BY = {
    "clip": "epsilon epsilon_high delta",
    "reinforce": "",
    "gmpo": "epsilon epsilon_high",
    "cispo": "epsilon epsilon_high",
    "dppo": "dppo_high dppo_low",
    "dppo_kl": "dppo_high dppo_low",
    "sapo": "sapo_temperature_pos sapo_temperature_neg",
    "vespo": "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
}


def surrogate_and_reduction(surrogate: str, loss_type: str) -> tuple[str, str]:
    """Return the surrogate, and the loss_type that only reduces.

    >>> surrogate_and_reduction("clip", "sapo"), surrogate_and_reduction("sapo", "prompt_mean")
    (('sapo', 'grpo'), ('sapo', 'prompt_mean'))
    """
    named, reduction = TRL_LOSSES.get(loss_type, (surrogate, loss_type))
    return named if surrogate == "clip" else surrogate, reduction
