"""Units, requests that are repeated, shown arms, windows and erasure."""

import hashlib
import sqlite3
import sys
import threading
from datetime import timedelta

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import FLOORED, THOMPSON, Trust, bernoulli_bandit, bernoulli_program, prior_engine

from ppl_bandit import AlreadyRewarded, Bandit, Journal, JournalError, RequestIdReused, RewardModel, UnknownArm, engines
from ppl_bandit.commands.cli import main
from ppl_bandit.engines.proof.linear_step import elapsed_until, first_clock
from ppl_bandit.journal.projection import has_example
from ppl_bandit.journal.repeats import Ask, find_known
from ppl_bandit.journal.stores.appending import unit_key
from ppl_bandit.types import Interaction


def linear(arm, context):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context["x"], -1), 0.5))


def two_outcomes(**options):
    """A bandit on two conversions of each of three arms."""
    return Bandit(_TWO_OUTCOMES, arms=["a", "b", "c"], selector=THOMPSON, num_samples=100, **options)


def sales(arm):
    sold, liked = (numpyro.sample(name, dist.Beta(1.0, 1.0).expand([3])) for name in ("sold_rate", "liked_rate"))
    numpyro.sample("sold", dist.Bernoulli(sold[arm]))
    numpyro.sample("liked", dist.Bernoulli(liked[arm]))
    numpyro.deterministic("expected_reward", sold[arm])


def bounded(arm):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.TruncatedNormal(mean, 1.0, low=1.0 * arm, high=arm + 0.5))


_TWO_OUTCOMES = RewardModel(sales, 3, outcomes=("sold", "liked"))


@pytest.fixture(scope="module")
def linear_parts():
    model = RewardModel(linear, 2, {"x": np.zeros(2)})
    engine = engines.conjugate(model)
    return model, lambda _: engine


@pytest.fixture(params=["memory", "journal"])
def place(request, tmp_path):
    return {} if request.param == "memory" else {"journal": tmp_path / "j.db"}


def same(one, other):
    assert (one.id, one.arm, one.propensity, one.unit) == (other.id, other.arm, other.propensity, other.unit)
    np.testing.assert_array_equal(one.propensities, other.propensities)
    return True


def test_a_repeated_request_gives_the_same_decision_and_no_second_row(place):
    bandit = bernoulli_bandit(**place)
    first = bandit.select(request_id="r1")
    bandit.update(first, 1)
    assert same(bandit.select(request_id="r1"), first)
    assert bandit.select(request_id="r2").id != first.id
    with pytest.raises(RequestIdReused, match="request_id='r1' was given to select with other arguments"):
        bandit.select(request_id="r1", allowed=[0, 1])
    slate = bandit.select(size=2, request_id="s")
    assert [d.id for d in bandit.select(size=2, request_id="s").decisions] == [d.id for d in slate.decisions]
    many = bandit.select_many(num_decisions=4, request_ids=["a", None, "a", "r2"])
    assert same(many[0], many[2]) and many[1].id != many[0].id and same(many[3], bandit.select(request_id="r2"))
    assert len(bandit.pending()) == 5  # r2, two places, two of the batch
    if place:
        again = bernoulli_bandit(**place)
        assert same(again.select(request_id="r1"), first) and same(again.select(request_id="a"), many[0])


def test_a_repeated_update_counts_once(place):
    bandit = bernoulli_bandit(**place)
    decision = bandit.select()
    for _ in range(2):
        bandit.update(decision, 1, request_id="u1")
        bandit.update(arm=0, reward=1, request_id="u2")
        bandit.update(decision, 0, correct=True, request_id="u3")
    assert bandit.num_rewards == 2 and bandit.history().reward.tolist() == [0.0, 1.0]
    with pytest.raises(RequestIdReused, match="was given to update with other arguments"):
        bandit.update(arm=1, reward=1, request_id="u2")


def test_a_request_is_repeated_whatever_the_order_of_its_arguments_and_of_what_happened(place):
    bandit = two_outcomes(**place)
    slate = bandit.select(size=3, request_id="slate", allowed={"c", "a", "b"})
    bandit.retire_arm("b")
    assert bandit.select(size=3, request_id="slate", allowed={"b", "c", "a"}).arms == slate.arms
    with pytest.raises(ValueError, match="size=3 places need as many distinct arms, but 2 may be played"):
        bandit.select(size=3, request_id="another")
    one, two = bandit.select(unit="u"), bandit.select()
    bandit.update(one, {"sold": 1, "liked": 0}, request_id="order")
    bandit.update(one, {"liked": 0, "sold": 1}, request_id="order")
    bandit.update(one, {"liked": 0, "sold": 1}, request_id="nothing new")
    for other in (bandit, two_outcomes(**place) if place else bandit):
        with pytest.raises(RequestIdReused):
            other.update(two, {"liked": 0, "sold": 1}, request_id="nothing new")
    found = bandit.update_each(
        [
            {"decision": one, "reward": {"liked": 0, "sold": 1}, "request_id": "twice"},
            {"decision": two, "reward": {"liked": 1, "sold": 1}, "request_id": "twice"},
            {"decision": two, "reward": {"liked": 1, "sold": 0}, "request_id": "new"},
            {"decision": one, "reward": {"liked": 0, "sold": 1}, "request_id": "twice"},
        ]
    )
    assert found[0] is False and isinstance(found[1], RequestIdReused) and found[2] is True and found[3] is False
    assert bandit.num_rewards == 2
    store = bandit._experiment.store
    owner = unit_key("u")
    count = "SELECT COUNT(*) FROM ppl_bandit_keys WHERE owner = ?"
    assert store._query(count, (owner,)) == [(4,)]  # the unit, and three requests about its decision
    assert bandit.erase("u") == 1 and store._query(count, (owner,)) == [(0,)]


