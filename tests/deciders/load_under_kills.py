"""Learners and deciders under load, while processes are killed and the server restarts; then everything recorded is checked.

python tests/deciders/load_under_kills.py --seconds 1800 --kills 20 --restarts 4
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "journal"), str(HERE.parents[2])]

NAME, NUM_UNITS, BATCH = "load", 400, 16


def rewarded(decision, arm):
    """Return the reward of a decision, the same in every process."""
    return float(zlib.crc32(decision.encode()) % 100 < (30, 45, 60)[arm])


class Log:
    """Lines that a process has acknowledged; they outlive it."""

    def __init__(self, path):
        self.path, self.file, self.at = path, path.open("ab"), 0

    def write(self, rows):
        self.file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        self.file.flush()

    def read(self):
        """Return the whole lines that were not read before."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def decide(url, folder, index, rate):
    from shared_models import bernoulli_parts

    from ppl_bandit import Decider, JournalError

    model, engine = bernoulli_parts(3)
    log, chance = Log(folder / f"decisions-{index}"), random.Random(os.urandom(8))
    with Decider(url, NAME, model, engine=engine, timeout=20.0) as decider:
        decider.warm_up(batches=True)
        while True:
            begun = time.monotonic()
            units = [f"u{chance.randrange(NUM_UNITS)}" if chance.random() < 0.2 else None for _ in range(BATCH)]
            try:
                made = decider.select_many(num_decisions=BATCH, units=units if chance.random() < 0.5 else None)
            except JournalError:  # a server that restarts for longer than the timeout; nothing was acknowledged
                continue
            age = decider.health().staleness
            log.write([{"id": one.id, "arm": one.arm, "unit": one.unit, "age": age} for one in made])
            time.sleep(max(0.0, BATCH / rate - (time.monotonic() - begun)))


