"""Comparison of engines: errors against formulas, decisions, files, ArviZ objects, the HTML report."""

import dataclasses
import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from shared_models import bernoulli_model

from ppl_bandit import Bandit, Interaction, NotConjugate, RewardModel, compare, engines
from ppl_bandit.commands.cli import main
from ppl_bandit.comparison import engine_comparison
from ppl_bandit.comparison.engine_runs import simulate_rows
from ppl_bandit.comparison.figures import draw_figures
from ppl_bandit.comparison.html_report import comparison_records
from ppl_bandit.comparison.results import QUANTILES, Estimate
from ppl_bandit.comparison.tables import answer

ARMS = ["control", "new"]
ROWS = Interaction(np.arange(24) % 2, np.array([0, 1, 0, 0, 1, 0, 0, 0, 0, 1] + [0] * 9 + [1, 0, 0, 0, 1], float))
SUCCESSES = np.array([1, 4])  # of 12 on each arm
NUM_SAMPLES, NUM_RUNS = 500, 3


@pytest.fixture(scope="module")
def model():
    return bernoulli_model(2)


@pytest.fixture(scope="module")
def result(model):
    before = jax.config.jax_enable_x64
    found = compare(
        model,
        ROWS,
        (engines.conjugate, engines.laplace),
        num_samples=NUM_SAMPLES,
        num_runs=NUM_RUNS,
        arms=ARMS,
        seed=3,
    )
    assert jax.config.jax_enable_x64 == before
    return found


def exact_law():
    return stats.beta(1 + SUCCESSES, 13 - SUCCESSES)


def test_the_reference_is_the_closed_form(result):
    assert result.reference.is_exact and result.reference.name == "exact" and "exact" in result.reference.description
    assert result.labels == ["rate[control]", "rate[new]"]
    target = result.reference.target
    np.testing.assert_allclose(target.mean, exact_law().mean(), rtol=1e-12)
    np.testing.assert_allclose(target.sd, exact_law().std(), rtol=1e-12)
    np.testing.assert_allclose(target.quantiles[2], exact_law().median(), rtol=1e-9)


def test_the_exact_engine_stays_at_the_floor(result):
    exact, floor = result.engines["exact"], result.reference.floor
    # A mean of R M independent draws: four standard errors.
    assert np.all(np.abs(exact.latents.mean.value) < 4 / np.sqrt(NUM_RUNS * NUM_SAMPLES))
    for measured, expected in (
        (exact.latents.wasserstein, floor.wasserstein),
        (exact.latents.kolmogorov, floor.kolmogorov),
        (exact.decisions.best_arm_probs_distance, floor.best_arm_probs),
        (exact.decisions.other_arm_prob, floor.other_arm_prob),
    ):
        # A mean of three such distances; five sds of one leave room for their skewness.
        assert np.all(measured.value <= expected.value + 5 * expected.error)
    assert np.all(exact.r_hat < 1.02)  # R-hat - 1 is about chi2(R - 1) / (2 (R - 1) M)
    assert exact.info["is_trusted"] == 1.0


def test_the_errors_of_laplace_are_those_of_its_formula(result):
    # In logits a Beta(a, b) has density w^a (1 - w)^b: the mode is log(a / b), and the variance there 1 / a + 1 / b.
    a, b, levels = 1 + SUCCESSES, 13 - SUCCESSES, np.array(QUANTILES)[:, None]
    gaussian = stats.norm(np.log(a / b), np.sqrt(1 / a + 1 / b))
    logits = gaussian.ppf(levels)
    value = 1 / (1 + np.exp(-logits))
    expected = (value - exact_law().ppf(levels)) / exact_law().std()
    # A quantile of R M draws has the standard error sqrt(p (1 - p) / (R M)) / density.
    density = gaussian.pdf(logits) / (value * (1 - value))
    error = np.sqrt(levels * (1 - levels) / (NUM_RUNS * NUM_SAMPLES)) / density / exact_law().std()
    assert np.all(np.abs(result.engines["laplace"].latents.quantiles.value - expected) < 4 * error)
    assert expected[-1, 0] > 5 * error[-1, 0]  # otherwise the test has no power
    assert result.engines["laplace"].latents.wasserstein.value.max() > result.reference.floor.wasserstein.value.max()