def test_a_unit_has_one_standing_decision_until_its_arm_is_gone(place):
    bandit = bernoulli_bandit(**place)
    first = bandit.select(unit="user 17")
    assert first.unit == "user 17" and same(bandit.select(unit="user 17", request_id="x"), first)
    bandit.update(first, 1)
    assert same(bandit.select(unit="user 17"), first) and same(bandit.select(unit="user 17", request_id="x"), first)
    others = [arm for arm in bandit.arms if arm != first.arm]
    moved = bandit.select(unit="user 17", allowed=others)
    assert moved.arm in others and same(bandit.select(unit="user 17"), moved)
    bandit.retire_arm(moved.arm)
    third = bandit.select(unit="user 17")
    assert third.arm != moved.arm
    bandit.discard(third)
    fourth = bandit.select(unit="user 17")
    many = bandit.select_many(num_decisions=5, units=["user 17", "b", "b", None, "c"])
    assert same(many[0], fourth) and same(many[1], many[2]) and len({d.id for d in many}) == 4
    events = bandit._experiment.store.find("default", [moved.id, third.id, fourth.id])
    assert events[moved.id][0].body["replaces"] == {"decision": first.id, "why": "its arm is not allowed now"}
    assert events[third.id][0].body["replaces"]["why"] == "its arm was retired"
    assert events[fourth.id][0].body["replaces"]["why"] == "it was discarded"
    if place:
        assert same(bernoulli_bandit(**place).select(unit="user 17"), fourth)


def test_the_decision_of_a_unit_stands_for_its_window(place, monkeypatch):
    bandit = bernoulli_bandit(unit_window=timedelta(hours=1), **place)
    first = bandit.select(unit="u")
    assert same(bandit.select(unit="u"), first)
    now = __import__("time").time()
    monkeypatch.setattr("time.time", lambda: now + 3601)
    second = bandit.select(unit="u")
    assert second.id != first.id


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda bandit: bandit.select(unit="x" * 257), "unit has 257 bytes in UTF-8, the limit is 256"),
        (lambda bandit: bandit.select(unit="\u00e9" * 129), "unit has 258 bytes"),
        (lambda bandit: bandit.select(unit=""), "unit must be a text that is not empty"),
        (lambda bandit: bandit.select(request_id=7), "request_id must be a text"),
        (lambda bandit: bandit.select(unit="u", size=2), "give request_id to repeat a slate"),
        (lambda bandit: bandit.select_many(num_decisions=2, units=["u"]), "one entry for each of 2 decisions"),
        (lambda bandit: bandit.erase(None), "unit is missing"),
        (lambda bandit: bandit.update(bandit.select(), 1, propensity=0.5), "without shown="),
        (lambda bandit: bandit.update(bandit.select(), 1, shown=0, propensity=0.0), "must be in"),
        (lambda bandit: bandit.expire(), "reward_window"),
        (lambda bandit: bernoulli_bandit(unit_window=0), "unit_window is 0"),
        (lambda bandit: bernoulli_bandit(reward_window=timedelta(0)), "reward_window is 0"),
        (lambda bandit: bernoulli_bandit(default_reward=0), "default_reward was given without reward_window"),
    ],
)
def test_wrong_use_says_what_to_do(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong(bernoulli_bandit())


def test_a_saved_bandit_knows_units_and_requests(place, tmp_path):
    bandit = bernoulli_bandit(**place)
    first, second = bandit.select(unit="user 17"), bandit.select(request_id="r")
    bandit.update(first, 1, request_id="u")
    bandit.save(tmp_path / "saved.npz")
    loaded = Bandit.load(tmp_path / "saved.npz", bandit.model)
    assert same(loaded.select(unit="user 17"), first) and same(loaded.select(request_id="r"), second)
    loaded.update(first, 1, request_id="u")
    with pytest.raises(RequestIdReused):
        loaded.update(second, 1, request_id="u")
    assert loaded.num_rewards == 1 and loaded.select(unit="other").id not in (first.id, second.id)
    assert loaded.erase("user 17") == 1 and loaded.select(unit="user 17").id != first.id


def test_a_crash_between_commit_and_answer_leaves_one_decision(tmp_path, monkeypatch):
    crashing = bernoulli_bandit(journal=tmp_path / "j.db")
    store = crashing._experiment.store
    append = store.append

    def committed(*arguments, **options):
        append(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "append", committed)
    for asked in ({"request_id": "r", "unit": "u"}, {"request_id": "s"}):
        with pytest.raises(KeyboardInterrupt):
            crashing.select(**asked)
    other = bernoulli_bandit(journal=tmp_path / "j.db")
    assert len(other.pending()) == 2
    assert same(other.select(request_id="r", unit="u"), other.select(unit="u"))
    other.select(request_id="s")
    assert len(other.pending()) == 2


@pytest.mark.parametrize("num_threads, num_ids", [(8, 12), pytest.param(32, 100, marks=pytest.mark.slow)])
def test_threads_with_the_same_requests_get_the_same_decisions(num_threads, num_ids, tmp_path):
    bandit = bernoulli_bandit(journal=tmp_path / "j.db")
    bandit.warm_up()
    found = [dict() for _ in range(num_threads)]
    barrier = threading.Barrier(num_threads)

    def work(number):
        barrier.wait()
        for i in np.random.default_rng(number).permutation(num_ids):
            found[number][i] = bandit.select(request_id=f"r{i}", unit=f"u{i}").id

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == found[0] for one in found) and len(set(found[0].values())) == num_ids == len(bandit.pending())


