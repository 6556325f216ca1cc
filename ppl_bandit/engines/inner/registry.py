"""The families of the exact engine, by kind. To add one, write its module and list it here.

A latent's support determines its family: the unit interval a Beta, positive numbers a Gamma of a power of the latent, the
simplex a Dirichlet. Real latents form Gaussian blocks (`gaussian`).
"""

from ppl_bandit.engines.inner.beta_dirichlet import BETA, DIRICHLET
from ppl_bandit.engines.inner.gamma import GAMMA
from ppl_bandit.engines.inner.layout import Family, Layout, SiteBlock

FAMILIES: dict[str, Family] = {family.kind: family for family in (BETA, GAMMA, DIRICHLET)}


def family_of_group(group: str) -> Family:
    """Return the family of a group of elements (`SiteBlock.group`)."""
    return FAMILIES[group.split(" ")[0]]


def groups_of(layout: Layout) -> dict[str, list[SiteBlock]]:
    """Return the sites of each group of elements, in the order of the registry; real elements have none."""
    groups: dict[str, list[SiteBlock]] = {}
    for kind in FAMILIES:
        for site in layout.of(kind):
            groups.setdefault(site.group, []).append(site)
    return groups