def test_decisions_are_probabilities_close_to_the_truth(result):
    first, second = exact_law().args
    grid = np.linspace(0, 1, 20_001)
    one, other = stats.beta(first[0], second[0]), stats.beta(first[1], second[1])
    truth = np.trapezoid(one.pdf(grid) * other.cdf(grid), grid)  # P(control is best)
    pooled = result.reference.best_arm_probs[0]
    assert pooled.sum() == pytest.approx(1)
    assert 0.01 < truth < 0.2 and abs(pooled[0] - truth) < 4 * np.sqrt(truth * (1 - truth) / (20 * NUM_SAMPLES))
    for engine in result.engines.values():
        assert engine.decisions.propensities.value.sum() == pytest.approx(1)
        assert np.all(engine.decisions.num_candidates.value >= 1)
        assert 0 < engine.seconds_warm.value < engine.seconds_cold


def test_the_stream_ends_with_the_whole(result):
    assert [point.num_rows for point in result.stream] == [3, 6, 12, 24]
    assert result.stream[-1].engines["laplace"][0] is result.engines["laplace"].latents
    early = result.stream[0].reference.target
    successes = np.bincount(ROWS.arm[:3], ROWS.reward[:3], minlength=2)
    np.testing.assert_allclose(early.mean, (1 + successes) / (2 + np.bincount(ROWS.arm[:3])), rtol=1e-12)


def test_the_answer_comes_first_and_agrees_with_the_closed_form(result):
    laws = [stats.beta(*parameters) for parameters in zip(*exact_law().args, strict=True)]
    said = answer(result)
    found = re.search(
        r"new has the highest expected reward: ([\d.]+) .*, ([\d.]+) more than control .* probability ([\d.]+);", said
    )
    mean, gap, best = map(float, found.groups())
    num = 20 * NUM_SAMPLES  # the reference's draws; four standard errors, and the rounding of what is printed
    assert mean == pytest.approx(laws[1].mean(), abs=4 * laws[1].std() / np.sqrt(num) + 1e-4)
    spread = np.hypot(laws[0].std(), laws[1].std())
    assert gap == pytest.approx(laws[1].mean() - laws[0].mean(), abs=4 * spread / np.sqrt(num) + 1e-3)
    assert best == pytest.approx(result.reference.best_arm_probs[0, 1], abs=1e-3)
    assert str(result).split("\n\n")[1].replace("\n", " ") == said


def test_an_engine_that_decides_differently_is_named_in_the_answer(result):
    # As if laplace had played another arm half of the time; sampling error gives a few in a hundred.
    laplace = result.engines["laplace"]
    decisions = laplace.decisions._replace(other_arm_prob=Estimate(np.array(0.5), np.array(0.01)))
    other = dataclasses.replace(result, engines=result.engines | {"laplace": laplace._replace(decisions=decisions)})
    assert "laplace would have made a different decision" in answer(other)
    assert "laplace would have made a different decision" not in answer(result)


def test_the_tables_and_the_json_records_have_the_measurements(result):
    text = str(result)
    assert "reference: the exact posterior" in text and "rate[new]" in text and "P(other arm)" in text
    record = json.loads(json.dumps(comparison_records(result), allow_nan=False))
    latent = record["engines"]["laplace"]["latents"][1]
    assert latent["latent"] == "rate[new]"
    assert latent["mean_error"]["value"] == result.engines["laplace"].latents.mean.value[1]
    assert record["reference"]["is_exact"] is True and record["seed"] == 3


