"""Latents at which the outcomes of a few rows are at the centre of their laws.

A narrow likelihood has a mode that no draw of the prior comes near, and whose slope underflows a few of its widths away. The
rows show where it is: choose as many of them at random as there are latents, and for each an outcome or a component of its
mixture, and move the latents so that every location equals its outcome (Gauss-Newton; one step if the locations are
linear). If all of these rows come from the chosen components, Newton's method on the posterior converges from there. This is
random sample consensus (Fischler and Bolles 1981) for starting points.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.approximate.block_posterior import embed
from ppl_bandit.engines.approximate.blocks import Blocks
from ppl_bandit.engines.approximate.unconstrained import Space
from ppl_bandit.engines.row_buffer import Buffer, read_buffer, take_rows
from ppl_bandit.types import Key

MAX_ROWS = 32  # that one start fits
_NUM_STEPS = 6  # of Gauss-Newton, which squares an error of half its reach to 2^-64
_MIN_INDEPENDENT = 1e-3  # share of a gradient's length that is orthogonal to those before


def row_starts(
    space: Space, blocks: Blocks, block: Int[Array, ""] | int, buffer: Buffer, reference: Float[Array, " K"]
) -> Callable[[Key, Float[Array, "S k"], Float[Array, " k"], Float[Array, "k k"]], Float[Array, "S k"]] | None:
    """Return the function (key, draws, centre, root) -> starts near these draws, all in coordinates whitened by the root.

    Returns:
        None if no location of an outcome depends on latents.
    """
    locations = space.locations
    if locations is None:
        return None
    has_one_block = len(blocks.coordinates) == 1
    num = min(blocks.coordinates.shape[1], MAX_ROWS)

    def find(key: Key, draws: Array, centre: Array, root: Array) -> Array:
        data = read_buffer(buffer, 1.0, None if has_one_block else jnp.asarray(blocks.of_arm) == block)

        def move_to_rows(key: Key, first: Float[Array, ""], start: Float[Array, " k"]) -> Float[Array, " k"]:
            which = jr.uniform(key, (2, num), start.dtype).at[0, 0].set(first)
            place = jnp.floor(which[0] * data.num_rows).astype(int)
            rows = take_rows(data.rows, data.places[jnp.minimum(place, len(data.places) - 1)])

            def gaps(x: Array) -> tuple[Array, Array]:
                latents = space.constrain(embed(blocks, block, centre + root @ x, reference))
                found = locations(latents, rows)
                differences = found.outcomes - found.locations
                column = jnp.floor(which[1] * differences.shape[1]).astype(int)
                gap = jnp.take_along_axis(differences, column[:, None], axis=1)[:, 0]
                return gap, gap

            def step(_: Array, x: Array) -> Array:
                slopes, own = jax.jacfwd(gaps, has_aux=True)(x)
                moved = x + _shortest_step(-slopes, own)
                return jnp.where(jnp.all(jnp.isfinite(moved)), moved, x)

            return jax.lax.fori_loop(0, _NUM_STEPS, step, start)

        key_first, key_rows = jr.split(key)
        # Multiples of the golden ratio visit all rows evenly: each of few modes has a row among the first ones.
        first = (jr.uniform(key_first, dtype=draws.dtype) + 0.6180339887 * jnp.arange(len(draws))) % 1.0
        return jax.vmap(move_to_rows)(jr.split(key_rows, len(draws)), first, draws)

    return find


def _shortest_step(gradients: Float[Array, "n k"], gaps: Float[Array, " n"]) -> Float[Array, " k"]:
    """Return the shortest step with gradients @ step = gaps, for rows in order of priority.

    A row whose gradient is a combination of those before it (another reward of the same arm) is skipped: a compromise between
    contradictory rows would fit none of them.
    """

    def add_row(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        basis, step = carry
        own = gradients[number]
        rest = own - (basis @ own) @ basis
        length, whole = jnp.linalg.norm(rest), jnp.linalg.norm(own)
        is_new = length > _MIN_INDEPENDENT * whole
        unit = jnp.where(is_new, rest / jnp.where(is_new, length, 1.0), 0.0)
        missing = (gaps[number] - own @ step) / jnp.where(is_new, length, 1.0)
        return basis.at[number].set(unit), step + missing * unit

    start = jnp.zeros_like(gradients), jnp.zeros(gradients.shape[1], gradients.dtype)
    return jax.lax.fori_loop(0, gradients.shape[0], add_row, start)[1]
