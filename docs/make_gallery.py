"""Write gallery.md and its figures: every bundled model, played for a while, in its own words.

python docs/make_gallery.py [MODEL ...]

With models it writes their sections and figures again and leaves the others as they are.
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
from ppl_bandit.commands.model_files import bundled_models, load_model

__all__ = ["HERE", "explained", "play", "sections_of"]

NUM_STEPS = 150
BATCH = {"mixture": 25, "student_t": 25}  # decisions at a time, where every new reward would mean a whole run of NUTS
HERE = Path(__file__).parent

HEAD = f"""# Gallery

Every bundled model, played by the live bandit for {NUM_STEPS} decisions in a world where its own `truth` holds, with what the
bandit then says of itself (`bandit.explain()`, `bandit.plot()`). What each block of that text means is in
[reading `explain()`](explain.md). The programs are plain files to copy; `ppl-bandit check NAME`, `run NAME` and `compare NAME`
know them by name. On the left of a figure stands what is known of each arm after these rewards, on the right who was played.
`mixture` and `student_t` decide and learn 25 rows at a time (`select_many`, `update_many`).
"""


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
    """Return what a bandit says of itself, with "..." for sizes that rounding decides."""
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
    Image.open(drawn).convert("RGB").quantize(64).save(HERE / "gallery" / f"{name}.png", optimize=True)
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
            f"![{name}: posterior of each arm's expected reward, and who was played](gallery/{name}.png)",
            "",
            "```text",
            explained(bandit).rstrip(),
            "```",
            "",
        ]
    )


def main(names: list[str]) -> None:
    """Write the page, with new sections for some models or for all."""
    path = HERE / "gallery.md"
    for name in names or bundled_models():
        text = section(name)
        kept = sections_of(path.read_text()) if path.exists() else {}
        kept[name] = text
        path.write_text(HEAD + "\n" + "\n".join(kept[each].rstrip() + "\n" for each in sorted(kept)))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