@pytest.mark.slow
def test_arviz_reads_every_engine(result, monkeypatch):
    az = pytest.importorskip("arviz")
    monkeypatch.setenv("MPLBACKEND", "agg")
    tree = result.to_arviz("laplace")
    for group in ("posterior", "sample_stats", "observed_data", "constant_data", "log_likelihood", "prior"):
        assert group in tree
    assert tree["posterior"]["rate"].shape == (NUM_RUNS, NUM_SAMPLES, 2)
    assert list(tree["posterior"]["rate"].coords["arm"].values) == ARMS
    assert tree["posterior_predictive"]["reward"].shape == (NUM_RUNS, NUM_SAMPLES, 24)
    assert tree["constant_data"]["played_arm"].values[1] == "new"
    rate = tree["posterior"]["rate"].values
    log_prior_and_likelihood = stats.binom(12, rate).logpmf(SUCCESSES) - stats.binom(12, 0.5).logpmf(SUCCESSES)
    lp = tree["sample_stats"]["lp"].values
    # Up to the binomial coefficients, which differ between arms and not between draws.
    gaps = lp - log_prior_and_likelihood.sum(axis=-1)
    np.testing.assert_allclose(gaps, gaps[0, 0], atol=1e-9)
    assert np.asarray(az.summary(tree)["r_hat"], float).max() < 1.05
    loo = az.loo(tree)
    # Leaving out a success of s in 12: the exact predictive is Beta-Bernoulli, s / 13.
    exact = sum(s * np.log(s / 13) + (12 - s) * np.log((12 - s) / 13) for s in SUCCESSES)
    found = loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo
    assert abs(found - exact) < 0.5  # Laplace's own error is 0.1 to 0.2 here
    az.plot_forest(tree)
    az.plot_ppc(tree, num_pp_samples=20) if hasattr(az, "plot_ppc") else az.plot_ppc_dist(tree)
    with pytest.raises(ValueError, match="'nuts' was not run"):
        result.to_arviz("nuts")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": engines.nuts}, "engines must be a sequence"),
        ({"engines": ("nuts",)}, "engines must be a sequence"),
        ({"engines": (engines.nuts, engines.nuts)}, "different names with a mapping"),
        ({"engines": ()}, "engines must be a sequence"),
        ({"engines": {"mine": 3}}, "engines must be a sequence"),
        ({"engines": {1: engines.nuts}}, "a name in engines must be a text"),
        ({"reference": "nuts"}, "reference must be an engine factory"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"say": True}, "say must be a function"),
        ({"checkpoints": 5}, "checkpoints must be a sequence"),
        ({"data": [0, 1]}, "data must be an Interaction"),
        ({"num_runs": 1}, "num_runs must be an integer of at least 2, got 1"),
        ({"num_samples": 5}, "num_samples must be an integer of at least 20, got 5"),
        ({"checkpoints": [3, 99]}, "between 1 and 24"),
        ({"data": Interaction(np.array([0, 2]), np.zeros(2))}, r"data.arm\[1\]=2 is not an arm"),
        ({"data": Interaction(np.array([0, 1]), np.array([0.0, 3.0]))}, "is 3 in row 1, outside the support"),
        ({"data": Interaction(np.zeros(0, int), np.zeros(0))}, "data is empty"),
        ({"arms": ["a"]}, "not an arm|arms"),
    ],
)
def test_bad_arguments_are_named(model, changes, message):
    arguments = {"data": ROWS, **changes}
    with pytest.raises(ValueError, match=message):
        compare(model, **arguments)


def test_simulated_rows_play_the_arms_in_turn_at_the_truth(model):
    rows = simulate_rows(model, {"rate": np.array([0.0, 1.0])}, 9, seed=1)
    assert rows.arm.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert rows.reward.tolist() == rows.arm.tolist()
    with pytest.raises(ValueError, match="num_rows"):
        simulate_rows(model, {"rate": np.array([0.5, 0.5])}, 0)


