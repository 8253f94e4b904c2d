"""The symptoms of a run that learns nothing, learns less than it could, or gets worse; each with its bound.

Each symptom has one function: a `RunSeries` -> `Symptom` or None. Bounds that series.py needs too are defined there.

diagnosis.py has the cause and the remedy of each.
"""

import math
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from grpo_math.checks.series import RISE, SATURATED, SURE, TREND, WINDOW, Change, RunSeries, Series
from grpo_math.rewards.functions import SHIPPED
from grpo_math.run import metrics

FEW = 20  # lines before a level is judged: truncation is 30% in the demo's first ten lines, and then falls
LONG_TREND = 60  # lines before format and accuracy are compared: a healthy run learns the format first
MAX_P_VALUE = 0.05  # probability of a series of lines without a reward, if the problems had always been that hard
FALL = 0.2  # of the reward's range; a series of harder problems can cost less than that
FALL_SURE = 4.0  # standard errors; high, because the peak is the best of many windows
FORMAT_RISE = 0.2  # of the format's range: a change that can be seen in the completions
KL_EXPLODED = 5.0  # nats a token; becoming sure costs at most about the reference's entropy, 1 to 2 nats
KL_FIRST = 0.01  # nats a token at step 1; bfloat16 rounding between two ways to score stays below 0.002
ENTROPY_SHARE = 0.2  # of the entropy at the start; in a healthy run the entropy falls as far, but the reward rises
ENTROPY_ROSE = 1.4  # times the entropy at the start, with a reward that does not rise; in a healthy run it falls
LONGER = 1.3  # times the length at the start, with an accuracy that does not rise
TRUNCATED_SHARE = 0.2  # of the completions; the update then mostly teaches to be short
MOST_CUT = 0.5  # of the completions, in a run that has only begun
NONE_ENDED = 0.999  # truncated share at which no completion ended by itself
EXCLUDES_5_PERCENT = 59  # completions without a correct one: with 5%, that happens once in 20 times
LONG_LIMIT = 256  # tokens that an answer to these problems needs at most: if nothing ends by then, nothing would
UNIFORM = 0.8  # share of groups without signal; four fifths of the generation are wasted
UNCHECKABLE_SHARE = 0.01  # of the answers; each is rewarded like a wrong answer
FADED = 0.8  # mean weight of the longest completions; short completions keep a weight of 1
MAX_SAMPLER_DIFFERENCE = 0.1  # nats a token; bfloat16 against bfloat16 differs by 0.02 to 0.05
WORSE = 0.02  # of the held-out problems
WORSE_SURE = 2.6  # standard errors; a run that changed nothing exceeds them with a probability of 1 in 200
GRADIENT_GREW = 5.0  # times its median in the first lines; a healthy gradient norm at most doubles
POLICY_MOVED = 0.1  # nats a token between sampling and update; PPO stops an update early at 0.01 to 0.05


class Symptom(NamedTuple):
    """A symptom of a run: the numbers in words, and the line of the recipe."""

    words: str
    setting: str


def flat_reward(run: RunSeries) -> Symptom | None:
    """The rise from the first lines to the last third is clearly below `RISE` of the range."""
    change = run.not_rising
    # A reward that clearly falls is not flat: `collapse` looks at it.
    fell = change and change.rise < -SURE * change.error - RISE / 2 * run.span
    return Symptom(change.words, run.learning_rate(3)) if change and not fell else None


def collapse(run: RunSeries) -> Symptom | None:
    """The newest window's mean is clearly below the best earlier window's, by `FALL` of the range.

    Or rewards stopped so early that there are not two windows to compare.
    """
    reward = run.series(metrics.REWARD)
    if not run.comparable:
        return None
    if len(reward) < TREND:
        return _rewards_lost(run)
    # Every window that ends before the newest one begins.
    starts = range(len(reward) - 2 * WINDOW + 1)
    means = [fmean(reward.values[i : i + WINDOW]) for i in starts]
    best = max(starts, key=means.__getitem__)
    late = reward.last()
    # Both means are over one window, so the variances of two windows add up.
    drop, error = means[best] - fmean(late.values), reward.noise * math.sqrt(2 / WINDOW)
    if drop < max(FALL * run.span, FALL_SURE * error):
        return _rewards_lost(run)
    peak = Series(reward.steps[best : best + WINDOW], [])
    words = f"{means[best]:.2f} in {peak.span}, {fmean(late.values):.2f} in {late.span}"
    # The reward may stay at its peak for long: the fall begins after the last window that is as good.
    end = max(i for i in starts if means[i] >= means[best] - error) + WINDOW
    return Symptom(words, f"{run.learning_rate(0.5)}; {_checkpoint(run, reward.steps[:end])}")