def test_what_was_shown_is_learnt_and_weighted_only_with_its_probability(place):
    bandit = bernoulli_bandit(**place)
    one, two, three = bandit.select_many(num_decisions=3)
    other = next(arm for arm in bandit.arms if arm != one.arm)
    bandit.update(one, 1, shown=other)
    bandit.update(two, 0)
    bandit.update(three, 1, shown=0, propensity=0.25)
    assert bandit.history().arm.tolist() == [other, two.arm, 0]
    log = bandit.logged_decisions()
    assert log.arm.tolist() == [two.arm, 0] and log.propensity.tolist() == [two.propensity, 0.25]
    assert log.num_without_propensity == 1 and log.num_unrewarded == 0
    bandit.update(one, 1, shown=other)  # repeated
    with pytest.raises(AlreadyRewarded, match="pass correct=True"):
        bandit.update(one, 1, shown=one.arm)
    bandit.update(one, 1, shown=one.arm, correct=True)
    assert bandit.history().arm.tolist() == [one.arm, two.arm, 0]
    with pytest.raises(UnknownArm):
        bandit.update(two, 0, shown=17)
    if place:
        again = bernoulli_bandit(**place)
        assert again.history().arm.tolist() == [one.arm, two.arm, 0]
        np.testing.assert_array_equal(again.posterior(50)["rate"], bandit.posterior(50)["rate"])


def test_an_evaluation_says_what_was_shown_and_keeps_the_propensities_of_the_others(place):
    bandit = bernoulli_bandit(selector=FLOORED, **place)
    rng, made = np.random.default_rng(0), bandit.select_many(num_decisions=300)
    plain, shown, known = made[:298], made[298], made[299]
    bandit.update(plain[0], 1, shown=plain[0].arm)  # as it was decided
    bandit.update_many(decisions=plain[1:], rewards=(rng.random(297) < 0.5) * 1.0)
    before = bandit.evaluate(1)
    assert bandit.logged_decisions().arm.size == 298 and "another system" not in before.verdict
    np.testing.assert_array_equal(bandit.logged_decisions().propensities[0], plain[0].propensities)
    bandit.update(plain[0], 1)  # the same
    bandit.update(shown, 1, shown=(shown.arm + 1) % 3)
    said = "1 reward is of an arm that another system showed in place of the decision's, with a probability that is not known"
    found = bandit.evaluate(1)
    assert said in found.verdict and found.interval == before.interval
    bandit.update(known, 1, shown=2, propensity=0.5)
    log = bandit.logged_decisions()
    np.testing.assert_array_equal(log.propensities[-1], [np.nan, np.nan, 0.5])
    assert np.isfinite(log.propensities[:-1]).all() and (log.num_shown, log.arm.size) == (1, 299)
    after = bandit.evaluate(1)
    assert after.interval == pytest.approx(before.interval, abs=0.02) and np.isfinite(after.interval).all()
    bandit.update(shown, 1, shown=shown.arm, correct=True)
    assert "another system" not in bandit.evaluate(1).verdict
    assert np.isfinite(bandit.logged_decisions().propensities[-2]).all()