MODEL_FILE = '''
"""Success <or> failure."""
import numpyro
import numpyro.distributions as dist

num_arms = 2


def model(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, {b}))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that the command line writes."""
    home = tmp_path_factory.mktemp("compare")
    (home / "one.py").write_text(MODEL_FILE.format(b="1.0"))
    (home / "two.py").write_text(MODEL_FILE.format(b="9.0"))
    lines = [f"{ARMS[arm]},{reward:g}" for arm, reward in zip(ROWS.arm, ROWS.reward, strict=True)]
    (home / "rows.csv").write_text("arm,reward\n" + "\n".join(lines) + "\n")
    return home


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use a temporary compilation cache, and restore JAX's settings for it."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, f"jax_{name}") for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for name, value in before.items():
        jax.config.update(f"jax_{name}", value)


def call(folder, *arguments):
    return main(["compare", *map(str, arguments), "--arms", ",".join(ARMS), "--out", str(folder / "out")])


@pytest.fixture
def report(folder, capsys):
    path = folder / "out" / "report.html"
    if not path.exists():
        asked = ("--data", folder / "rows.csv", "--engines", "exact", "--samples", 100, "--report", "--json")
        assert call(folder, folder / "one.py", *asked) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["reference"]["is_exact"] and str(path) in printed["files"]
        assert all((folder / "out" / name).stat().st_size > 5000 for name in FIGURES)
    return path


FIGURES = [f"{name}.png" for name in ("answer", "densities", "forest", "best_arms", "costs", "predictive", "stream")]


def test_the_report_is_self_contained(report):
    text = report.read_text()
    assert not re.search(r"https?:|<script|<iframe|@import|url\(", text)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert len(sources) == len(FIGURES) + 1 and all(source.startswith("data:") for source in sources)
    assert "Success &lt;or&gt; failure." in text  # the program's source, escaped
    assert "EXACT. Every posterior is in closed form" in text
    assert re.search(r"jax \d+\.", text) and "seed 0" in text and "P(other arm)" in text


CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: the report was not opened in a browser")
def test_a_browser_opens_the_report_without_an_error(report, tmp_path):
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --enable-logging=stderr --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", report.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr  # Chromium reports errors of a page there
    assert shown.stdout.count("<img") == len(FIGURES)
    assert shown.stdout.count("<tr>") > 10 and "Versions and seed" in shown.stdout


def test_engines_are_refused_where_models_are_ranked(folder, capsys):
    assert call(folder, folder / "one.py", folder / "two.py", "--data", folder / "rows.csv", "--engines", "nuts") != 0
    assert "--engines compares engines on one model, but 2 models were given" in capsys.readouterr().err


@pytest.mark.slow
def test_two_models_are_ranked_by_evidence_and_loo(folder, capsys):
    pytest.importorskip("arviz")
    assert call(folder, folder / "one.py", folder / "two.py", "--data", folder / "rows.csv", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["ranking"]
    assert [first["name"], second["name"]] == ["two", "one"] and first["evidence_way"] == "exact"
    evidences = []
    for score, b in ((first, 9.0), (second, 1.0)):
        rows = [(ROWS.reward[ROWS.arm == arm], 1.0, b) for arm in range(2)]
        expected = sum(log_evidence(*row) for row in rows)
        assert score["log_evidence"] == pytest.approx(expected, abs=1e-9)
        assert score["log_evidence_error"] == 0.0
        evidences.append(expected)
        left_out = sum(leave_one_out(*row) for row in rows)
        # PSIS-LOO on 2,000 draws; each of 24 log densities has an error of a few hundredths.
        assert score["elpd"] == pytest.approx(left_out, abs=0.1)
    assert first["probability"] == pytest.approx(1 / (1 + np.exp(evidences[1] - evidences[0])), rel=1e-6)
    gaps = [score["elpd_difference"] for score in (first, second)]
    assert max(gaps) == 0.0 and min(gaps) == pytest.approx(-abs(first["elpd"] - second["elpd"]))
    assert max(score["elpd_difference_error"] for score in (first, second)) > 0


def log_evidence(rewards, a, b):
    from scipy.special import betaln

    return betaln(a + rewards.sum(), b + (1 - rewards).sum()) - betaln(a, b)


def leave_one_out(rewards, a, b):
    others = rewards.size - 1 + a + b
    return sum(
        np.log((a + rewards.sum() - 1) / others if r else (b + (1 - rewards).sum() - 1) / others) for r in rewards
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one.py", "--engines", "exact,gibbs"], "--engines has 'gibbs', expected some of exact, "),
        (["one.py"], "has no `truth` to simulate from"),
        (["none.py"], "there is no file"),
        (["one.py", "--data", "none.csv"], "give a CSV file"),
    ],
)
def test_invalid_input_ends_with_status_2_and_a_message(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def logistic(arm):
    with numpyro.plate("arms", 2):
        logit = numpyro.sample("logit", dist.Normal(0.0, 1.5))
    numpyro.sample("reward", dist.Bernoulli(logits=logit[arm]))


@pytest.mark.slow
def test_an_interrupted_comparison_keeps_finished_engines(model, monkeypatch):
    lines, original = [], engine_comparison._run_and_measure

    def interrupted(setup, key, runner, reference):
        if runner.engine.explanation.engine == "laplace":
            raise KeyboardInterrupt
        return original(setup, key, runner, reference)

    monkeypatch.setattr(engine_comparison, "_run_and_measure", interrupted)
    options = {"num_samples": NUM_SAMPLES, "num_runs": 2, "checkpoints": (), "say": lines.append}
    found = compare(model, ROWS, (engines.conjugate, engines.laplace), **options)
    assert list(found.engines) == ["exact"] and found.refused == {"laplace": "interrupted"} and not found.is_complete
    assert "laplace: not run: interrupted" in str(found)
    started = lines.index("compiling and running 2 engines; Ctrl-C keeps the finished ones")
    assert lines[started + 1].startswith("exact: 2 runs") and lines[-1] == (
        "interrupted in laplace: the finished engines are kept"
    )
    with pytest.raises(KeyboardInterrupt):  # no engine is finished
        compare(model, ROWS, (engines.laplace,), **options)


@pytest.mark.slow
def test_a_long_run_is_the_reference_of_a_program_that_is_not_conjugate():
    found = compare(RewardModel(logistic, 2), ROWS, (engines.conjugate, engines.nuts), num_runs=2, checkpoints=())
    assert not found.reference.is_exact and "long run of the nuts engine" in found.reference.description
    assert "not conjugate" in found.refused["exact"] and list(found.engines) == ["nuts"]
    grid = np.linspace(-8, 8, 4001)
    for arm in range(2):
        successes = SUCCESSES[arm]
        density = stats.norm(0, 1.5).pdf(grid) * stats.binom(12, 1 / (1 + np.exp(-grid))).pmf(successes)
        density /= np.trapezoid(density, grid)
        mean = np.trapezoid(grid * density, grid)
        sd = np.sqrt(np.trapezoid((grid - mean) ** 2 * density, grid))
        # 20,000 draws whose effective size is at least a tenth of that.
        assert abs(found.reference.target.mean[arm] - mean) < 4 * sd / np.sqrt(2000)
    nuts = found.engines["nuts"]
    assert np.all(nuts.latents.wasserstein.value < found.reference.floor.wasserstein.value * 3)
    with pytest.raises(NotConjugate):
        compare(RewardModel(logistic, 2), ROWS, (engines.laplace,), engines.conjugate)


@pytest.mark.slow
def test_the_estimated_evidence_agrees_with_quadrature():
    from ppl_bandit.comparison import rank_models

    ranking = rank_models({"logistic": RewardModel(logistic, 2), "beta": bernoulli_model(2)}, ROWS)
    score = next(score for score in ranking.scores if score.name == "logistic")
    grid = np.linspace(-12, 12, 4001)
    rate = 1 / (1 + np.exp(-grid))
    expected = sum(
        np.log(np.trapezoid(stats.norm(0, 1.5).pdf(grid) * rate**s * (1 - rate) ** (12 - s), grid)) for s in SUCCESSES
    )
    assert score.evidence_way == "reweight" and 0 < score.log_evidence_error < 0.2
    # Four runs of 1,000 particles: the mean over them has few degrees of freedom, so six standard errors.
    assert abs(score.log_evidence - expected) < 6 * score.log_evidence_error


@pytest.mark.slow
def test_a_live_bandit_exports_the_same_groups(result):
    pytest.importorskip("arviz")
    bandit = Bandit(bernoulli_model(2), arms=ARMS)
    bandit.update_many(arms=[ARMS[arm] for arm in ROWS.arm], rewards=ROWS.reward)
    own, compared = bandit.to_arviz(50), result.to_arviz("exact")
    for group in (
        "posterior",
        "sample_stats",
        "observed_data",
        "constant_data",
        "log_likelihood",
        "posterior_predictive",
    ):
        assert own[group].sizes.keys() == compared[group].sizes.keys()
        assert list(own[group].data_vars) == list(compared[group].data_vars)


@pytest.mark.slow
def test_draws_that_are_not_finite_are_reported(model, tmp_path):
    def broken(model):
        engine = engines.conjugate(model)
        none = engine._replace(sample=lambda key, state, num: {"rate": jnp.full((num, 2), jnp.nan)})
        return none._replace(explanation=engine.explanation._replace(is_exact=False))

    found = compare(model, ROWS, {"broken": broken}, num_runs=2, num_samples=100)
    assert "broken: its draws are not finite" in str(found)
    json.dumps(comparison_records(found), allow_nan=False)
    assert len(draw_figures(found, tmp_path)) == len(FIGURES)


@pytest.mark.slow
def test_a_selector_can_play_the_simulated_rows(model):
    from ppl_bandit import selectors

    rows = simulate_rows(model, {"rate": jnp.array([0.1, 0.9])}, 60, selector=selectors.thompson(), seed=0)
    assert (rows.arm == 1).sum() > 40 and rows.reward[rows.arm == 1].mean() > 0.7
