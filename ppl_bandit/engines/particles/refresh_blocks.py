"""Refresh the particles of a block in partially non-centred coordinates.

Where a hierarchy is written with latents centred on their own location and scale, the particles are moved in the coordinates of
`unconstrained.PartialCentring`. The particles determine the centredness: 1 minus the posterior variance of a latent relative to
the square of its scale.

Starts of the search for modes are latents at which the outcomes of a few rows are at the centre of their laws. A narrow
likelihood has a mode that no draw of the prior comes near, and whose slope underflows a few of its widths away. The rows show
where it is: choose as many of them at random as there are latents, and for each an outcome or a component of its mixture, and
move the latents so that every location equals its outcome (Gauss-Newton; one step if the locations are linear). If all of these
rows come from the chosen components, Newton's method on the posterior converges from there. This is random sample consensus
(Fischler and Bolles 1981) for starting points.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.particles.blocks import CHUNK_SIZE, Blocks, block_posterior, embed
from ppl_bandit.engines.particles.importance import PriorProbes
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.engines.particles.space import PartialCentring, Space
from ppl_bandit.engines.particles.weighted_particles import (
    MIN_ESS_SHARE,
    RefreshSettings,
    refresh_particles,
)
from ppl_bandit.engines.particles.weights import finite_log_weights, flatten_log_weights, robust_covariance
from ppl_bandit.engines.rows import Buffer, read_buffer, take_rows
from ppl_bandit.engines.state import Particles
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


def refresh_block(
    key: Key,
    target: LogDensity,
    particles: Particles,
    settings: RefreshSettings,
    space: Space,
    blocks: Blocks,
    block: Int[Array, ""],
    buffer: Buffer,
    reference: Float[Array, " K"],
    discount: float,
    probes: PriorProbes | None = None,
) -> Particles:
    """Refresh particles as `refresh_particles` does, in partially non-centred coordinates if the program has any.

    Args:
        target: `block_posterior` of the arguments from `space` to `discount`.
    """
    centring = space.partial_centring
    if centring is None:
        find_starts = row_starts(space, blocks, block, buffer, reference)
        return refresh_particles(key, target, particles, settings, probes, find_starts)
    coordinates = jnp.minimum(jnp.asarray(blocks.coordinates)[block], space.size - 1)
    is_latent = jnp.asarray(blocks.is_latent)[block]
    has_scale = is_latent & jnp.asarray(centring.has_latent_scale)[coordinates]

    def all_latents(own: Float[Array, " k"]) -> Float[Array, " K"]:
        return embed(blocks, block, own, reference)

    def locations_and_log_scales(positions: Float[Array, "M k"]) -> tuple[Float[Array, "M k"], Float[Array, "M k"]]:
        locations, log_scales = jax.vmap(lambda own: centring.location_and_log_scale(all_latents(own)))(positions)
        return locations[:, coordinates], log_scales[:, coordinates]

    def to_coordinates(positions: Float[Array, "M k"], locations: Array, log_scales: Array) -> Float[Array, "M k"]:
        scaled = (positions - locations) * jnp.exp((own_centredness - 1.0) * log_scales)
        return jnp.where(has_scale, own_centredness * locations + scaled, positions)

    locations, log_scales = locations_and_log_scales(particles.positions)
    own_centredness = jnp.where(has_scale, _estimate_centredness(particles, log_scales), 1.0)
    centredness = jnp.ones(space.size, own_centredness.dtype)
    centredness = centredness.at[jnp.asarray(blocks.coordinates)[block]].set(own_centredness, mode="drop")
    space_inside = _space_at(space, centring, centredness)
    inside = block_posterior(space_inside, blocks, block, buffer, reference, discount)

    positions = to_coordinates(particles.positions, locations, log_scales)
    log_prior = jax.vmap(inside.log_prior)(positions)
    start = particles._replace(positions=positions, log_prior=log_prior, covariance=robust_covariance(positions))
    if probes is not None:
        there = to_coordinates(probes.positions, *locations_and_log_scales(probes.positions))
        probes = probes._replace(positions=there)
    find_starts = row_starts(space_inside, blocks, block, buffer, reference)
    end = refresh_particles(key, inside, start, settings, probes, find_starts)

    both = jnp.concatenate([end.positions, end.modes])
    latents = jax.vmap(lambda own: centring.to_latents(all_latents(own), centredness))(both)
    latents, modes = jnp.split(jnp.where(has_scale, latents[:, coordinates], both), [len(end.positions)])
    log_prior, covariance = jax.vmap(target.log_prior)(latents), robust_covariance(latents)
    return end._replace(positions=latents, modes=modes, log_prior=log_prior, covariance=covariance)


def record_readings(space: Space, blocks: Blocks, buffer: Buffer, reference: Float[Array, " K"]) -> None:
    """Read the program once in every form in which `refresh_block` reads it: recorded functions then run it no more."""
    own_sizes = min(CHUNK_SIZE, buffer.arm.shape[0]), min(blocks.coordinates.shape[1], MAX_ROWS)

    def read(buffer: Buffer, flat: Float[Array, " K"]) -> None:
        latents, _ = space.constrain(flat), space.log_prior(flat)
        if space.partial_centring is not None:
            centring = space.partial_centring
            centring.location_and_log_scale(flat)
            for function in (centring.to_latents, centring.constrain, centring.log_prior):
                function(flat, flat)
        of_chunk, of_start = (take_rows(read_buffer(buffer).rows, jnp.zeros(size, int)) for size in own_sizes)
        space.log_likelihood(latents, of_chunk)
        if space.locations is not None:
            space.locations(latents, of_start)

    jax.eval_shape(read, buffer, reference)


def _space_at(space: Space, centring: PartialCentring, centredness: Float[Array, " K"]) -> Space:
    """Return the space in the coordinates of a centredness."""
    return space._replace(
        constrain=lambda flat: centring.constrain(flat, centredness),
        log_prior=lambda flat: centring.log_prior(flat, centredness),
    )


def _estimate_centredness(particles: Particles, log_scales: Float[Array, "M k"]) -> Float[Array, " k"]:
    """Return 1 minus the variance of each latent over the square of its scale, by the weighted particles."""
    log_weights = finite_log_weights(particles.log_weights)
    weights = jax.nn.softmax(flatten_log_weights(log_weights, MIN_ESS_SHARE * len(log_weights)))
    variance = weights @ jnp.square(particles.positions - weights @ particles.positions)
    # The mean of the log scales: a scale with heavy tails may have no second moment.
    ratio = variance * jnp.exp(-2.0 * (weights @ log_scales))
    return jnp.clip(1.0 - jnp.nan_to_num(ratio, nan=1.0), 0.0, 1.0)
