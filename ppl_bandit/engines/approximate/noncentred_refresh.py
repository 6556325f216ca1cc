"""Renew the particles of a block in the coordinates that suit them.

Where a hierarchy is written about its own location and scale, particles are moved in the frames of their latents
(`unconstrained`). How much the data say of a latent, particles tell themselves: given the scale, its variance under the
posterior is a share of the scale's square, and the rest of 1 is the share of its frame.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.approximate.block_posterior import block_posterior, embed
from ppl_bandit.engines.approximate.blocks import Blocks
from ppl_bandit.engines.approximate.unconstrained import PartialCentring, Space
from ppl_bandit.engines.particles.diagnostics import finite_log_weights, flatten_log_weights
from ppl_bandit.engines.particles.importance import PriorProbes
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.engines.particles.weighted_particles import MIN_ESS_SHARE, WeightedParticles, refresh, rough_covariance
from ppl_bandit.engines.row_buffer import Buffer
from ppl_bandit.types import Key

__all__ = ["renew"]


def renew(
    key: Key,
    target: LogDensity,
    cloud: WeightedParticles,
    space: Space,
    blocks: Blocks,
    block: Int[Array, ""],
    buffer: Buffer,
    reference: Float[Array, " K"],
    discount: float,
    *,
    scouts: PriorProbes | None = None,
    **settings: Any,
) -> WeightedParticles:
    """Renew particles as `cloud.refresh` does, in the frames of their latents where these have any.

    Args:
        target: what `block_posterior` makes of the six arguments after the cloud.
        settings: of `cloud.refresh`.
    """
    frames = space.frames
    if frames is None:
        return refresh(key, target, cloud, scouts=scouts, **settings)
    coordinates = jnp.asarray(blocks.coordinates)[block]
    is_latent = jnp.asarray(blocks.is_latent)[block]
    is_framed = is_latent & jnp.asarray(frames.is_framed)[jnp.minimum(coordinates, space.size - 1)]

    def whole(own: Float[Array, " k"]) -> Float[Array, " K"]:
        return embed(blocks, block, own, reference)

    def own_of(whole: Float[Array, "M K"]) -> Float[Array, "M k"]:
        return whole[:, jnp.minimum(coordinates, space.size - 1)]

    def frames_of(positions: Float[Array, "M k"]) -> tuple[Float[Array, "M k"], Float[Array, "M k"]]:
        locations, log_scales = jax.vmap(lambda own: frames.of(whole(own)))(positions)
        return own_of(locations), own_of(log_scales)

    def framed(positions: Float[Array, "M k"], located: tuple[Array, Array]) -> Float[Array, "M k"]:
        locations, log_scales = located
        inside = own_shares * locations + (positions - locations) * jnp.exp((own_shares - 1.0) * log_scales)
        return jnp.where(is_framed, inside, positions)

    located = frames_of(cloud.positions)
    own_shares = jnp.where(is_framed, _shares(cloud, located[1]), 1.0)
    shares = jnp.ones(space.size, own_shares.dtype).at[coordinates].set(own_shares, mode="drop")
    inside = block_posterior(_within(space, frames, shares), blocks, block, buffer, reference, discount)
    positions = framed(cloud.positions, located)
    log_prior = jax.vmap(inside.log_prior)(positions)
    start = cloud._replace(positions=positions, log_prior=log_prior, covariance=rough_covariance(positions))
    if scouts is not None:
        scouts = scouts._replace(positions=framed(scouts.positions, frames_of(scouts.positions)))
    end = refresh(key, inside, start, scouts=scouts, **settings)
    latents = own_of(jax.vmap(lambda own: frames.back(whole(own), shares))(end.positions))
    latents = jnp.where(is_framed, latents, end.positions)
    log_prior, covariance = jax.vmap(target.log_prior)(latents), rough_covariance(latents)
    return end._replace(positions=latents, log_prior=log_prior, covariance=covariance)


def _within(space: Space, frames: PartialCentring, shares: Float[Array, " K"]) -> Space:
    """Return the space in the coordinates of some shares."""
    return space._replace(
        constrain=lambda flat: frames.constrain(flat, shares), log_prior=lambda flat: frames.log_prior(flat, shares)
    )


def _shares(cloud: WeightedParticles, log_scales: Float[Array, "M k"]) -> Float[Array, " k"]:
    """Return 1 less the variance of each latent over the square of its scale, by the weighted particles."""
    flat = flatten_log_weights(finite_log_weights(cloud.log_weights), MIN_ESS_SHARE * cloud.log_weights.shape[0])
    weights = jax.nn.softmax(flat)
    variance = weights @ jnp.square(cloud.positions - weights @ cloud.positions)
    # The middle of the log scales: a scale with heavy tails may have no mean square.
    ratio = variance * jnp.exp(-2.0 * (weights @ log_scales))
    return jnp.clip(1.0 - jnp.nan_to_num(ratio, nan=1.0), 0.0, 1.0)
