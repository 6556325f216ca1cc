"""The bundled models follow the rules for programs; no engine is involved."""

import functools
import inspect

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpyro import handlers
from scipy import stats

from ppl_bandit.journal.model_files import bundled_models, load_model

PROMISED = (
    "bernoulli",
    "beta_hierarchy",
    "binomial",
    "candidates",
    "dirichlet_categorical",
    "exponential",
    "gaussian",
    "hierarchical_bernoulli",
    "hierarchical_gaussian",
    "hierarchical_spread",
    "hurdle",
    "linear_gaussian",
    "logistic",
    "poisson",
    "price_curve",
    "ridge_regression",
    "slates",
    "student_t",
)

every_model = pytest.mark.parametrize("name", bundled_models())


def arguments(model, num_rows):
    """Rows that visit every arm in turn, all in the example context."""
    arm = jnp.arange(num_rows) % model.num_arms
    if model.context is None:
        return (arm,)
    return arm, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_rows, *jnp.shape(leaf))), model.context)


def trace(model, num_rows, latents=None):
    program = handlers.substitute(model.program, latents) if latents else model.program
    return handlers.trace(handlers.seed(program, jr.key(0))).get_trace(*arguments(model, num_rows))


@functools.cache
def abstract_trace(name, num_rows):
    """Trace a program abstractly: shapes without values."""
    sites = {}
    jax.eval_shape(lambda: sites.update(trace(load_model(name), num_rows)))
    return sites


def latent_shapes(sites, model):
    latents = (name for name, site in sites.items() if site["type"] == "sample" and name not in model.outcomes)
    return {name: sites[name]["value"].shape for name in latents}


def test_the_models_that_the_documentation_promises_are_bundled():
    assert set(PROMISED) <= set(bundled_models())


@every_model
@pytest.mark.parametrize("num_rows", [1, 5])
def test_outcomes_have_one_value_a_row_and_are_not_observed(name, num_rows):
    model, sites = load_model(name), abstract_trace(name, num_rows)
    for outcome in model.outcomes:
        assert sites[outcome]["value"].shape == (num_rows,)
        assert not sites[outcome]["is_observed"]
    if "expected_reward" in sites:
        assert sites["expected_reward"]["value"].shape == (num_rows,)


@every_model
@pytest.mark.parametrize("num_rows", [1, 5])
def test_truth_names_every_latent_site_with_its_shape_and_lies_in_its_support(name, num_rows):
    model, sites = load_model(name), abstract_trace(name, num_rows)
    assert latent_shapes(sites, model) == {site: value.shape for site, value in model.truth.items()}
    for site, value in model.truth.items():
        assert np.all(sites[site]["fn"].support(value))


@every_model
def test_the_truth_makes_one_arm_best_where_there_is_no_context(name):
    model = load_model(name)

    @jax.jit  # one compilation a model, not one an operation
    def expected_rewards():
        sites = trace(model, model.num_arms, model.truth)
        return sites["expected_reward"]["value"] if "expected_reward" in sites else sites["reward"]["fn"].mean

    means = expected_rewards()
    assert means.shape == (model.num_arms,) and np.all(np.isfinite(means))
    if model.context is None:
        second, first = np.sort(means)[-2:]
        assert first > second


@every_model
def test_the_example_context_and_drawn_contexts_have_the_same_shape(name):
    model = load_model(name)
    wants_context = list(inspect.signature(model.program).parameters) == ["arm", "context"]
    assert wants_context == (model.context is not None) == (model.contexts is not None)
    if wants_context:
        drawn = model.contexts(jr.key(0))
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), drawn) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), model.context
        )


@every_model
def test_the_docstring_says_when_to_use_the_model_and_whether_it_is_exact(name):
    docstring = load_model(name).program.__globals__["__doc__"]
    assert "Use it when" in docstring
    assert ("exact" in docstring) != ("approximate" in docstring)


def test_the_linear_gaussian_is_that_of_the_paper():
    model = load_model("linear_gaussian")
    np.testing.assert_allclose(model.truth["weights"], [[0.4, 0.4], [0.8, 0.8]])
    np.testing.assert_allclose(np.sqrt(model.truth["variance"]), [0.2, 0.2], rtol=1e-6)
    sites = trace(model, 1, {"variance": jnp.array([4.0, 9.0])})
    prior = sites["weights"]["fn"]
    np.testing.assert_allclose(prior.mean, np.ones((2, 2)))  # u0 = ones
    np.testing.assert_allclose(prior.variance, [[4.0, 4.0], [9.0, 9.0]])  # variance * V0, V0 = I
    log_density = sites["variance"]["fn"].log_prob(jnp.array([4.0, 9.0]))
    np.testing.assert_allclose(log_density, stats.invgamma(1.0, scale=1.0).logpdf([4.0, 9.0]), rtol=1e-5)


def test_spend_counts_only_where_there_was_a_sale():
    model = load_model("hurdle")
    arm = jnp.array([0, 1])
    data = {"conversion": jnp.array([1, 0]), "spend": jnp.array([30.0, 0.0])}
    program = handlers.condition(handlers.substitute(model.program, model.truth), data)
    sites = handlers.trace(handlers.seed(program, jr.key(0))).get_trace(arm)
    log_probs = sites["spend"]["fn"].log_prob(data["spend"])
    np.testing.assert_allclose(log_probs, [-np.log(20.0) - 30.0 / 20.0, 0.0], rtol=1e-6)
