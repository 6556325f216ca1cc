"""Tables (Markdown) and figures (PNG) of the results of `map_of_selectors.py`."""

import json
from math import erfc
from pathlib import Path

import numpy as np

CLASSIC = ("double sampling", "Thompson", "Bayes-UCB")


def report(folder: Path) -> None:
    for name in ("triples", "top-two", "directed", "pairs", "horizon"):
        found = _joined(sorted(folder.glob(f"{name}*.npz")))
        if found:
            print(f"\n## {name}: {len(found['rates'])} problems, {found['num_runs']} realizations each\n")
            _table(found)
            if len(found["names"]) > 1:
                _worse(found)
    for name in ("table", "change"):
        path = folder / f"{name}.json"
        if path.exists():
            print(f"\n## {name}\n")
            for row in json.loads(path.read_text()):
                print("| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    triples = _joined(sorted(folder.glob("triples*.npz")))
    if triples:
        _map(triples, folder / "map.png")


def _joined(paths: list[Path]) -> dict:
    """Join runs that were played apart, over the policies that are in all; percentiles are averaged, by number of runs."""
    parts = [dict(np.load(path)) for path in paths]
    if not parts:
        return {}
    names = [name for name in parts[0]["names"] if all(name in part["names"] for part in parts)]
    runs = np.array([int(part["num_runs"]) for part in parts])
    joined = {"names": np.array(names), "rates": parts[0]["rates"], "num_runs": runs.sum()}
    own = [[list(part["names"]).index(name) for name in names] for part in parts]
    for key in ("mean", "high", "highest", "stuck"):
        joined[key] = sum(n * part[key][i] for n, part, i in zip(runs, parts, own, strict=True)) / runs.sum()
    within = [(n - 1) * part["covariance"][:, i][:, :, i] for n, part, i in zip(runs, parts, own, strict=True)]
    return joined | {"covariance": sum(within) / (runs - 1).sum()}


def _table(found) -> None:
    names, mean = list(found["names"]), found["mean"]
    runs, problems = int(found["num_runs"]), mean.shape[1]
    against = [name for name in CLASSIC if name in names]
    heads = ["", "mean regret", *(f"to {name}" for name in against), "95th", "99th percentile", "stuck"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for i, name in enumerate(names):
        error = np.sqrt(found["covariance"][:, i, i].sum() / runs) / problems
        relative = [f"{100 * np.mean(mean[i] / mean[names.index(o)] - 1):+.0f}%" if o != name else "" for o in against]
        cells = [name, f"{mean[i].mean():.2f} +- {error:.2f}", *relative, f"{found['high'][i].mean():.1f}"]
        cells += [f"{found['highest'][i].mean():.1f}", f"{100 * found['stuck'][i].mean():.2f}%"]
        print("| " + " | ".join(cells) + " |")


def _scores(found):
    """Differences of means in standard errors, (policies, policies, problems)."""
    mean, cov, runs = found["mean"], found["covariance"], int(found["num_runs"])
    variance = np.diagonal(cov, axis1=1, axis2=2)
    spread = variance.T[:, None] + variance.T[None] - 2.0 * np.transpose(cov, (1, 2, 0))
    return (mean[:, None] - mean[None]) / np.sqrt(np.maximum(spread, 1e-12) / runs)


def _worse(found) -> None:
    names, z = list(found["names"]), _scores(found)
    for bound in (2.0, 3.0):
        chance = 0.5 * erfc(bound / 2**0.5) * z.shape[2]
        print(
            f"\nproblems on which the row is worse than the column, z > {bound:g} (by chance, where equal: {chance:.1f})\n"
        )
        print("| | " + " | ".join(names) + " |\n| --- |" + " --- |" * len(names))
        for i, name in enumerate(names):
            print(
                f"| {name} | "
                + " | ".join("" if i == j else str(int((z[i, j] > bound).sum())) for j in range(len(names)))
                + " |"
            )
    for own in ("Gittins 2, learning 1", "Gittins 1"):
        for other in (name for name in CLASSIC if name in names and own in names):
            i, j = names.index(own), names.index(other)
            worst = []
            for k in np.argsort(-z[i, j])[:4]:
                rates = ", ".join(f"{rate:.2f}" for rate in found["rates"][k])
                pair = f"{found['mean'][i, k]:.1f} against {found['mean'][j, k]:.1f}"
                worst.append(f"({rates}): {pair} (z {z[i, j, k]:.1f})")
            print(f"\n{own} at its worst against {other}: " + "; ".join(worst))


def _map(found, path: Path) -> None:
    """Draw which policy has the least regret, over the gap between the two best arms and the level of the best."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    names = [str(name) for name in found["names"]]
    shown = [name for name in names if name != "top-two"]
    rates, mean = found["rates"], found["mean"][[names.index(name) for name in shown]]
    level, gap = rates[:, -1], np.round(rates[:, -1] - rates[:, -2], 2)
    xs, ys = np.unique(gap), np.unique(level)
    winner = np.full((ys.size, xs.size), np.nan)
    gain = {name: np.full((ys.size, xs.size), np.nan) for name in CLASSIC}
    own = shown.index("Gittins 2, learning 1")
    for row, y in enumerate(ys):
        for column, x in enumerate(xs):
            cell = (level == y) & (gap == x)
            if cell.any():
                winner[row, column] = np.argmin(mean[:, cell].mean(axis=1))
                for name in CLASSIC:
                    gain[name][row, column] = 100 * (mean[own, cell].mean() / mean[shown.index(name), cell].mean() - 1)
    colours = ["#E69F00", "#999999", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#F0E442"][: len(shown)]
    figure, axes = plt.subplots(2, 2, figsize=(11, 9), layout="constrained")
    axes = axes.ravel()
    edges = [np.append(v - 0.025, v[-1] + 0.025) for v in (xs, ys)]
    axes[0].pcolormesh(*edges, winner, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(shown) - 0.5)
    won = [i for i in range(len(shown)) if np.any(winner == i)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[i]) for i in won]
    axes[0].legend(handles, [f"{shown[i]} ({int(np.sum(winner == i))})" for i in won], fontsize=8, loc="lower right")
    axes[0].set_title("selector with the least mean regret (number of cells)", fontsize=11)
    for axis, (name, values) in zip(axes[1:], gain.items(), strict=True):
        image = axis.pcolormesh(*edges, values, cmap="RdBu_r", vmin=-60, vmax=60)
        axis.set_title(f"Gittins 2, learning 1: regret against {name}, %", fontsize=11)
        figure.colorbar(image, ax=axis)
    for axis in axes:
        axis.set(xlabel="gap between the two best arms", ylabel="rate of the best arm")
    runs = int(found["num_runs"])
    figure.suptitle(
        f"{len(rates)} triples of Bernoulli arms, 1,500 steps, {runs:,} realizations each; a cell averages its triples"
    )
    figure.savefig(path, dpi=80)