def learn(url, folder, index):
    from shared_models import bernoulli_bandit

    from ppl_bandit import Journal, JournalError, Sealer

    log, logs, leading = Log(folder / f"rewards-{index}"), {}, Log(folder / f"leading-{index}")
    done = {row["id"] for row in log.read()}
    with (
        Journal(url, timeout=20.0) as journal,
        bernoulli_bandit(journal=journal, name=NAME) as bandit,
        Sealer(bandit) as sealer,
    ):
        while True:
            leading.write([{"at": time.time(), "leads": sealer.health().is_leading}])
            for path in folder.glob("decisions-*"):
                logs.setdefault(path, Log(path))
            found = [row for one in logs.values() for row in one.read()]
            mine = {row["id"]: row["arm"] for row in found if zlib.crc32(row["id"].encode()) // 100 % 2 == index % 2}
            rows = [{"decision": id, "reward": rewarded(id, arm)} for id, arm in mine.items() if id not in done]
            while rows:
                try:
                    results = bandit.update_each(rows[:256])
                except JournalError:
                    time.sleep(0.1)
                    continue
                failed = [row for row, one in zip(rows, results, strict=False) if isinstance(one, Exception)]
                log.write([{"id": row["decision"]} for row in rows[:256] if row not in failed])
                done |= {row["decision"] for row in rows[:256] if row not in failed}
                lost = [one for one in results if isinstance(one, Exception) and not isinstance(one, JournalError)]
                if lost:
                    log.write([{"id": f"refused: {lost[0]}"}])
                rows = [*failed, *rows[256:]] if not lost else rows[256:]
            time.sleep(0.05)


def start(url, folder, kind, index, rate):
    command = [
        sys.executable,
        str(HERE),
        "--child",
        kind,
        str(index),
        "--url",
        url,
        "--folder",
        str(folder),
        "--rate",
        str(rate),
    ]
    with (folder / f"{kind}-{index}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def play(server, folder, seconds, kills, restarts, rate, seed=0):
    """Run the load; return how many processes were killed, by kind."""
    from shared_models import bernoulli_bandit

    chance = random.Random(seed)
    bernoulli_bandit(journal=server.url, name=NAME).close()
    roles = [("learner", 0), ("learner", 1), ("decider", 0), ("decider", 1)]
    children = {role: start(server.url, folder, *role, rate) for role in roles}
    until = time.monotonic() + 300
    begun_files = [folder / f"{kind}-{index}" for kind in ("decisions", "rewards") for index in range(2)]
    while not all(path.exists() and path.stat().st_size for path in begun_files):  # they have compiled
        assert time.monotonic() < until and all(child.poll() is None for child in children.values()), folder
        time.sleep(0.5)
    begun, killed, ended = time.monotonic(), defaultdict(int), []
    events = ["kill"] * kills + ["restart"] * restarts
    chance.shuffle(events)
    for number, event in enumerate(events):
        time.sleep(max(0.0, begun + seconds * (number + 1) / (len(events) + 1) - time.monotonic()))
        if event == "restart":
            server.stop()
            time.sleep(0.5)
            server.start()
        else:
            role = roles[sum(killed.values()) % 2 * 2 + chance.randrange(2)]  # kinds in turn
            children[role].kill()
            children[role].wait()
            killed[role[0]] += 1
            children[role] = start(server.url, folder, *role, rate)
        for role in {role for role, child in children.items() if child.poll() is not None}:
            lines = (folder / "{}-{}.log".format(*role)).read_text().splitlines()
            ended.append((*role, lines[-1]))  # why it could not start, while the server was down
            children[role] = start(server.url, folder, *role, rate)  # as a supervisor does
    time.sleep(max(0.0, begun + seconds - time.monotonic()))
    for child in children.values():
        child.kill()
        child.wait()
    return dict(killed) | {"ended by themselves": ended}


def check(server, folder):
    """Check what is recorded against what was acknowledged; return figures."""
    from shared_models import bernoulli_bandit

    from ppl_bandit.journal.events import CHECKPOINT, DECIDED, REWARDED
    from ppl_bandit.journal.open_experiment import read_header
    from ppl_bandit.journal.replay import replay

    made = [row for path in folder.glob("decisions-*") for row in Log(path).read()]
    acknowledged = [row["id"] for path in folder.glob("rewards-*") for row in Log(path).read()]
    assert not [one for one in acknowledged if one.startswith("refused")], acknowledged
    with bernoulli_bandit(journal=server.url, name=NAME) as bandit:
        store, experiment = bandit._experiment.store, bandit._experiment
        store.seal(NAME)
        events = bandit._journal.events(NAME)
        decided = {event.decision: event for event in events if event.kind == DECIDED}
        assert len(decided) == sum(event.kind == DECIDED for event in events)
        assert len({(event.stream, event.number) for event in decided.values()}) == len(decided), (
            "a number counts twice"
        )
        assert all(decided[row["id"]].arm == row["arm"] for row in made), "an acknowledged decision is lost or differs"
        first = {event.decision: event for event in events if event.kind == REWARDED}
        assert len(first) == sum(event.kind == REWARDED for event in events), "a reward counts twice"
        assert set(acknowledged) <= set(first), "an acknowledged reward is lost"
        for id, event in first.items():
            assert event.body["reward"]["reward"] == rewarded(id, event.arm) and event.arm == decided[id].arm
        units = defaultdict(set)
        for row in made:
            if row["unit"] is not None:
                units[row["unit"]].add(row["id"])
        assert all(len(ids) == 1 for ids in units.values()), "a unit has two decisions"
        verified = bandit.verify()
        header = read_header(store, NAME)
        task, prior = bandit._build(list(header.identity["arms"]))
        result = replay(store, NAME, header.last_change, task, prior, bandit._build)
        assert result.position is None, result
        rows = [(decided[id].arm, event.body["reward"]["reward"]) for id, event in first.items()]
        whole = bernoulli_bandit()
        whole.update_many(arms=[arm for arm, _ in rows], rewards=[reward for _, reward in rows])
        for name, values in whole.posterior_parameters()["rate"].items():
            np.testing.assert_allclose(bandit.posterior_parameters()["rate"][name], values, rtol=1e-9)
        ages = [row["age"] for row in made if np.isfinite(row["age"])]
        return {
            "decisions": len(decided),
            "not acknowledged": len(decided) - len({row["id"] for row in made}),  # of calls that were killed
            "rewards": len(first),
            "snapshots": sum(event.kind == CHECKPOINT for event in events),
            "units": len(units),
            "replayed": result.num_checked,
            "posteriors recomputed": verified.num_recomputed,
            "median and largest staleness, s": [float(np.median(ages)), float(np.max(ages))],
            "position": experiment.projection.position,
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--rate", type=float, default=200.0, help="decisions a second of each decider, at most")
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--url")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.child is not None:
        kind, index = given.child[0], int(given.child[1])
        (decide if kind == "decider" else learn)(
            given.url, given.folder, index, *([given.rate] if kind == "decider" else [])
        )
        return
    import tempfile

    import postgres_server

    server = postgres_server.Server()
    try:
        with tempfile.TemporaryDirectory() as folder:
            killed = play(server, Path(folder), given.seconds, given.kills, given.restarts, given.rate)
            print(killed, check(server, Path(folder)))
    finally:
        server.remove()


if __name__ == "__main__":
    main()
