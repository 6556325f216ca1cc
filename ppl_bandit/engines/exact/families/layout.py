"""How the latents of a program are arranged: the family of each site, and the Gaussian blocks of the real elements."""

from typing import Any, NamedTuple

import numpy as np

UNIT, POSITIVE, SIMPLEX, REAL = "unit", "positive", "simplex", "real"


class SiteBlock(NamedTuple):
    """Where the elements of a latent site are stored.

    An element is one number, or one vector for a family of vectors (a row of a simplex site).

    Attributes:
        kind: name of the site's family; `REAL` for elements of a Gaussian block.
        start: index of the site's first element among the elements of its group.
        low, high: bounds of the support, where it has any.
        num_event_dims: 1 for a family of vectors, 0 for a family of numbers.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    low: Any = 0.0
    high: Any = 1.0
    num_event_dims: int = 0

    @property
    def size(self) -> int:
        """Number of scalars."""
        return int(np.prod(self.shape, dtype=int))

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one element."""
        return self.shape[len(self.shape) - self.num_event_dims :]

    @property
    def group(self) -> str:
        """Key of the arrays that hold the elements: sites of a kind whose elements have the same shape share them."""
        return " ".join([self.kind, *map(str, self.event_shape)])

    @property
    def span(self) -> slice:
        """The site's elements among those of its group."""
        return slice(self.start, self.start + self.size // int(np.prod(self.event_shape, dtype=int)))


class Layout(NamedTuple):
    """How the latents of a program are divided into families; known when the engine is built.

    Attributes:
        sites: one block per latent site.
        power: (G,), u = (z - low)^power for each of G positive elements.
        members: (R, S) indices of the real elements of each of R Gaussian blocks, padded with 0.
        is_member: (R, S), false for padding.
        owner: (R,), the positive element whose u scales a block's precision, -1 for a block without one.
        leaves: (L, s) if the first L s columns of a block are L groups of s elements that have nonzero precision only within
            the group and with the remaining columns, the core; (0, 0) otherwise.
    """

    sites: tuple[SiteBlock, ...]
    power: np.ndarray
    members: np.ndarray
    is_member: np.ndarray
    owner: np.ndarray
    leaves: tuple[int, int] = (0, 0)

    @property
    def is_pair(self) -> np.ndarray:
        """(R, S, S), whether both entries are members of the block."""
        return self.is_member[:, :, None] & self.is_member[:, None, :]

    @property
    def is_scaled(self) -> bool:
        """Whether a positive element scales any Gaussian block."""
        return bool(np.any(self.owner >= 0))

    @property
    def along_columns(self) -> np.ndarray:
        """(S, D), directions in the real elements, each along one column of every block."""
        steps = np.zeros((self.members.shape[1], self.count(REAL)))
        for step, members, is_member in zip(steps, self.members.T, self.is_member.T, strict=True):
            step[members[is_member]] = 1.0
        return steps

    @property
    def num_scaled(self) -> np.ndarray:
        """Number of real elements that each positive element scales, (G,)."""
        counts = self.is_member.sum(axis=1)
        return np.array([counts[self.owner == element].sum() for element in range(self.power.size)], int)

    @property
    def owner_of_real(self) -> np.ndarray:
        """The positive element that scales each real element, -1 for none, (D,)."""
        return self._by_real(self.owner)

    @property
    def block_of_real(self) -> np.ndarray:
        """The block of each real element, (D,)."""
        return self._by_real(np.arange(self.owner.size))

    def _by_real(self, values: np.ndarray) -> np.ndarray:
        found = np.full(self.count(REAL), -1)
        found[self.members[self.is_member]] = np.broadcast_to(values[:, None], self.members.shape)[self.is_member]
        return found

    def of(self, kind: str) -> list[SiteBlock]:
        """Return the sites of a kind."""
        return [site for site in self.sites if site.kind == kind]

    def count(self, kind: str) -> int:
        """Return the number of scalars of a kind."""
        return sum(site.size for site in self.of(kind))

    def bounds(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper bounds of all scalars of a kind."""
        low, high = (
            np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in self.of(kind)])
            for end in ("low", "high")
        )
        return low, high
