"""The exact engine: prove that a program is conjugate, derive its updates, certify every row of data.

There is no table of likelihoods. A likelihood is conjugate to a prior exactly when its log is affine in the prior's sufficient
statistics (Diaconis and Ylvisaker, 1979), which can be proved (`proof`), derived (`families.derivation`) and certified
(`certificate`) for any program.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.engines.checks import Info
from ppl_bandit.engines.exact.certificate.chunks import chunk_absorber
from ppl_bandit.engines.exact.explanation import explain_conjugate, site_parameters
from ppl_bandit.engines.exact.families.drawing import sample
from ppl_bandit.engines.exact.families.posterior import Posterior, log_mass
from ppl_bandit.engines.exact.laws.expectation import find_infinite_means
from ppl_bandit.engines.exact.laws.marginals import marginals_of
from ppl_bandit.engines.exact.proof.examination import examine, prove
from ppl_bandit.engines.exact.update import absorb_rows, add_rows
from ppl_bandit.engines.settings import check_settings, refuse_moving
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Capabilities, Engine, Interaction, Key


def conjugate(model: RewardModel, *, discount: float = 1.0) -> Engine:
    """Return the exact engine of a program, or refuse.

    The proof and the certificates at build time run in float64; `init`, `update` and `sample` follow jax's precision.

    Args:
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing. Below 1 the natural
            parameters decay towards the prior's: the posterior is exact for the likelihood so weighted.

    Raises:
        NotConjugate: if the program is not conjugate or not provably so. The message says what stopped the proof and what
            would make the program conjugate.
    """
    check_settings(discount)
    refuse_moving(model, "conjugate")
    with jax.enable_x64(True):
        layout = prove(model)
        absorb_chunk = chunk_absorber(model, layout, discount)
        # Products of reduced precision on an accelerator would look like deviations.
        with jax.default_matmul_precision("highest"):
            prior, evidence = examine(model, layout, absorb_chunk)
        infinite_text, infinite_means = find_infinite_means(model, layout, prior)

    def init(key: Key) -> Posterior:
        del key  # the prior is not random
        # With an explicit dtype: jax may cache a NumPy constant across a change of its precision.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)), prior)

    def update(key: Key, state: Posterior, interaction: Interaction) -> tuple[Posterior, Info]:
        with jax.default_matmul_precision("highest"):
            return absorb_rows(layout, absorb_chunk, init(key), state, interaction)

    find_mass = quick_jit(functools.partial(log_mass, layout))

    def log_evidence(state: Posterior) -> tuple[float, float]:
        return float(find_mass(state) - find_mass(init(jr.key(0)))), 0.0

    def parameters(state: Posterior) -> dict[str, dict[str, np.ndarray]]:
        return site_parameters(layout, state)

    return Engine(
        init,
        update,
        functools.partial(sample, layout),
        explain_conjugate(model, layout, prior, evidence, discount, infinite_text),
        settings={"discount": discount},
        capabilities=Capabilities(
            parameters=parameters,
            marginals=marginals_of(model, layout),
            infinite_means=infinite_means,
            add_rows=functools.partial(add_rows, model, layout) if discount == 1.0 else None,
            log_evidence=log_evidence,
        ),
    )
