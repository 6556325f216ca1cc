"""Write gallery.md and its figures: every bundled model, played for a while, in its own words.

python docs/make_gallery.py [MODEL ...]
"""

import sys
import textwrap
from pathlib import Path

import jax
import jax.random as jr
import numpy as np

from ppl_bandit import Bandit, Environment, RewardModel
from ppl_bandit.commands.model_files import bundled_models, load_model

NUM_STEPS = 200
HERE = Path(__file__).parent


def play(name: str) -> Bandit:
    """Play a model at its truth for some steps, and return the bandit."""
    file = load_model(name)
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    world = Environment(model, file.truth or {}, file.contexts)
    bandit = Bandit(model)
    with jax.enable_x64(True):
        draw = jax.jit(world.draw_reward)
        for step, key in enumerate(jr.split(jr.key(0), NUM_STEPS)):
            key_context, key_reward = jr.split(key)
            context = jax.device_get(world.draw_context(key_context))
            decision = bandit.select(context)
            reward = jax.device_get(draw(key_reward, np.int64(decision.arm), context, step + 1))
            bandit.update(decision, reward)
    return bandit


def section(name: str) -> str:
    """Return a model's section of the page, and write its figure."""
    bandit = play(name)
    (HERE / "gallery").mkdir(exist_ok=True)
    bandit.plot().savefig(HERE / "gallery" / f"{name}.png", dpi=90)
    words = " ".join((bandit.model.program.__globals__.get("__doc__") or "").split())
    return "\n".join(
        [
            f"## {name}",
            "",
            *textwrap.wrap(words, 128),
            "",
            f"```{{literalinclude}} ../models/{name}.py",
            ":language: python",
            ":start-at: import",
            "```",
            "",
            f"![{name}: posterior of each arm after {NUM_STEPS} rewards, and who was played](gallery/{name}.png)",
            "",
            "```text",
            bandit.explain(),
            "```",
            "",
        ]
    )


def main(names: list[str]) -> None:
    """Write the page with all models, or print the sections of some."""
    sections = [section(name) for name in names or bundled_models()]
    if names:
        print("\n".join(sections))
        return
    head = f"""# Gallery

Every bundled model, played for {NUM_STEPS} steps at its own truth by the live bandit, with what it says of itself. Programs are
plain files to copy; `ppl-bandit check NAME` and `ppl-bandit run NAME` know them by name. This page is written by
`python docs/make_gallery.py`.

"""
    (HERE / "gallery.md").write_text(head + "\n".join(sections))


if __name__ == "__main__":
    main(sys.argv[1:])
