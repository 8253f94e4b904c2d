"""The run, its steps, checkpoints and log: settings and rules."""

from dataclasses import dataclass

from grpo_math.settings.declare import Facts, Rule, entries, setting, without

FACTS: Facts = {
    "prompts_per_step": {"ge": 0},
    "dry_run": {"resume": "may_change"},
    "measure": {"resume": "may_change"},
    "resume": {"choices": ("auto", "force"), "resume": "may_change"},
    "watchdog_minutes": {"ge": 0, "resume": "may_change"},
}


@dataclass
class Run:
    """The run."""

    prompts_per_step: int = setting(
        0,
        "Prompts in one optimizer step, over all processes; 0: TRL's own fields decide. With a number, "
        "per_device_train_batch_size limits the rows of one pass.",
    )
    dry_run: bool = setting(False, "Do everything before the first step except the evaluation, then stop.")
    measure: bool = setting(
        False,
        "Train on two rollouts of full length (on a CPU: one, cut short), print seconds, hours and memory, and keep "
        "nothing.",
    )
    resume: str = setting(
        "auto",
        "If output_dir already contains a run: auto continues it if its settings are the same, force continues "
        "it with the new settings.",
    )
    watchdog_minutes: float = setting(
        20.0,
        "After this many minutes without a step, every rank prints its stacks; 0: off. Keep it below ddp_timeout "
        "(30 minutes).",
    )

    @property
    def keeps_nothing(self) -> bool:
        """Return True if no file of a run is written."""
        return self.dry_run or self.measure


PROGRAM_RULES = [
    Rule(
        "error",
        "trust_remote_code",
        lambda s: s.trust_remote_code,
        "would run code of a model repository",
        "leave it off",
    ),
    Rule(
        "error",
        "remove_unused_columns",
        lambda s: s.remove_unused_columns,
        "would take the gold answers away from the rewards",
    ),
    Rule(
        "error",
        "logging_strategy",
        lambda s: s.logging_strategy == "no",
        "would leave the run without its history",
        "leave it out, or set logging_steps",
    ),
    Rule(
        "error",
        "ignore_data_skip",
        lambda s: s.ignore_data_skip,
        "would resume with different problems than the run stopped at",
    ),
    Rule(
        "error",
        "accelerator_config",
        lambda s: any(entries(s.accelerator_config).get(f"{how}_batches") for how in ("split", "dispatch")),
        "would tear groups of completions apart",
    ),
    Rule("error", "output_dir", lambda s: not s.output_dir, "is missing", "name the folder that the run writes to"),
    Rule(
        "warning",
        "save_only_model",
        lambda s: s.save_only_model,
        "leaves the optimizer out of checkpoints: a run that stops cannot be resumed",
    ),
    Rule(
        "no_effect",
        "num_train_epochs",
        lambda s: s.max_steps > 0,
        "max_steps={max_steps} ends the run",
        "max_steps: -1",
    ),
    Rule("no_effect", "save_steps", lambda s: s.save_strategy == "no", "save_strategy is no", "save_strategy: steps"),
    Rule(
        "warning",
        "logging_steps",
        lambda s: s.max_steps > 0 and s.logging_steps > s.max_steps,
        "of max_steps={max_steps}: the history stays empty",
        "logging_steps: 1",
    ),
    Rule(
        "warning",
        "warmup_steps",
        lambda s: s.max_steps > 0 and s.warmup_steps >= s.max_steps and s.lr_scheduler_type != "constant",
        "of max_steps={max_steps}: the learning rate is never reached",
        "give a tenth of max_steps",
    ),
    without("log_completions", "num_completions_to_print log_unique_prompts"),
    # A run is pushed once, at its end.
    without("push_to_hub", "hub_model_id hub_private_repo hub_revision"),
    Rule(
        "no_effect",
        "hub_strategy",
        lambda s: s.push_to_hub and s.hub_strategy != "end",
        "a run is pushed once, at its end",
        "hub_strategy: end",
    ),
    without("use_liger_kernel", "liger_kernel_config"),
]