@pytest.mark.parametrize("default", [None, 0])
def test_overdue_decisions_settle_by_themselves_and_a_late_reward_is_a_correction(
    place, tmp_path, monkeypatch, default
):
    bandit = bernoulli_bandit(reward_window=60, default_reward=default, **place)
    late, early = bandit.select(), bandit.select()
    bandit.update(early, 1)
    now = __import__("time").time()
    monkeypatch.setattr("time.time", lambda: now + 61)
    new = bandit.select()
    assert bandit.pending().decision.tolist() == [new.id]
    assert bandit.num_rewards == (1 if default is None else 2)
    assert bandit.report().num_late == 0 and "expired" not in str(bandit.report())
    for _ in range(2):
        bandit.update(late, 1)
    assert sorted(bandit.history().reward) == [1.0, 1.0]
    assert bandit.expire() == 0
    bandit.update(new, 1)
    bandit.save(tmp_path / "saved.npz")
    bandit.close()
    others = [Bandit.load(tmp_path / "saved.npz", bandit.model)]
    if place:
        again = bernoulli_bandit(reward_window=60, default_reward=default, **place)
        assert again.num_rewards == 3 and len(again.pending()) == 0
        others.append(again)
    for one in others:
        assert one.report().num_late == one.report().to_dict()["num_late"] == one.logged_decisions().num_late == 1
        said = "1 reward came after the decision had expired"
        assert said in str(one.report()) and said in one.evaluate(0).verdict
    if place:
        with pytest.raises(JournalError, match="reward_window: it was 60.0, now it is None"):
            bernoulli_bandit(**place)


@pytest.mark.parametrize("default", [None, 0])
def test_a_reward_after_the_window_is_late_whether_or_not_its_decision_has_expired_yet(place, monkeypatch, default):
    bandit = bernoulli_bandit(reward_window=60, default_reward=default, **place)
    late, waiting = bandit.select(), bandit.select()
    now = __import__("time").time()
    monkeypatch.setattr("time.time", lambda: now + 61)
    bandit.update(late.id, 1)  # it reads no decisions: nothing has expired
    assert bandit.report().num_late == 1 == bandit.logged_decisions().num_late
    bandit.update(late.id, 1)
    bandit.update(waiting, 1)
    assert bandit.report().num_late == 2 and bandit.history().reward.tolist() == [1, 1]
    assert place == {} or bernoulli_bandit(reward_window=60, default_reward=default, **place).report().num_late == 2


def test_a_sweep_that_fails_is_made_again_soon(tmp_path, monkeypatch):
    with bernoulli_bandit(journal=tmp_path / "j.db", reward_window=3600, default_reward=0) as bandit:
        bandit.select()
        now = __import__("time").time() + 3601
        monkeypatch.setattr("time.time", lambda: now)
        with monkeypatch.context() as patch:
            patch.setattr(bandit._experiment.store, "pending", lambda *place: [][0])
            with pytest.raises(IndexError):
                bandit.select()
        now += 1.1
        bandit.select()
        assert bandit.num_rewards == 1


def test_a_default_reward_that_an_arm_cannot_have_is_refused():
    model = RewardModel(bounded, 2)
    with pytest.raises(ValueError, match="default_reward=1 is outside the support of the outcome 'reward' on arm 0"):
        Bandit(model, reward_window=60, default_reward=1)
    with pytest.raises(ValueError, match="on arm 1"):
        Bandit(model, reward_window=60, default_reward=0)


def test_a_sweep_reads_the_decisions_that_became_overdue_alone(tmp_path, monkeypatch):
    """A row that is visited adds at least one step of SQLite."""
    options = dict(journal=tmp_path / "j.db", reward_window=3600, default_reward=0)
    bandit = bernoulli_bandit(**options)
    now = [__import__("time").time()]
    monkeypatch.setattr("time.time", lambda: now[0])

    def steps_of_select(of):
        now[0] += 60
        return steps_of(of, of.select)[1]

    short = [steps_of_select(bandit) for _ in range(3)][-1]
    for _ in range(3):
        made = bandit.select_many(num_decisions=2000)
        bandit.update_many(decisions=made[:1990], rewards=np.zeros(1990))
    assert steps_of_select(bandit) < short + 100  # nothing is overdue
    now[0] += 3600
    bandit.select()  # all are
    assert bandit.pending().shape[0] <= 4 and bandit.num_rewards == 3 * 2000 + 4
    assert steps_of_select(bandit) < short + 500
    bandit.close()
    again = bernoulli_bandit(**options)
    assert again._experiment.settled_until > 6000
    assert steps_of_select(again) < short + 500


def test_each_reward_of_many_is_refused_alone(place):
    bandit = bernoulli_bandit(**place)
    one, two = bandit.select(), bandit.select()
    bandit.update(two, 1)
    rows = [
        {"decision": one, "reward": 1, "request_id": "a"},
        {"decision": "no such", "reward": 1},
        {"decision": two, "reward": 1},
        {"decision": two, "reward": 0},
        {"decision": bandit.select(), "reward": 0.5},
        {"decision": bandit.select(), "reward": 0, "request_id": "b"},
        {"decision": one, "reward": 1, "request_id": "a"},
        {"decision": one, "rewrad": 1},
    ]
    found = bandit.update_each(rows)
    kinds = [one if isinstance(one, bool) else type(one).__name__ for one in found]
    assert kinds == [True, "UnknownDecision", False, "AlreadyRewarded", "ValueError", True, False, "TypeError"]
    assert bandit.num_rewards == 3