def _rewards_lost(run: RunSeries) -> Symptom | None:
    """The last ``n`` lines have no reward above the lowest, ``r`` of the ``k`` lines before do, beyond chance:

        P(none in n | r of k) = B(r + 1, k - r + n + 1) / B(r + 1, k - r + 1) < `MAX_P_VALUE`

    Before the run, all shares of rewarded lines are equally likely (Laplace's rule of succession).
    """
    top = run.series(metrics.REWARD_MAX)
    rewarded = [value > run.bottom + 1e-9 for value in top.values]
    if not any(rewarded):
        return None
    n = rewarded[::-1].index(True)
    k, r = len(top) - n, sum(rewarded)
    if n < WINDOW or math.prod((k - r + i) / (k + 1 + i) for i in range(1, n + 1)) >= MAX_P_VALUE:
        return None
    before, none = top.first(k), top.last(n)
    words = f"{r} of the {k} lines up to step {before.steps[-1]} have a reward, none in {none.span}"
    return Symptom(words, f"{run.learning_rate(0.1)}; {_checkpoint(run, before.steps)}")


def _checkpoint(run: RunSeries, peak: list[int]) -> str:
    """Name the last checkpoint before the fall, or the setting that would have saved one.

    >>> _checkpoint(RunSeries([], {}, ["checkpoint-60", "checkpoint-80"]), [61, 62])
    'checkpoint-60 is from before the fall'
    >>> _checkpoint(RunSeries([], {}, ["checkpoint-80"]), [61, 62])
    'no checkpoint of the peak was saved: keep_best: true'
    """
    earlier = [step for step in run.saved if step <= peak[-1]]
    if earlier:
        return f"checkpoint-{earlier[-1]} is from before the fall"
    setting = f"save_steps: {WINDOW}" if run.get("keep_best", False) else "keep_best: true"
    return f"no checkpoint of the peak was saved: {setting}"


def reward_stuck(run: RunSeries) -> Symptom | None:
    """The smallest reward equals the largest in each of the newest lines."""
    low, top = run.series(metrics.REWARD_MIN).last(), run.series(metrics.REWARD_MAX).last()
    if len(low) < WINDOW or low.steps != top.steps:
        return None
    if any(b - a > 1e-9 for a, b in zip(low.values, top.values, strict=True)):
        return None
    right = run.series(metrics.ACCURACY).level
    if run.own_rewards:
        return Symptom(f"{median(low.values):g} in {low.span}", _finer(run))
    setting = "dataset: another"
    if run.series(metrics.TRUNCATED).level > 0.5:
        setting = _longer(run)  # the completion is cut off before the answer
    elif 0 < right < 1:
        setting = "rewards: [accuracy]"  # the rewards do not depend on whether the answer is right
    elif run.series(metrics.verdict_key("no_answer")).level > 0.5:
        setting = "rewards: [shaped]"  # gives a small reward for the format
    return Symptom(f"{median(low.values):g} in {low.span}, {percent(right)} of the answers correct", setting)


def _finer(run: RunSeries) -> str:
    return f"rewards: finer ones than {', '.join(run.own_rewards)}"


def format_without_accuracy(run: RunSeries) -> Symptom | None:
    """A format reward (or the share of completions with an answer) rises by `FORMAT_RISE`, the accuracy does not."""
    accuracy = run.change(metrics.ACCURACY, LONG_TREND)
    if accuracy is None or not run.comparable or not accuracy.below(RISE) or fmean(accuracy.late.values) > SATURATED:
        return None
    # A user may want the format alone.
    if run.own_rewards and all("format" in name for name in run.own_rewards):
        return None
    # A user's reward counts as one of the format by its name. Without any, fewer completions lack an answer.
    rewards = [str(name).rpartition(":")[2] for name in run.get("rewards", [])]
    names = {*(name for name, one in SHIPPED.items() if one.is_format), *(name for name in rewards if "format" in name)}
    for key in (*map(metrics.reward_key, sorted(names)), metrics.verdict_key("no_answer")):
        if (change := run.change(key, LONG_TREND)) is None:
            continue
        rise = -change.rise if key == metrics.verdict_key("no_answer") else change.rise
        if rise - SURE * change.error > FORMAT_RISE:
            return Symptom(f"{key} {change.words}; accuracy {accuracy.words}", "rewards: [accuracy, gated]")
    return None


