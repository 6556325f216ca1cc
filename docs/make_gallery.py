"""Write gallery.md and its figures: every bundled model after 150 decisions, with its explain() text.

python docs/make_gallery.py [MODEL ...]

With models as arguments, only their sections and figures are written again. The text above the first section is kept.
"""

import re
import sys
import textwrap
from io import BytesIO
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from PIL import Image

from ppl_bandit import Bandit, Environment, RewardModel
from ppl_bandit.journal.model_files import bundled_models, load_model

__all__ = ["HERE", "explained", "play", "sections_of"]

NUM_STEPS = 150
BATCH = {"mixture": 25, "student_t": 25}  # decisions at a time: each update may be a NUTS run
HERE = Path(__file__).parent


def play(name: str) -> Bandit:
    """Return a bandit that has played a model at its truth.

    Contexts, and the reward that each arm would give, are drawn for all decisions at once, before the first one is made.
    """
    file = load_model(name)
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    world = Environment(model, file.truth or {}, file.contexts)

    def draw(key):
        key_context, key_reward = jr.split(key)
        context = world.draw_context(key_context)
        every = jax.vmap(lambda arm: world.draw_reward(key_reward, arm, context, 1))(jnp.arange(model.num_arms))
        return context, every

    with jax.enable_x64(True):
        contexts, rewards = jax.device_get(jax.jit(jax.vmap(draw))(jr.split(jr.key(0), NUM_STEPS)))
    bandit, size = Bandit(model), BATCH.get(name, 1)
    for start in range(0, NUM_STEPS, size):
        rows = np.arange(start, start + size)
        decisions = bandit.select_many(jax.tree.map(lambda leaf, rows=rows: leaf[rows], contexts), num_decisions=size)
        arms = np.array([decision.arm for decision in decisions])
        got = jax.tree.map(lambda leaf, rows=rows, arms=arms: leaf[rows, arms], rewards)
        bandit.update_many(decisions=decisions, rewards=got)
    return bandit


def explained(bandit: Bandit) -> str:
    """Return the explain() text, with "..." in place of residuals, which depend on rounding."""
    text = re.sub(r"residual \S+ nats", "residual ... nats", bandit.explain())
    return re.sub(r"tolerance \S+ nats", "tolerance ... nats", text)


def sections_of(page: str) -> dict[str, str]:
    """Return the page's sections, {model: text with its heading}."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part for part in parts}


def section(name: str) -> str:
    """Return a model's section of the page, and write its figure."""
    bandit = play(name)
    (HERE / "gallery").mkdir(exist_ok=True)
    drawn = BytesIO()
    bandit.plot().savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(256, kmeans=2).save(HERE / "gallery" / f"{name}.png", optimize=True)
    words = " ".join((bandit.model.program.__globals__.get("__doc__") or "").split())
    return "\n".join(
        [
            f"## {name}",
            "",
            *textwrap.wrap(words, 128),
            "",
            f"```{{literalinclude}} ../models/{name}.py",
            ":language: python",
            ":start-at: num_arms",
            "```",
            "",
            f"![{name}: posterior of each arm's expected reward, and the arms that were played](gallery/{name}.png)",
            "",
            "<details>",
            "<summary><code>explain()</code></summary>",
            "",
            "```text",
            explained(bandit).rstrip(),
            "```",
            "",
            "</details>",
            "",
        ]
    )


def main(names: list[str]) -> None:
    """Write new sections for some models or for all; the text above the first section stays."""
    path = HERE / "gallery.md"
    for name in names or bundled_models():
        text = section(name)
        page = path.read_text()
        sections = sections_of(page) | {name: text}
        head = page.partition("\n## ")[0].rstrip()
        path.write_text(head + "\n\n" + "\n".join(sections[each].rstrip() + "\n" for each in sorted(sections)))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