def test_rewards_of_one_call_are_learnt_in_one_update(place):
    """Their events are one batch, as those of `update_many`; among many, the wrong ones alone are refused, and order counts."""
    bandit = bernoulli_bandit(**place)
    made = bandit.select_many(num_decisions=23)
    rows = [{"decision": one.id, "reward": number % 2} for number, one in enumerate(made)]
    assert bandit.update_each(rows[:10]) == [True] * 10
    batches = {event.batch for event in bandit._experiment.store.read("default") if event.kind == "rewarded"}
    assert len(batches) == 1
    wrong = {11: rows[3] | {"reward": 0}, 17: {"decision": "no such", "reward": 1}, 22: rows[22] | {"reward": 2}}
    given = [wrong.get(number, row) for number, row in enumerate(rows)]
    again = given[12] | {"reward": 1 - given[12]["reward"]}
    found = bandit.update_each([*given, again, again | {"correct": True}])
    expected = [number in wrong or number >= 10 for number in range(23)]
    assert [one is not False for one in found[:23]] == expected
    assert {number for number, one in enumerate(found) if isinstance(one, ValueError)} == {*wrong, 23}
    assert found[24] is True and bandit.num_rewards == 20
    record = next(one for one in bandit.records() if one["decision"] == made[12].id)
    assert record["reward"] == {"reward": again["reward"]}


SECRETS = (
    b"somebody@example.org",
    hashlib.sha256(b"somebody@example.org").hexdigest().encode(),
    b"0.8080808080808",
    np.float64(0.8080808080808).tobytes(),
)


def test_an_erased_unit_leaves_no_byte_and_the_posterior_stays(linear_parts, tmp_path):
    model, engine = linear_parts
    path = tmp_path / "j.db"

    def opened(**options):
        return Bandit(model, engine=engine, num_samples=100, selector=THOMPSON, journal=path, **options)

    bandit = opened()
    for number in range(6):
        bandit.update(bandit.select({"x": np.array([1.0, number])}, unit=f"unit {number}"), 0.3 * number)
    secret = {"x": np.array([0.8080808080808, -1.0])}
    mine = bandit.select(secret, unit=SECRETS[0].decode(), request_id="mine")
    bandit.update(mine, 0.7)
    assert bandit.history().shape[0] == 7
    waiting = bandit.select(secret, unit=SECRETS[0].decode(), allowed=[1 - mine.arm])
    bandit._checkpoint(0)
    stale = opened()
    before, head = bandit.posterior_parameters(), bandit._journal.head()
    assert bandit.erase(SECRETS[0].decode()) == 2 and bandit.erase("nobody") == 0
    for file in tmp_path.iterdir():
        assert not any(one in file.read_bytes() for one in SECRETS), file
    bandit._journal.verify(head=head)
    bandit._journal.verify()
    stale.close()  # it has not read that the unit was erased
    for one in (bandit, opened()):
        after = one.posterior_parameters()
        for name, values in before["weights"].items():
            np.testing.assert_allclose(after["weights"][name], values, rtol=1e-12)
        assert one.num_rewards == 6 == len(one.history()) and len(one.pending()) == 0
    with pytest.raises(ValueError, match="was erased with its unit|was discarded"):
        bandit.update(waiting, 1.0)
    new = bandit.select(secret, unit=SECRETS[0].decode(), request_id="mine")
    assert new.id not in (mine.id, waiting.id)
    assert bandit.logged_decisions().arm.size == 6
    bandit.close()
    with Journal(path) as journal:
        assert "somebody" not in str([event for event in journal.events() if event.kind != "decided"])


@pytest.mark.parametrize("make", [engines.laplace, engines.conjugate], ids=["stores rows", "refused a row"])
def test_a_process_that_has_not_read_an_erasure_stores_no_row_of_the_unit(linear_parts, tmp_path, make):
    """Whose engine stores rows, or was chosen for one that an exact engine refused."""
    model, engine = linear_parts
    is_exact = make is engines.conjugate
    bandits = [
        Bandit(
            model, engine=engine if is_exact else make, num_samples=100, selector=THOMPSON, journal=tmp_path / "j.db"
        )
        for _ in range(2)
    ]
    mine = bandits[0].select({"x": np.array([0.8080808080808, -1.0])}, unit=SECRETS[0].decode())
    bandits[0].update(mine, 0.7)
    bandits[0].update(bandits[0].select({"x": np.array([1.0, 2.0])}), 0.3)
    for bandit in bandits:
        bandit._catch_up()
        if is_exact:  # as a fallback keeps them
            own = bandit._experiment
            row = Interaction(np.array([mine.arm]), {"reward": np.array([0.7])}, {"x": mine.context["x"][None]})
            own.projection = own.projection._replace(learner=own.projection.learner._replace(examples=row))
            projection, counted = own.projection, np.ones((1, 1), bool)
            assert has_example(projection, [projection.history.rows().positions[0]])
            assert not has_example(projection, [projection.position + 1])  # it was removed before
            row = row._replace(context={"context": row.context, "counted": counted})
            in_part = projection._replace(
                task=projection.task._replace(is_partial=True), learner=projection.learner._replace(examples=row)
            )
            assert has_example(in_part, projection.history.rows().positions[:1])
            assert not has_example(in_part, projection.history.rows().positions[1:])
            assert not has_example(projection._replace(history=own.initial.history), [1])
    assert bandits[0].erase(SECRETS[0].decode()) == 1
    for bandit in reversed(bandits):
        bandit._checkpoint(0)
        assert bandit._catch_up().learner.examples is None
    for bandit in bandits:
        bandit.close()
    for file in tmp_path.iterdir():
        assert not any(one in file.read_bytes() for one in SECRETS), file
    with Journal(tmp_path / "j.db") as journal:
        journal.verify()


