"""What the package relies on in JAX and NumPyro beyond their documented API.

A new release of either that changes one of these things fails here first; the message of the assertion says what changed.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit.runtime import jax_adapter, numpyro_adapter

PACKAGE = Path(__file__).parents[2] / "ppl_bandit"
UNSTABLE = re.compile(
    r"jax\.extend|jax\.interpreters|jax\.core\b|jax\.export|from jax import .*\bexport|custom_batching|custom_vmap|_src\b"
    r"|get_bind_params|source_info|dce_jaxpr|jaxprs_in_params|jaxpr_as_fun|gather_pytree_data_fields"
    r"|\b(fn|site\[.fn.\]|distribution)\._(?!replace)[a-z]|\"_(base_dist|mixing_distribution|mask)\""
    r"|__name__ (==|!=|in|not in) |__name__\.(endswith|startswith)"
)


def test_unstable_apis_are_used_in_the_adapters_only():
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem not in ("jax_adapter", "numpyro_adapter")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNSTABLE.search(line) and "NAType" not in line and '__name__ == "__main__"' not in line
    ]
    assert not found, "use ppl_bandit.runtime.jax_adapter or numpyro_adapter instead:\n" + "\n".join(found)


def traced(function, *args):
    return jax.make_jaxpr(function)(*args)


def test_an_equation_has_a_primitive_parameters_operands_results_and_effects():
    closed = traced(lambda x: jnp.sum(x * 2.0, axis=0), jnp.ones((2, 3)))
    assert isinstance(closed, jax_adapter.ClosedJaxpr), "make_jaxpr no longer returns a ClosedJaxpr"
    assert isinstance(closed.jaxpr, jax_adapter.Jaxpr), "ClosedJaxpr.jaxpr is no longer a Jaxpr"
    product, total = closed.jaxpr.eqns
    assert (product.primitive.name, total.primitive.name) == ("mul", "reduce_sum"), "primitives were renamed"
    assert total.params["axes"] == (0,), "the parameter `axes` of reduce_sum was renamed"
    assert total.invars == product.outvars and list(closed.jaxpr.outvars) == list(total.outvars)
    assert product.invars[0].aval.shape == (2, 3) and not product.effects
    assert isinstance(product.invars[1], jax_adapter.Literal) and product.invars[1].val == 2.0


def test_a_primitive_is_applied_to_other_values():
    for function, args in (
        (lambda x: x[::2], (jnp.arange(4.0),)),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), (jnp.arange(4.0),)),
        (lambda x: jnp.linalg.cholesky(x), (jnp.eye(2),)),
    ):
        closed = traced(jax.jit(function), *args)
        (eqn,) = closed.jaxpr.eqns
        (out,) = jax_adapter.apply_primitive(eqn, args)
        np.testing.assert_allclose(out, function(*args), err_msg="Primitive.bind with get_bind_params changed")


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, jax.custom_jvp, jax.custom_vjp], ids=["jit", "checkpoint", "jvp", "vjp"]
)
def test_the_jaxpr_that_an_equation_calls_is_found(transform):
    function = transform(lambda x: jnp.sin(x) + np.arange(3.0))
    if hasattr(function, "defjvp"):
        function.defjvp(lambda x, t: (function(*x), t[0]))
    elif hasattr(function, "defvjp"):
        function.defvjp(lambda x: (function(x), None), lambda _, t: (t,))
    (eqn,) = traced(function, jnp.ones(3)).jaxpr.eqns
    inner = jax_adapter.called_jaxpr(eqn)
    assert inner is not None, (
        f"the jaxpr of `{eqn.primitive.name}` is under none of the known parameters: {list(eqn.params)}"
    )
    assert [e.primitive.name for e in jax_adapter.all_equations(inner[0])] == ["sin", "add"]
    assert len(inner[0].constvars) == len(inner[1])


def test_a_scan_and_a_branch_call_no_jaxpr_with_their_own_operands_but_contain_some():
    def loop(x):
        return jax.lax.scan(lambda carry, y: (jnp.exp(carry) + y, None), 0.0, x)[0]

    def branch(x):
        return jax.lax.cond(x[0] > 0, jnp.sum, lambda y: jnp.exp(y[0]), x)

    for function, num_inner, name in ((loop, 1, "scan"), (branch, 2, "cond")):
        closed = traced(function, jnp.ones(3))
        eqn = next(e for e in closed.jaxpr.eqns if e.primitive.name == name)
        assert jax_adapter.called_jaxpr(eqn) is None
        assert len(list(jax_adapter.inner_jaxprs(eqn))) == num_inner, f"the jaxprs of `{name}` are stored elsewhere"
        assert "exp" in [e.primitive.name for e in jax_adapter.all_equations(closed.jaxpr)]


def test_the_operands_of_a_scan_are_told_apart_by_their_shapes():
    def scanned(weights, start, series):
        def body(carry, row):
            return (carry[0] + weights @ row, carry[1] + 1), carry[0]

        return jax.lax.scan(body, (start, 0), series)

    eqns = jax.make_jaxpr(scanned)(jnp.ones(3), 0.0, jnp.ones((3, 3))).jaxpr.eqns
    (eqn,) = (eqn for eqn in eqns if eqn.primitive.name == "scan")
    body, _, num_consts, num_carry = jax_adapter.scan_parts(eqn)
    assert (num_consts, num_carry, len(body.invars)) == (1, 2, 4)


def test_a_jaxpr_is_evaluated_and_freed_of_dead_code():
    closed = traced(lambda x, y: (jnp.sin(x), jnp.cos(y))[0], 1.0, 2.0)
    np.testing.assert_allclose(jax_adapter.evaluate_jaxpr(closed, 1.0, 2.0), [np.sin(1.0)], rtol=1e-6)
    kept = jax_adapter.eliminate_dead_code(closed.jaxpr)
    assert [e.primitive.name for e in kept.eqns] == ["sin"], "dce_jaxpr keeps equations that no output depends on"


def test_tracers_are_told_from_arrays_and_values_are_computed_inside_a_trace():
    seen = []

    @jax.jit
    def function(x):
        with jax_adapter.outside_trace():
            seen.extend([jax_adapter.is_tracer(x), jax_adapter.is_tracer(jnp.ones(2) + 1)])
        return x

    function(1.0)
    assert seen == [True, False], "jax.core.Tracer or jax.core.eval_context changed"
    assert not jax_adapter.is_tracer(jnp.ones(2)) and not jax_adapter.is_tracer(np.ones(2))


def test_an_equation_knows_the_lines_that_made_it():
    (eqn,) = traced(lambda x: jnp.sin(x), 1.0).jaxpr.eqns
    frames = jax_adapter.source_frames(eqn)
    own = [frame for frame in frames if frame.file_name == __file__]
    assert own, "source_info.traceback no longer lists frames"
    assert "jnp.sin" in Path(__file__).read_text().splitlines()[own[0].line_number - 1]
    assert "lambda" in own[0].function_name


def test_a_function_is_exported_and_imported():
    @jax.jit
    def double(x):
        return 2 * x

    serialized = jax_adapter.export_function(double, [jax.ShapeDtypeStruct((2,), jnp.float32)])
    imported = jax_adapter.import_function(serialized)
    assert imported.__name__ == "double", "Exported.fun_name changed"
    np.testing.assert_array_equal(imported(jnp.arange(2.0, dtype=jnp.float32)), [0.0, 2.0])


def test_a_function_that_cannot_be_exported_is_none():
    function = jax.jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x))
    assert jax_adapter.export_function(function, [jax.ShapeDtypeStruct((), jnp.float32)]) is None


def test_vmap_follows_a_rule_or_a_loop():
    def rule(size, is_batched, x, y):
        assert is_batched == [True, False]
        return x + y + 100 * size, True

    ruled = jax_adapter.vmap_rule(rule)(lambda x, y: x + y)
    np.testing.assert_array_equal(ruled(1, 2), 3)
    np.testing.assert_array_equal(jax.vmap(ruled, in_axes=(0, None))(jnp.arange(3), 1), 300 + 1 + np.arange(3))
    looped = jax_adapter.sequential_vmap(lambda x: jnp.sum(x))
    names = [e.primitive.name for e in jax_adapter.all_equations(traced(jax.vmap(looped), jnp.ones((3, 2))).jaxpr)]
    assert "scan" in names, "sequential_vmap is no longer a loop"


def test_masks_expansion_and_censoring_are_unwrapped():
    plain = dist.Normal(jnp.zeros(3), 1.0)
    masked = plain.mask(jnp.array([True, False, True]))
    assert numpyro_adapter.mask_of(plain) is None
    np.testing.assert_array_equal(
        numpyro_adapter.mask_of(masked), [True, False, True], "MaskedDistribution._mask changed"
    )
    assert numpyro_adapter.mask_of(plain.mask(False)) is False
    censored = dist.RightCensoredDistribution(plain, jnp.zeros(3))
    assert numpyro_adapter.without_censoring(censored) is censored.base_dist, "censored classes were renamed"
    wrapped = dist.Normal(0.0, 1.0).expand([2]).to_event(1).mask(True)
    assert type(numpyro_adapter.base_distribution(wrapped)) is dist.Normal


def test_affine_maps_are_split_from_the_law_before_them():
    exponential, affine = dist.transforms.ExpTransform(), dist.transforms.AffineTransform
    law = dist.TransformedDistribution(dist.Normal(0.0, 1.0), [exponential, affine(1.0, 2.0), affine(3.0, -4.0)])
    base, shift, scale = numpyro_adapter.before_affine_map(law)
    assert base.transforms == [exponential] and (float(shift), float(scale)) == (3.0 - 4.0 * 1.0, -8.0)
    plain = dist.Normal(0.0, 1.0)
    assert numpyro_adapter.before_affine_map(plain)[0] is plain


def test_a_slice_under_vmap_is_not_taken_for_an_index_that_was_asked_to_clip():
    def clips(function):
        (eqn,) = [
            eqn
            for eqn in jax_adapter.all_equations(jax.make_jaxpr(function)(jnp.zeros(5), jnp.arange(3)).jaxpr)
            if eqn.primitive.name == "gather"
        ]
        return jax_adapter.clips_indices(eqn)

    assert not clips(lambda x, i: jax.vmap(lambda one: x[one])(i)) and not clips(lambda x, i: x[i])
    assert clips(lambda x, i: jnp.take(x, i, mode="clip")) and clips(lambda x, i: x.at[i].get(mode="clip"))


def test_inner_distributions_and_transforms_are_listed():
    normal = dist.Normal(0.0, 1.0)
    folded = dist.FoldedDistribution(normal)
    mixture = dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), dist.Normal(jnp.zeros(2), 1.0))
    truncated = dist.TruncatedNormal(0.0, 1.0, low=0.0)
    assert type(numpyro_adapter.inner_distribution(mixture)) is dist.CategoricalProbs
    assert numpyro_adapter.inner_distribution(normal) is None
    assert type(numpyro_adapter.inner_distribution(truncated)) is dist.Normal
    assert normal in list(numpyro_adapter.components(folded))
    log_normal = [type(part).__name__ for part in numpyro_adapter.components(dist.LogNormal(0.0, 1.0))]
    assert {"LogNormal", "Normal", "ExpTransform"} <= set(log_normal)


def test_parameters_and_patched_methods_of_a_distribution_are_listed():
    normal = dist.Normal(1.0, 2.0)
    assert numpyro_adapter.parameters_of(normal) == {"loc": 1.0, "scale": 2.0}
    assert set(numpyro_adapter.parameters_of(dist.Binomial(3, 0.5))) == {"total_count", "probs"}
    assert numpyro_adapter.patched_methods(normal) == {}
    assert numpyro_adapter.patched_methods(dist.Uniform(0.0, 1.0)) == {}
    normal.log_prob = lambda value: value
    assert list(numpyro_adapter.patched_methods(normal)) == ["log_prob"]


def test_distributions_and_constraints_are_named_as_programs_write_them():
    assert numpyro_adapter.distribution_name(dist.Bernoulli(0.5).expand([2]).to_event(1)) == "Bernoulli"
    assert numpyro_adapter.class_name(dist.constraints.unit_interval) == "UnitInterval"


def test_a_mask_reaches_the_named_site_only():
    def program():
        numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]))
        numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]))

    with numpyro.handlers.seed(rng_seed=0), numpyro_adapter.mask_sites({"a": jnp.array([True, False])}):
        trace = numpyro.handlers.trace(program).get_trace()
    densities = {name: np.asarray(site["fn"].log_prob(jnp.ones(2))) for name, site in trace.items()}
    assert (densities["a"] == 0.0).tolist() == [False, True] and np.all(densities["b"] != 0.0)