def kl_explosion(run: RunSeries) -> Symptom | None:
    """The median of the newest lines is above `KL_EXPLODED`."""
    kl = run.series(metrics.KL).last()
    seen = Symptom(f"{kl.level:.3g} nats a token in {kl.span}", run.learning_rate(0.3))
    return seen if len(kl) >= WINDOW and kl.level >= KL_EXPLODED else None


def kl_not_zero_at_start(run: RunSeries) -> Symptom | None:
    """The KL at step 1, before any weight has changed, is not zero."""
    kl = run.series(metrics.KL).first(1)
    # A new adapter adds exactly zero, with or without lora_dropout. TRL's disable_dropout turns off modules, and
    # attention_dropout is not a module.
    setting = "disable_dropout: true, and model_init_kwargs: {attention_dropout: 0.0}"
    seen = Symptom(f"{kl.level:.3g} nats a token at step 1", setting)
    return seen if kl.steps == [1] and abs(kl.level) > KL_FIRST and run.get("logging_steps", 1) == 1 else None


def entropy_collapse(run: RunSeries) -> Symptom | None:
    """The entropy fell below `ENTROPY_SHARE` of its start, and the reward clearly does not rise."""
    entropy, change = run.series(metrics.ENTROPY), run.not_rising
    # The first lines only: in a healthy run, too, the entropy falls fast.
    before = entropy.first(WINDOW // 2).level
    if change is None or run.skips_other_groups or len(entropy) < TREND or entropy.level > ENTROPY_SHARE * before:
        return None
    words = f"{before:.2g} nats at first, {entropy.level:.2g} in {entropy.last().span}; reward {change.words}"
    return Symptom(words, "entropy_coef: 0.001")


def entropy_rises(run: RunSeries) -> Symptom | None:
    """The entropy is clearly above `ENTROPY_ROSE` times its start, and the reward clearly does not rise."""
    entropy, change = run.change(metrics.ENTROPY), run.not_rising
    if entropy is None or change is None or run.skips_other_groups or not _grew(entropy, ENTROPY_ROSE):
        return None
    setting = "entropy_coef: 0.0" if run.get("entropy_coef", 0.0) else run.learning_rate(0.3)
    return Symptom(f"entropy {entropy.words} nats; reward {change.words}", setting)


def length_without_accuracy(run: RunSeries) -> Symptom | None:
    """The mean length is clearly above `LONGER` times its start, and the accuracy clearly does not rise."""
    length, accuracy = run.change(metrics.LENGTH_MEAN), run.change(metrics.ACCURACY)
    if length is None or accuracy is None or not run.comparable or not _grew(length, LONGER):
        return None
    # A full accuracy cannot rise.
    if not accuracy.below(RISE / 2) or fmean(accuracy.late.values) > SATURATED:
        return None
    # The user's rewards rise with the length: they pay for something else than a correct answer.
    if run.own_rewards and (reward := run.change(metrics.REWARD)) and reward.rise > SURE * reward.error:
        return None
    words = f"{fmean(length.early.values):.0f} tokens in {length.early.span}, {fmean(length.late.values):.0f} in"
    return Symptom(f"{words} {length.late.span}; accuracy {accuracy.words}", "rewards: [accuracy, overlong]")


def _grew(change: Change, factor: float) -> bool:
    """Return True if the late mean is above ``factor`` times the early mean by `SURE` standard errors."""
    return change.rise - SURE * change.error > (factor - 1) * fmean(change.early.values)


def reward_without_heldout(run: RunSeries) -> Symptom | None:
    """The reward clearly rose by 2 `RISE` of its range, and held-out accuracy clearly by less than half as much."""
    reward = run.change(metrics.REWARD) if run.comparable else None
    if len(run.evaluations) < 2 or reward is None or reward.rise - SURE * reward.error <= 2 * RISE * run.span:
        return None
    (_, before, m), *_, (step, after, n) = run.evaluations
    share, p = reward.rise / run.span, (before + after) / 2
    error = math.sqrt(p * (1 - p) * (1 / m + 1 / n))
    # A full accuracy cannot rise.
    if after > SATURATED or after - before + SURE * error >= share / 2:
        return None
    words = f"reward {reward.words}; held-out accuracy {percent(before)}, then {percent(after)}"
    return Symptom(f"{words} at step {step}", "rewards: [accuracy]")


def truncation(run: RunSeries) -> Symptom | None:
    """The median truncated share of the newest lines is above `TRUNCATED_SHARE`, before line `FEW` above `MOST_CUT`."""
    cut = run.series(metrics.TRUNCATED)
    seen = Symptom(f"{percent(cut.level)} in {cut.last().span}", _longer(run))
    return seen if cut.level > (TRUNCATED_SHARE if len(cut) >= FEW else MOST_CUT) else None


def none_correct(run: RunSeries) -> Symptom | None:
    """No completion is correct in any line, although a reward pays for correct answers.

    There are at least `EXCLUDES_5_PERCENT` completions, if the settings say how many a step has.
    """
    right = run.series(metrics.ACCURACY)
    if run.own_rewards or not right.values or max(right.values):
        return None
    per_step = run.get("prompts_per_step", 0) * run.get("num_generations", 0)
    per_step = per_step or run.get("per_device_train_batch_size", 0) * run.get("gradient_accumulation_steps", 1)
    completions = right.steps[-1] * per_step
    if 0 < completions < EXCLUDES_5_PERCENT:
        return None
    return Symptom(f"0% in {right.span}", "dataset: another")


def _longer(run: RunSeries) -> str:
    return f"max_completion_length: {2 * run.get('max_completion_length', 256)}"


def eos_mismatch(run: RunSeries) -> Symptom | None:
    """No completion has ended by itself since the start, although answers are correct or the limit is ample."""
    cut, best = run.series(metrics.TRUNCATED), max(run.series(metrics.ACCURACY).values, default=0)
    # A model that rambles under a small limit never ends either, but then hardly any answer is correct.
    limit = run.get("max_completion_length", LONG_LIMIT)
    if len(cut) < WINDOW or min(cut.values) < NONE_ENDED or (best == 0 and limit < LONG_LIMIT):
        return None
    words = f"all of {cut.span} reach the limit of {limit} tokens, though up to {percent(best)} are correct"
    return Symptom(words, "eos_token_id: [...] in generation_config.json")


def uniform_groups(run: RunSeries) -> Symptom | None:
    """The mean share of groups with equal rewards is at least `UNIFORM`.

    The mean, not the median: in a run with one prompt per step, each line's share is 0 or 1.
    """
    uniform, right, wrong = (
        run.series(name).last(FEW) for name in (metrics.DEGENERATE, metrics.ALL_RIGHT, metrics.ALL_WRONG)
    )
    words = f"{percent(uniform.mean)} in {uniform.span}"
    if run.own_rewards:
        seen = Symptom(words, _finer(run))
    else:
        shares = f"{percent(right.mean)} all correct, {percent(wrong.mean)} all wrong"
        seen = Symptom(f"{words}, {shares}", "resample_groups: 3")
    return seen if len(uniform) >= FEW and uniform.mean >= UNIFORM else None


def adapter_not_moving(run: RunSeries) -> Symptom | None:
    """Gradients are zero and advantages are not, or the learning rate is zero."""
    rate = run.series(metrics.LEARNING_RATE)
    if len(rate) >= WINDOW and max(rate.values) == 0:
        return Symptom(f"a learning rate of 0 in {rate.span}", "learning_rate: 1e-5")
    # Groups of equal rewards have no gradient, so that only steps with advantages can show that nothing is trained.
    signal = [line for line in run.lines if line.get(metrics.ADVANTAGE_STD, 0) > 0 and metrics.GRAD_NORM in line]
    if len(signal) >= WINDOW and all(line[metrics.GRAD_NORM] == 0 for line in signal):
        setting = "lora_target_modules: all-linear" if run.get("use_peft", False) else run.learning_rate(3)
        return Symptom(f"a gradient of 0 in {len(signal)} steps whose advantages are not 0", setting)
    return None


def uncheckable_answers(run: RunSeries) -> Symptom | None:
    """The mean uncheckable share of the newest `FEW` lines is above `UNCHECKABLE_SHARE`."""
    late = run.series(metrics.verdict_key("uncheckable")).last(FEW)
    longer = f"grade_timeout: {2 * run.get('grade_timeout', 5.0):g}"
    seen = Symptom(f"{percent(late.mean)} of the answers in {late.span}", longer)
    return seen if len(late) >= FEW and late.mean > UNCHECKABLE_SHARE else None


def sampler_apart(run: RunSeries) -> Symptom | None:
    """TRL's mean distance between vLLM's and the trainer's log-probs has a median above `MAX_SAMPLER_DIFFERENCE`."""
    difference = run.series(metrics.SAMPLER_DIFFERENCE).last()
    seen = Symptom(f"{difference.level:.2g} nats a token in {difference.span}", "cast_lm_head_to_fp32: true")
    return seen if len(difference) >= WINDOW and difference.level > MAX_SAMPLER_DIFFERENCE else None


def long_completions_fade(run: RunSeries) -> Symptom | None:
    """The longest completions have a mean weight below `FADED` in TRL's sequence modes.

    The weight follows from the spread of the summed log-ratios. With independent normal log-ratios of standard
    deviation sigma and mean -sigma^2 / 2, a completion of T tokens has a weight w with ln w ~ N(-s^2 / 2, s^2),
    s = sigma sqrt(T). Up to a limit c its mean is

        E[w; w <= c] = Phi((ln c - s^2 / 2) / s), and with truncation c P(w > c) = c Phi((-ln c - s^2 / 2) / s) more.
    """
    mode = run.get("vllm_importance_sampling_mode", "sequence_mask")
    limit = run.get("vllm_importance_sampling_clip_max", 3.0)
    spread, length = run.series(metrics.LOGP_SUM_SPREAD).last(), run.series(metrics.LENGTH_MAX).level
    s = spread.mean * math.sqrt(length)
    if len(spread) < WINDOW or not mode.startswith("sequence") or s == 0:
        return None
    below, above = (NormalDist().cdf((sign * math.log(limit) - s**2 / 2) / s) for sign in (1, -1))
    weight = below + (limit * above if mode == "sequence_truncate" else 0)
    words = f"a completion of {length:,.0f} tokens keeps {percent(weight)} of its gradient in {spread.span}"
    return Symptom(words, "vllm_importance_sampling_mode: token_truncate") if weight < FADED else None


def heldout_worse(run: RunSeries) -> Symptom | None:
    """The newest held-out accuracy is clearly below that of step 0: z = d / sqrt(p (1 - p) (1/n + 1/m))."""
    if len(run.evaluations) < 2 or run.evaluations[0][0] != 0:
        return None
    (_, base, m), *_, (step, now, n) = run.evaluations
    pooled = (base * m + now * n) / (m + n)
    if base - now <= max(WORSE, WORSE_SURE * math.sqrt(pooled * (1 - pooled) * (1 / m + 1 / n))):
        return None
    words = f"{percent(base)} of {m:g} problems before training, {percent(now)} of {n:g} at step {step}"
    return Symptom(words, run.learning_rate(0.3))


def heldout_fell(run: RunSeries) -> Symptom | None:
    """The newest held-out accuracy is clearly below the best of the earlier ones: z as in `heldout_worse`."""
    if len(run.evaluations) < 2:
        return None
    *earlier, (step, now, n) = run.evaluations
    best_step, best, m = max(earlier, key=lambda one: one[1])
    pooled = (best * m + now * n) / (m + n)
    # The best of many is high by chance, too.
    if best - now <= FALL_SURE * math.sqrt(pooled * (1 - pooled) * (1 / m + 1 / n)):
        return None
    words = f"{percent(best)} of {m:g} problems at step {best_step}, {percent(now)} of {n:g} at step {step}"
    return Symptom(words, f"{run.learning_rate(0.5)}; {_checkpoint(run, [best_step])}")


def learning_rate_too_high(run: RunSeries) -> Symptom | None:
    """Gradients grew `GRADIENT_GREW` times, or the policy moves too far from its rollout."""
    gradient, moved = run.series(metrics.GRAD_NORM), run.series(metrics.APPROX_KL)
    # Gradients below max_grad_norm are not clipped. They may grow from a small start without harm.
    ceiling = run.get("max_grad_norm", 1.0) or 1.0
    if len(gradient) >= TREND:
        start, before = gradient.first().span, median(gradient.first().values)
        if before > 0 and gradient.level > max(GRADIENT_GREW * before, ceiling):
            words = f"gradient norm {before:.2g} in {start}, {gradient.level:.2g} in {gradient.last().span}"
            return Symptom(words, run.learning_rate(0.3))
    # The mean, because the first of several updates on a rollout has not moved at all.
    if len(moved) >= FEW and (mean := fmean(moved.last(FEW).values)) > POLICY_MOVED:
        words = f"{mean:.2g} nats a token from sampling to update in {moved.last(FEW).span}"
        return Symptom(words, run.learning_rate(0.3))
    return None


def percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