@pytest.mark.slow  # compiles a particle filter
def test_the_window_of_a_filter_keeps_no_row_of_an_erased_unit(tmp_path):
    def moving(arm, context, *, previous=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
        level = numpyro.sample(
            "level", dist.Normal(jnp.zeros(2) if previous is None else previous["level"], scale).to_event(1)
        )
        numpyro.sample("reward", dist.Bernoulli(logits=level[arm] * context["x"]))

    def engine(model):
        return engines.particle_filter(model, num_particles=200)

    path, secret = tmp_path / "j.db", np.float64(0.8080808080808)
    with Bandit(moving, 2, context={"x": np.array(1.0)}, engine=engine, num_samples=50, journal=path) as bandit:
        for number in range(3):
            bandit.update(bandit.select({"x": secret + number}, unit=f"unit {number}"), 1)
        bandit._checkpoint(0)
        bandit._experiment.store.scrub()
        assert secret.tobytes() in path.read_bytes()
        assert bandit.erase("unit 0") == 1
    assert secret.tobytes() not in path.read_bytes()


def test_the_clock_of_a_posterior_does_not_stay_at_the_time_of_an_erased_unit(tmp_path):
    def cooling(arm, context, *, previous=None, elapsed=1.0):
        before = jnp.zeros(2) if previous is None else previous["level"]
        level = numpyro.sample("level", dist.Normal(before, jnp.sqrt(elapsed)).to_event(1))
        numpyro.sample("reward", dist.Normal(level[arm], 1.0))

    path, secret = tmp_path / "j.db", np.float64(3.8080808080808)
    model = RewardModel(cooling, 2, {"time": 0.0})
    prior = prior_engine(model)
    engine = prior._replace(  # whose state is a clock, as a part of that of every filter
        init=lambda key: first_clock(),
        update=lambda key, clock, rows: (
            elapsed_until(model, clock, {"time": rows.context["time"][-1]})[1],
            Trust(jnp.array(True)),
        ),
        sample=lambda key, clock, num_samples: model.sample_prior(key, num_samples),
    )
    bandit, other = (Bandit(model, engine=lambda _: engine, num_samples=50, journal=path) for _ in range(2))
    with bandit, other:
        for number, time in enumerate((1.0, 2.0, secret)):
            bandit.update(bandit.select({"time": time}, unit=f"unit {number}"), 1.0)
        other._catch_up()
        assert bandit.erase("unit 1") == 1  # of an earlier time: nothing is learnt again
        bandit._checkpoint(0)
        bandit._experiment.store.scrub()
        assert secret.tobytes() in path.read_bytes()
        assert bandit.erase("unit 2") == 1
        assert other._catch_up().learner.state.time == bandit._learner.state.time == 1.0
    assert secret.tobytes() not in path.read_bytes()


def test_a_decision_that_is_made_while_its_unit_is_erased_is_that_of_a_new_unit(tmp_path, monkeypatch):
    erasing, other = (bernoulli_bandit(journal=tmp_path / "j.db") for _ in range(2))
    first = erasing.select(unit="u", request_id="r")
    store, made = erasing._experiment.store, []
    owned = store.owned

    def owned_before(*arguments):
        found = owned(*arguments)
        made.append(other.select(unit="u", allowed=[arm for arm in other.arms if arm != first.arm]))
        return found

    monkeypatch.setattr(store, "owned", owned_before)
    assert erasing.erase("u") == 1
    monkeypatch.undo()
    assert same(other.select(unit="u"), made[0]) and other.select(request_id="r").id not in (first.id, made[0].id)
    assert erasing.erase("u") == 1


def test_the_decision_of_a_unit_stands_although_its_arm_is_not_known_here_yet(place):
    bandit = bernoulli_bandit(**place)
    made = bandit.select(unit="u", allowed=[2])
    given = bandit._experiment.store, "default", [Ask("u", None)], bandit._experiment.projection
    ((found,), (other,)) = (
        find_known(*given, mask, None) for mask in (np.ones(2, bool), np.array([True, True, False]))
    )
    assert found.events[0].decision == made.id and other.events is None


def test_an_edited_personal_part_is_noticed(tmp_path):
    with bernoulli_bandit(journal=tmp_path / "j.db") as bandit:
        bandit.select(unit="one")
    with sqlite3.connect(tmp_path / "j.db") as file:
        file.execute("UPDATE ppl_bandit_personal SET contents = replace(contents, 'one', 'two')")
    with Journal(tmp_path / "j.db") as journal, pytest.raises(JournalError, match="personal part is not the one"):
        journal.verify()


def test_without_a_context_only_the_name_of_a_unit_is_erased(place):
    bandit = bernoulli_bandit(**place)
    decision = bandit.select(unit="u")
    bandit.update(decision, 1)
    waiting = bandit.select(unit="v")
    assert bandit.erase("u") == 1 and bandit.erase("v") == 1
    assert bandit.num_rewards == 1 == len(bandit.history())
    bandit.update(waiting, 1)
    assert bandit.select(unit="u").id != decision.id
    assert bandit.history().decision.tolist() == [decision.id, waiting.id]


@pytest.mark.slow
def test_shares_of_units_equal_the_propensities(tmp_path):
    bandit = bernoulli_bandit(selector=THOMPSON, journal=tmp_path / "j.db")
    bandit.update_many(
        arms=[0] * 10 + [1] * 10 + [2] * 10, rewards=[1] * 4 + [0] * 6 + [1] * 5 + [0] * 5 + [1] * 6 + [0] * 4
    )
    num = 20_000
    arms, expected = np.zeros(3), np.zeros(3)
    for start in range(0, num, 2000):
        for decision in bandit.select_many(num_decisions=2000, units=[f"u{i}" for i in range(start, start + 2000)]):
            arms[decision.arm] += 1
            expected += decision.propensities
    error = np.sqrt(num * (expected / num) * (1 - expected / num))
    assert np.all(np.abs(arms - expected) <= 4 * error)  # four standard errors of a count


def test_records_and_health_say_what_is_there(place, monkeypatch):
    bandit = bernoulli_bandit(**place)
    decisions = bandit.select_many(num_decisions=3, units=["a", None, "b"])
    bandit.update(decisions[1], 1)
    monkeypatch.setattr("ppl_bandit.journal.stores.sql.MAX_PARAMETERS", 2)
    rows = list(bandit.records())
    assert [(row["decision"], row["unit"], row["status"]) for row in rows] == [
        (decisions[0].id, "a", "pending"),
        (decisions[1].id, None, "rewarded"),
        (decisions[2].id, "b", "pending"),
    ]
    assert rows[1]["reward"] == {"reward": 1.0} and list(bandit.records(after=rows[1]["position"])) == rows[2:]
    found = bandit.health()
    assert found.is_writable and (found.num_decisions, found.num_rewards) == (3, 1)
    bandit.close()
    assert "closed" in bandit.health().reason


def test_units_are_erased_and_decisions_expire_from_the_command_line(tmp_path, capsys):
    path, code = tmp_path / "j.db", tmp_path / "model.py"
    lines = ["from shared_models import bernoulli_program", "model = bernoulli_program(3)", "num_arms = 3"]
    code.write_text("\n".join(lines))
    with Bandit(bernoulli_program(3), 3, journal=path, reward_window=1e-3, default_reward=0) as bandit:
        bandit.select(unit="somebody@example.org")
        moved = bandit.select(unit="someone else")
        bandit.select(unit="someone else", allowed=[arm for arm in bandit.arms if arm != moved.arm])
    for action, said in (
        (["expire", "--model", str(code), "--json"], '"num_pending": 0'),
        (["pending", "--json"], "[]"),
        (["erase", "somebody@example.org", "--model", str(code)], "erased 1 decisions"),
        (["erase", "nobody", "--model", str(code)], "no decision of this unit"),
        (["erase", "someone else", "--model", str(code), "--json"], '"num_decisions": 2'),
        (["erase", "someone else", "--model", str(code), "--json"], '"num_decisions": 0'),
        (["verify"], "is whole"),
        (["replay", "--model", str(code)], "all agree"),
    ):
        assert main(["journal", str(path), *action]) == 0
        assert said in capsys.readouterr().out
    assert main(["journal", str(path), "erase", "x"]) == 2
    assert b"somebody" not in path.read_bytes() and b"someone" not in path.read_bytes()


def steps_of(bandit, call):
    """Return how many statements and steps of SQLite's virtual machine a call takes, and what it returns."""
    statements, steps = [], [0]

    def count():
        steps[0] += 1
        return 0

    backend = bandit._experiment.store._backend
    connections = backend._reader, backend._writer
    for connection in connections:
        connection.set_trace_callback(statements.append)
        connection.set_progress_handler(count, 1)
    result = call()
    for connection in connections:
        connection.set_trace_callback(None)
        connection.set_progress_handler(None, 1)
    return len(statements), steps[0], result


def test_asking_for_a_known_unit_costs_the_same_in_a_long_journal(tmp_path):
    """A search in an index is one step of SQLite at any depth, so a row that is visited would add at least 5,000 steps."""
    bandit = bernoulli_bandit(journal=tmp_path / "j.db")
    first = bandit.select(unit="known")
    bandit.update(first, 1)
    ask = lambda: bandit.select(unit="known")  # noqa: E731
    ask()
    short = steps_of(bandit, ask)
    for _ in range(6):
        made = bandit.select_many(num_decisions=2000, units=[f"u{_}-{i}" for i in range(2000)])
        bandit.update_many(decisions=made[::2], rewards=[1] * 1000)
    ask()
    long = steps_of(bandit, ask)
    assert same(short[2], first) and same(long[2], first)
    assert bandit.health().position > 15_000
    assert long[0] == short[0] <= 6 and abs(long[1] - short[1]) <= 20


def test_a_copy_made_after_an_erasure_has_no_byte_of_the_unit(linear_parts, tmp_path):
    """Also of its requests, and if a reader holds the write-ahead log meanwhile."""
    model, engine = linear_parts
    path = tmp_path / "j.db"
    bandit = Bandit(model, engine=engine, num_samples=100, selector=THOMPSON, journal=path)
    secret = {"x": np.array([0.8080808080808, -1.0])}
    mine = bandit.select(secret, unit=SECRETS[0].decode(), request_id="a@example.org")
    bandit.update(mine, 0.7, request_id="b@example.org")
    bandit.select(secret, unit=SECRETS[0].decode(), request_id="c@example.org")  # the same decision
    for number in range(20):
        bandit.select({"x": np.array([1.0, number])}, unit=f"unit {number}")
    reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM ppl_bandit_events").fetchone()
    done = threading.Event()

    def end_reading():
        done.set()
        reader.execute("COMMIT")

    ending = threading.Timer(0.3, end_reading)
    ending.start()
    assert bandit.erase(SECRETS[0].decode()) == 1  # waits until the log can be emptied
    assert done.is_set()
    ending.join()
    reader.execute(f"VACUUM INTO '{tmp_path / 'copy.db'}'")
    reader.close()
    bandit.save(tmp_path / "saved.npz")
    names = {file.name for file in tmp_path.iterdir()}
    assert {"j.db", "j.db-wal", "copy.db", "saved.npz"} <= names
    for file in tmp_path.iterdir():
        found = file.read_bytes()
        assert not any(one in found for one in (*SECRETS, b"@example.org")), file
    with pytest.raises(ValueError, match="was erased with its unit|was discarded"):
        bandit.update(mine, 0.9, correct=True)
    new = bandit.select(secret, unit=SECRETS[0].decode(), request_id="a@example.org")
    assert new.id != mine.id and "replaces" not in bandit._experiment.store.find("default", [new.id])[new.id][0].body
    bandit._journal.verify()


@pytest.mark.parametrize("default", [None, 0])
@pytest.mark.parametrize("is_reward_first", [True, False])
def test_an_overdue_reward_that_arrives_while_decisions_expire_counts_once(
    tmp_path, monkeypatch, default, is_reward_first
):
    """Whoever records first is followed by the other: a reward that is there does not expire, one that expired is corrected."""
    expiring, reporting = (bernoulli_bandit(journal=tmp_path / "j.db") for _ in range(2))
    one, other = expiring.select(), expiring.select()
    early, late = (reporting, expiring) if is_reward_first else (expiring, reporting)
    calls = {
        expiring: lambda: expiring.expire(1e-9, default),
        reporting: lambda: reporting.update(one.id, 1),
    }
    store, found = late._experiment.store, []
    append = store.append

    def append_second(*arguments, **options):
        monkeypatch.setattr(store, "append", append)
        found.append(calls[early]())
        return append(*arguments, **options)

    monkeypatch.setattr(store, "append", append_second)
    found.append(calls[late]())
    num_expired = next(number for number in found if isinstance(number, int))
    assert num_expired == (1 if is_reward_first else 2)
    for bandit in (expiring, reporting):
        history = bandit.history().set_index("decision").reward
        assert history[one.id] == 1 and history.get(other.id) == default
        assert len(bandit.pending()) == 0 and bandit.report().num_late == (0 if is_reward_first else 1)


def test_the_lines_run_for_many_units_grow_as_their_number():
    bandit, lines, usual = bernoulli_bandit(), dict.fromkeys((64, 256), 0), sys.gettrace()
    bandit.select_many(num_decisions=64)  # compiles

    def count(frame, event, _):
        lines[num] += event == "line"
        return count

    for num in lines:
        units = [f"{row} of {num}" for row in range(num)]
        sys.settrace(count)
        try:
            bandit.select_many(num_decisions=num, units=units)
        finally:
            sys.settrace(usual)
    assert lines[256] < 4.5 * lines[64]
