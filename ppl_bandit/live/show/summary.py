"""What `Bandit.explain` says beyond the engine's own account: the arms so far, and how the next one is chosen."""

from ppl_bandit.live.show.overview import Overview
from ppl_bandit.types import Explanation

__all__ = ["describe"]


def describe(
    explanation: Explanation,
    found: Overview,
    selector: str,
    log_evidence: tuple[float, float] | None = None,
    doubts: str = "",
) -> str:
    """Return the whole account of a live bandit.

    Args:
        found: where the arms stand.
        selector: name of who decides.
        log_evidence: of the program so far and its standard error, from an engine that adds it up.
        doubts: why the draws lack evidence; empty where they do not.
    """
    num_rewards = int(found.num_rewards.sum())
    lines = [str(explanation), "", f"  learnt from {num_rewards} rewards; decisions by {selector}"]
    if doubts:
        lines.append(f"  NOT TRUSTED, and what follows from them with caution: {doubts}")
    if log_evidence is not None:
        lines.append(
            f"  log evidence of the program so far: {log_evidence[0]:.2f} (standard error {log_evidence[1]:.2f}); compare it "
            "with another program's on the same rewards"
        )
    if found.num_contexts:
        if found.num_contexts == 1:
            where = f"at the {'context of one reward' if num_rewards else 'example context'}"
        else:
            where = f"averaged over the contexts of {found.num_contexts} of these rewards"
        lines.append(f"  expected rewards and P(best) are {where}")
    width = max(5, *(len(str(arm)) for arm in found.arms))
    lines.append(
        f"    {'arm':<{width}}  rewards  expected reward [95% interval]      P(best)   ({found.draws.shape[0]} draws)"
    )
    for index, arm in enumerate(found.arms):
        middle = f"{'median ' if found.is_median[index] else ''}{found.mean[index]:.4g}"
        interval = f"{middle} [{found.low[index]:.4g}, {found.high[index]:.4g}]"
        count, share = found.num_rewards[index], found.best_prob[index]
        lines.append(f"    {str(arm):<{width}}  {count:7d}  {interval:<34}  {share:7.3f}")
    if found.is_median.any():
        lines.append(
            "    medians, because one draw makes up most of an average: this expected reward has no expectation to speak of; "
            "maximise what has one, such as the mean of the logarithm"
        )
    return "\n".join(lines)
