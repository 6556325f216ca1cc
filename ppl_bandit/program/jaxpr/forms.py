"""The domain of generalised polynomials: which quantities are sums and products of latents of low degree, decided for all data.

The log density of a conjugate program is a sum of few terms: polynomials of degree 2 of the real latents, powers of the others,
and logarithms of products of these. A certificate compares the density with such a form at random points. A generalised
polynomial of low degree cannot agree with it at all of these points and deviate from it in between; a ratio of sums can (a
pole of size 1e-13, a hill 1e-8 wide), and so can a product of many factors. So a quantity that latents reach is a `Form`,
counted in degrees, and what is no form is `Refused`, with the operation at which it stopped being one.

Generators are the positive latents and the shares: latents in (0, 1), elements of a simplex, sums of these, and 1 - share. A
monomial is a product of powers of generators, times data. Division, roots and logarithms are taken of monomials alone. No
number is looked at but constants of the program, so that the result holds for all data.

Outer latents, given which a program is to be conjugate, are data too, and `ranges` proves that what they reach is an analytic
function of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.program.jaxpr.entry_reads import DATA, Reads, fold_in_numpy, reads_of_results
from ppl_bandit.program.jaxpr.interpreter import Domain, interpret
from ppl_bandit.program.jaxpr.primitives import Kind, describe_primitive, index_operands
from ppl_bandit.program.jaxpr.ranges import (
    EVERYTHING,
    NotAnalytic,
    Range,
    hull,
    lossy_conversion,
    result_range,
    softplus_range,
    support_range,
    values_range,
)
from ppl_bandit.program.jaxpr.source_lines import SourceLine, source_line
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, is_tracer

__all__ = ["Data", "Form", "Forms", "Refused"]

_CLOSE = 1e-20  # latents are not followed closer to 0 than this
_MAX_ENTRIES = 1 << 20  # of the table of elements of a simplex
_MAX_PLAIN = 4.0  # a power up to which floating point neither overflows nor flattens

Generator = tuple[int, bool]  # identifies an array of generators; whether 1 - these is meant
Powers = Mapping[Generator, float]


class Form(NamedTuple):
    """An array that depends on latents as a generalised polynomial.

    Attributes:
        token: identifies the array: equal for arrays that are computed from the same arrays in the same way.
        varies: along which axes it varies apart from factors that are data.
        degree: as a polynomial of the real latents.
        power: the sum of the powers of generators in the largest term; 1 for logarithms.
        exponents: of a monomial: the power of each generator; nan where data decide it. None if it is no monomial.
        logs: of a sum of multiples of logarithms: the multiple of each generator's logarithm; nan where data decide it.
        factor: the constant that a monomial is multiplied by, or whose logarithm is added; None where data decide it.
        affine: (generator, offset, multiple) of a constant plus a constant multiple of one generator.
        elements: of a sum of elements of one simplex: which ones, (..., elements of the site), and the site.
        mask: where it is not 0, if constants decide that.
    """

    token: int
    varies: tuple[bool, ...]
    degree: float = 0
    power: float = 0.0
    exponents: Powers | None = None
    logs: Powers | None = None
    factor: float | None = None
    affine: tuple[Generator, float, float] | None = None
    elements: tuple[np.ndarray, str] | None = None
    mask: np.ndarray | None = None


class Data(NamedTuple):
    """An array of unknown numbers that no latent reaches but outer ones.

    Attributes:
        token: as of a `Form`.
        range: of its numbers, as far as the ranges of data and of outer latents decide it.
        is_outer: whether outer latents reach it; it is proved to be an analytic function of these.
    """

    token: int
    range: Range = EVERYTHING
    is_outer: bool = False


class Refused(NamedTuple):
    """A quantity that is not proved to be a generalised polynomial, and the operation at which it stopped being one."""

    reason: str
    line: SourceLine
    remedy: str = ""


class _NoForm(Exception):
    """An operation whose result is no form; carries the reason, "" for that of the table of primitives."""


class Forms:
    """Forms of the latents of a program, and of what a jaxpr computes from them.

    Attributes:
        flattens: whether floating point may round to a constant what outer latents add to a quantity, far out.
    """

    def __init__(self, *, may_flatten: bool = False) -> None:
        self.flattens = False
        self._may_flatten, self._has_outer = may_flatten, False
        self._numbers: dict[Any, int] = {}
        self._sizes: dict[int, float] = {}  # of a generator, in units of the statistic of its family
        self._shares: set[int] = set()
        self._rows: dict[str, np.ndarray] = {}  # simplex site -> (elements, elements), whether both are of one simplex

    def evaluate(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return a `Form`, a `Refused`, `Data` or a constant array for each result, given such values for the arguments."""
        return interpret(self._domain(), closed.jaxpr, closed.consts, args)

    def data(self, name: Any, known: Range = EVERYTHING) -> Data:
        """Return unknown data in a range; two with the same name are the same."""
        return Data(self._number("data", name), known)

    def outer(self, name: str, low: float, high: float) -> Data:
        """Return outer latents between two bounds."""
        self._has_outer = True
        return Data(self._number("site", name), support_range(low, high), is_outer=True)

    def real(self, name: str, shape: tuple[int, ...]) -> Form:
        """Return real latents."""
        return Form(self._number("site", name), _varying(shape), degree=1)

    def positive(self, name: str, shape: tuple[int, ...], low: float | None, power: float) -> Form:
        """Return latents above `low`, None if it is no constant; (z - low)^power is a statistic of their family."""
        token = self._number("site", name)
        self._sizes[token] = 1.0 / abs(power)
        return self._bounded(token, shape, low, 1.0)

    def unit(self, name: str, shape: tuple[int, ...], low: float | None, high: float | None) -> Form:
        """Return latents between two bounds, None if they are no constants."""
        token = self._number("site", name)
        self._add_share(token)
        return self._bounded(token, shape, low, 1.0 if low is None or high is None else high - low)

    def simplex(self, name: str, shape: tuple[int, ...]) -> Form:
        """Return simplexes along the last axis."""
        token, size = self._number("site", name), math.prod(shape)
        if size * size > _MAX_ENTRIES:
            self._add_share(token)
            return self._bounded(token, shape, 0.0, 1.0)
        row = np.repeat(np.arange(size // shape[-1]), shape[-1])
        self._rows[name] = row[:, None] == row
        found = self._sum_of_elements(token, _varying(shape), np.eye(size, dtype=bool).reshape(*shape, size), name)
        return self._bounded(token, shape, 0.0, 1.0) if found is None else found

    def bounds(self, value: Any) -> tuple[float, float] | None:
        """Return bounds that constants decide; None if there are none."""
        if isinstance(value, Form):
            return self._bounds(value)
        if isinstance(value, Data | Refused) or not np.size(value):
            return None
        return float(np.min(value)), float(np.max(value))

    # Identity of arrays

    def _number(self, *structure: Any) -> int:
        return self._numbers.setdefault(structure, len(self._numbers))

    def _add_share(self, number: int, size: float = 1.0) -> None:
        self._shares.add(number)
        self._sizes[number] = size

    def _token_of(self, value: Any) -> int:
        if isinstance(value, Form | Data):
            return value.token
        if isinstance(value, Refused):
            return self._number("refused", value)
        array = np.asarray(value)
        return self._number("constant", array.shape, array.dtype.str, array.tobytes())

    def _tokens(self, eqn: Any, values: Sequence[Any]) -> list[int]:
        """Return tokens of the results: equal for equal operations on equal operands."""
        is_plain = describe_primitive(eqn).kind is not Kind.OTHER or eqn.primitive.name == "dot_general"
        params = repr(eqn.params) if is_plain else id(eqn)  # parameters may hold functions
        operation = self._number(eqn.primitive.name, params, *map(self._token_of, values))
        return [self._number("result", operation, number) for number in range(len(eqn.outvars))]

    def _renamed(self, powers: Powers, *by: Any, times: float = 1.0, is_share: bool = True) -> Powers:
        """Return powers of the generators that an operation makes of these; the same operation makes 1 - share of 1 - share."""
        found = {}
        for (number, side), power in powers.items():
            new = self._number("moved", number, *by)
            self._sizes[new] = times * self._sizes[number]
            if is_share and number in self._shares:
                self._shares.add(new)
            found[(new, side)] = power
        return found

    # The interpreter

    def _domain(self) -> Domain:
        return Domain(self._apply, _is_constant, self._fold, self._lift, self._call)

    def _call(self, eqn: Any, values: list[Any]) -> Sequence[Any] | None:
        """Return the result of a function that is known as a whole; None for others."""
        if eqn.params.get("name") != "softplus" or not _is_outer(values[0]):
            return None
        found, flattens = softplus_range(values[0].range)
        if flattens and not self._may_flatten:
            return None
        self.flattens |= flattens
        return [Data(self._number("softplus", values[0].token), found, is_outer=True)]

    def _lift(self, constant: Any) -> Any:
        return self.data(("traced", id(constant))) if is_tracer(constant) else constant

    def _fold(self, eqn: Any, values: list[Any]) -> list[Any]:
        found = fold_in_numpy(eqn, values)
        if all(value is not DATA for value in found):
            return list(found)
        unknown = self._of_data(eqn, values, self._tokens(eqn, values), ())
        return [own if value is DATA else value for value, own in zip(found, unknown, strict=True)]

    def _apply(self, eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name == "cond" and not isinstance(values[0], Form | Refused) and not _is_outer(values[0]):
            return self._branches(eqn, values, callers)
        if name == "select_n" and _is_constant(values[0]):
            chosen = np.unique(np.asarray(values[0]).astype(int)).tolist()
            if len(chosen) == 1:
                return [values[1 + chosen[0]]]
            values = [values[0], *[values[1 + number] for number in chosen]]
        if name == "mul" and any(_uniform(value) == 0.0 for value in values):
            return [np.zeros(eqn.outvars[0].aval.shape)]
        refused = next((value for value in values if isinstance(value, Refused)), None)
        if refused is not None:
            return [refused] * len(eqn.outvars)
        tokens = self._tokens(eqn, values)
        if not any(isinstance(value, Form) for value in values):
            return self._of_data(eqn, values, tokens, callers)
        try:
            return self._results(eqn, values, tokens)
        except _NoForm as stop:
            return _refused(eqn, callers, str(stop))

    def _of_data(self, eqn: Any, values: list[Any], tokens: list[int], callers: tuple[Any, ...]) -> Sequence[Any]:
        """Return the results of an operation on data and outer latents, with their range."""
        is_outer = any(map(_is_outer, values))
        if not self._has_outer:
            return [Data(token) for token in tokens]
        if any(_is_outer(values[i]) for i in index_operands(eqn)):
            return _refused(eqn, callers, "")
        is_same = len(values) > 1 and self._token_of(values[0]) == self._token_of(values[1])
        constants = [value if _is_constant(value) else None for value in values]
        try:
            found, flattens = result_range(eqn, list(map(_range_of, values)), constants, is_same=is_same)
            if flattens and is_outer and not self._may_flatten:
                raise NotAnalytic
        except NotAnalytic as stop:
            return _refused(eqn, callers, str(stop)) if is_outer else [Data(token) for token in tokens]
        if not isinstance(found, Range):
            return [np.full(var.aval.shape, found) for var in eqn.outvars]
        self.flattens |= flattens and is_outer
        return [Data(token, found, is_outer) for token in tokens]

    def _branches(self, eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
        """Join the results of all branches that data may take."""
        branches = eqn.params["branches"]
        if _is_constant(values[0]):
            branches = [branches[int(np.clip(int(np.asarray(values[0])), 0, len(branches) - 1))]]
        outs = [interpret(self._domain(), b.jaxpr, b.consts, values[1:], (eqn, *callers)) for b in branches]
        if len(outs) == 1:
            return outs[0]
        which = self._token_of(values[0])
        joined = []
        for cases, var in zip(zip(*outs, strict=True), eqn.outvars, strict=True):
            refused = next((case for case in cases if isinstance(case, Refused)), None)
            token = self._number("branches", which, *map(self._token_of, cases))
            joined.append(refused if refused is not None else self._joined(token, cases, len(var.aval.shape)))
        return joined

    def _results(self, eqn: Any, values: list[Any], tokens: list[int]) -> Sequence[Any]:
        name, kind = eqn.primitive.name, describe_primitive(eqn).kind
        if any(isinstance(values[i], Form) or _is_outer(values[i]) for i in index_operands(eqn)):
            raise _NoForm
        if kind is Kind.IDENTITY or name == "stop_gradient":
            return values
        if name in _RULES:
            return [_RULES[name](self, eqn, values, tokens[0])]
        if kind is Kind.COMPARISON:
            return [self._comparison(eqn, values, tokens[0])]
        if kind is Kind.CHOICE:
            return [self._joined(tokens[0], values[1:], len(eqn.outvars[0].aval.shape))]
        if kind is Kind.MOVE:
            return self._moved(eqn, values, tokens)
        if name == "scatter-add":
            return [_sum(tokens[0], (True,) * len(eqn.outvars[0].aval.shape), values)]
        raise _NoForm

    # Building forms

    def _bounded(self, token: int, shape: tuple[int, ...], low: float | None, width: float) -> Form:
        if low is None:
            return Form(token, _varying(shape), power=self._sizes[token])
        return self._affine(token, _varying(shape), (token, False), low, width)

    def _monomial(self, token: int, varies: tuple[bool, ...], exponents: Powers, factor: float | None) -> Form:
        own = {generator: power for generator, power in exponents.items() if power != 0}
        is_generator = factor is not None and list(own.values()) == [1.0]
        affine = (next(iter(own)), 0.0, factor) if is_generator and factor is not None else None
        return Form(token, varies, power=self._power_of(own), exponents=own, factor=factor, affine=affine)

    def _logs(self, token: int, varies: tuple[bool, ...], logs: Powers, factor: float | None) -> Form:
        return Form(token, varies, power=1.0, logs={g: m for g, m in logs.items() if m != 0}, factor=factor)

    def _power_of(self, exponents: Powers) -> float:
        total = sum(abs(power) * self._sizes[number] for (number, _), power in exponents.items())
        return math.inf if math.isnan(total) else float(total)

    def _affine(
        self, token: int, varies: tuple[bool, ...], generator: Generator, offset: float, multiple: float
    ) -> Form:
        """Return offset + multiple * generator: a monomial if the offset is 0, or if this is a multiple of 1 - share."""
        number, side = generator
        rounding = 4e-16 * abs(multiple)
        if abs(offset) <= rounding:
            return self._monomial(token, varies, {generator: 1.0}, multiple)
        if number in self._shares and abs(offset + multiple) <= rounding:
            return self._monomial(token, varies, {(number, not side): 1.0}, offset)
        return Form(token, varies, power=self._sizes[number], affine=(generator, offset, multiple))

    def _sum_of_elements(self, token: int, varies: tuple[bool, ...], which: np.ndarray, site: str) -> Form | None:
        """Return sums of elements of one simplex; None unless every entry is a sum of some, but not all, of one simplex."""
        same_row = self._rows[site]
        rest = (which.astype(float) @ same_row > 0) & ~which
        is_one_row = np.all((which.sum(-1) + rest.sum(-1)) == same_row[0].sum())
        if not which.any(-1).all() or not rest.any(-1).all() or not is_one_row:
            return None
        first, second = (part.tobytes() for part in (which, rest))
        number = self._number("elements", site, which.shape, min(first, second))
        self._add_share(number)
        return self._monomial(token, varies, {(number, first > second): 1.0}, 1.0)._replace(elements=(which, site))

    def _joined(self, token: int, cases: Sequence[Any], num_axes: int) -> Any:
        """Return an array of whose entries data decide which case they are."""
        forms = [case for case in cases if isinstance(case, Form)]
        if not forms:
            return Data(token, hull(list(map(_range_of, cases))), any(map(_is_outer, cases)))
        if len({self._token_of(case) for case in cases}) == 1:
            return self._alike(token, (True,) * num_axes, forms[0], "joined")
        varies, others = (True,) * num_axes, [case for case in cases if not isinstance(case, Form)]
        power = max(form.power for form in forms)
        number = self._number("joined", token)
        if all(form.exponents is not None for form in forms):
            is_share = all(self._is_share(form) for form in forms) and all(map(_is_probability, others))
            if is_share:
                # The same choice between 1 - share is 1 - this share.
                parts = [
                    next(iter(f.exponents or {})) if isinstance(f, Form) else np.asarray(f).tobytes() for f in cases
                ]
                flipped = [
                    (part[0], not part[1]) if isinstance(part, tuple) else (1.0 - np.asarray(f)).tobytes()
                    for part, f in zip(parts, cases, strict=True)
                ]
                own, other = (self._number("share", repr(names)) for names in (parts, flipped))
                number, side = min(own, other), own > other
                self._add_share(number, power)
                return self._monomial(token, varies, {(number, side): 1.0}, 1.0)
            self._sizes[number] = power
            is_positive = all(f.factor is not None and f.factor > 0 for f in forms) and all(map(_is_positive, others))
            return self._monomial(token, varies, {(number, False): 1.0}, 1.0 if is_positive else None)._replace(
                power=power
            )
        if all(form.logs is not None for form in forms):
            self._sizes[number] = max(self._power_of(form.logs or {}) for form in forms)
            return self._logs(token, varies, {(number, False): 1.0}, None)
        return _sum(token, varies, forms)

    def _is_share(self, value: Any) -> bool:
        return value.affine is not None and value.affine[1:] == (0.0, 1.0) and value.affine[0][0] in self._shares

    def _bounds(self, form: Form) -> tuple[float, float] | None:
        """Return open bounds that constants decide; None if floating point may overflow."""
        if form.power > _MAX_PLAIN or form.degree > _MAX_PLAIN or form.mask is not None:
            return None
        if form.affine is not None:
            (number, _), offset, multiple = form.affine
            end = offset + multiple if number in self._shares else math.copysign(math.inf, multiple)
            return min(offset, end), max(offset, end)
        if form.exponents is not None and form.factor:
            return (0.0, math.inf) if form.factor > 0 else (-math.inf, 0.0)
        return -math.inf, math.inf

    # Rules

    def _moved(self, eqn: Any, values: list[Any], tokens: list[int]) -> list[Any]:
        fixed = index_operands(eqn)
        operands = [value for i, value in enumerate(values) if i not in fixed]
        shapes = [var.aval.shape for var in eqn.outvars]
        if len(operands) > 1:
            known = self._moved_elements(eqn, values, operands)
            if known is not None and operands[0].elements is not None:
                varies, site = (True,) * len(shapes[0]), operands[0].elements[1]
                found = self._sum_of_elements(tokens[0], varies, known[0], site)
                if found is not None:
                    return [found]
            return [self._joined(tokens[0], operands, len(shapes[0]))]
        form: Form = operands[0]
        if eqn.primitive.name == "transpose" and not form.elements:
            order = [axis for axis in eqn.params["permutation"] if form.varies[axis]]
            if all(eqn.params["permutation"][axis] == axis for axis in order):  # what latents reach stays in place
                return [form._replace(token=tokens[0], mask=None)]
        by = (eqn.primitive.name, repr(eqn.params), *[self._token_of(values[i]) for i in fixed])
        moved, known = [], self._moved_elements(eqn, values, operands)
        for number, (token, shape) in enumerate(zip(tokens, shapes, strict=True)):
            varies = _varies_after_move(eqn, form, shape)
            own = None
            if known is not None and form.elements is not None:
                own = self._sum_of_elements(token, varies, known[number], form.elements[1])
            moved.append(self._alike(token, varies, form, *by, number) if own is None else own)
        return moved

    def _moved_elements(self, eqn: Any, values: list[Any], operands: list[Any]) -> list[np.ndarray] | None:
        """Return which elements of a simplex the entries of the results are sums of; None if that is unknown."""
        if not all(isinstance(value, Form) and value.elements is not None for value in operands):
            return None
        if len({value.elements[1] for value in operands}) > 1:
            return None
        if not all(_is_constant(values[i]) for i in index_operands(eqn)):
            return None
        return reads_of_results(
            eqn, [Reads(v.elements[0]) if isinstance(v, Form) and v.elements is not None else v for v in values]
        )

    def _alike(self, token: int, varies: tuple[bool, ...], form: Form, *by: Any, keeps_constants: bool = True) -> Form:
        """Return a form of which every entry is an entry of another one."""
        factor = form.factor if keeps_constants else None
        if form.exponents is not None:
            return self._monomial(token, varies, self._renamed(form.exponents, *by), factor)._replace(power=form.power)
        if form.logs is not None:
            return self._logs(token, varies, self._renamed(form.logs, *by), factor)
        affine = None
        if form.affine is not None and keeps_constants:
            (generator,) = self._renamed({form.affine[0]: 1.0}, *by)
            affine = (generator, *form.affine[1:])
        return Form(token, varies, form.degree, form.power, affine=affine)

    def _add(self, eqn: Any, values: list[Any], token: int) -> Any:
        x, y = values
        shape = eqn.outvars[0].aval.shape
        if not isinstance(x, Form):
            x, y = y, x
        varies = _any_varies([x, y], shape)
        if not isinstance(y, Form):
            constant = _uniform(y)
            if constant == 0.0 and len(x.varies) == len(shape):
                return x
            if x.logs is not None:
                factor = None
                if x.factor is not None and constant is not None and abs(constant) < 700.0:
                    factor = x.factor * math.exp(constant)
                return self._logs(token, varies, x.logs, factor)
            if constant is not None and x.exponents is not None and x.factor is not None:
                odds = self._odds(x.exponents, x.factor, constant)
                if odds is not None:
                    return self._monomial(token, varies, odds, x.factor)
            if x.affine is None or constant is None:
                return _sum(token, varies, [x])
            own = self._affine(token, varies, x.affine[0], x.affine[1] + constant, x.affine[2])
            if x.elements is not None and self._is_share(own):  # 1 - a sum of elements
                which, site = x.elements
                rest = (which.astype(float) @ self._rows[site] > 0) & ~which
                found = self._sum_of_elements(token, varies, rest, site)
                return own if found is None else found
            return own
        if x.logs is not None and y.logs is not None:
            factor = None if x.factor is None or y.factor is None else x.factor * y.factor
            return self._logs(token, varies, _merged(x.logs, y.logs), factor)
        together = self._sum_of_shares(token, varies, x, y)
        if together is not None:
            return together
        if x.affine is not None and y.affine is not None and x.affine[0][0] == y.affine[0][0]:
            (number, side), offset, multiple = x.affine
            (_, other), more, times = y.affine
            if other != side:  # more + times * (1 - generator)
                more, times = more + times, -times
            if multiple + times == 0.0:
                return np.full(shape, offset + more)
            return self._affine(token, varies, (number, side), offset + more, multiple + times)
        if x.exponents is not None and x.exponents == y.exponents:  # two multiples of one monomial
            factor = None if x.factor is None or y.factor is None else x.factor + y.factor
            return np.zeros(shape) if factor == 0.0 else self._monomial(token, varies, x.exponents, factor)
        return _sum(token, varies, [x, y])

    def _odds(self, exponents: Powers, factor: float, constant: float) -> Powers | None:
        """Return 1 / share - 1 or (1 - share) / share + 1 as a monomial; None if the sum is neither."""
        below = next((generator for generator, power in exponents.items() if power == -1.0), None)
        if below is None or below[0] not in self._shares or abs(constant) != abs(factor):
            return None
        above = (below[0], not below[1])
        if constant == -factor and dict(exponents) == {below: -1.0}:
            return {above: 1.0, below: -1.0}
        return {below: -1.0} if constant == factor and dict(exponents) == {above: 1.0, below: -1.0} else None

    def _sum_of_shares(self, token: int, varies: tuple[bool, ...], x: Form, y: Form) -> Any:
        """Add sums of elements of one simplex, or subtract one that is part of the other; None if they are no such sums."""
        if x.elements is None or y.elements is None or x.affine is None or y.affine is None:
            return None
        if x.elements[1] != y.elements[1]:
            return None
        multiples = (x.affine[2], y.affine[2])
        first, second = np.broadcast_arrays(x.elements[0], y.elements[0])
        if multiples == (1.0, 1.0) and not np.any(first & second):
            which = first | second
            if np.all(which == self._rows[x.elements[1]][np.argmax(which, -1)]):
                return np.ones(which.shape[:-1])
        elif multiples == (1.0, -1.0) and not np.any(second & ~first):
            which = first & ~second
        elif multiples == (-1.0, 1.0) and not np.any(first & ~second):
            which = second & ~first
        else:
            return None
        return self._sum_of_elements(token, varies, which, x.elements[1])

    def _sub(self, eqn: Any, values: list[Any], token: int) -> Any:
        return self._add(eqn, [values[0], self._negative(values[1])], token)

    def _neg(self, eqn: Any, values: list[Any], token: int) -> Any:
        return self._negative(values[0])._replace(token=token)

    def _negative(self, value: Any) -> Any:
        if isinstance(value, Data):
            low, high = value.range[:2]
            return value._replace(token=self._number("negative", value.token), range=Range(-high, -low))
        if not isinstance(value, Form):
            return np.negative(value)
        return self._scaled(self._number("negative", value.token), value.varies, value, -1.0)

    def _scaled(self, token: int, varies: tuple[bool, ...], form: Form, by: float | None) -> Form:
        """Return data times a form, by a constant or, if None, by unknown numbers."""
        factor = form.factor if form.factor is None or by is None else form.factor * by
        factor = None if by is None else factor
        if form.exponents is not None:
            out = self._monomial(token, varies, form.exponents, factor)._replace(power=form.power)
            keeps_elements = form.elements is not None and by is not None
            return out._replace(elements=form.elements if keeps_elements else None, mask=form.mask)
        if form.logs is not None:
            multiple = math.nan if by is None else by
            constant = None
            if form.factor is not None and form.factor > 0 and by is not None:
                constant = _power(form.factor, by)
            return self._logs(token, varies, {g: m * multiple for g, m in form.logs.items()}, constant)
        affine = None
        if form.affine is not None and by is not None:
            affine = (form.affine[0], form.affine[1] * by, form.affine[2] * by)
        return Form(token, varies, form.degree, form.power, affine=affine)

    def _mul(self, eqn: Any, values: list[Any], token: int) -> Any:
        x, y = values
        shape = eqn.outvars[0].aval.shape
        if not isinstance(x, Form):
            x, y = y, x
        varies = _any_varies([x, y], shape)
        if isinstance(y, Form):
            return self._product(token, varies, x, y)
        constant = _uniform(y)
        out = self._scaled(token, varies, x, constant)
        if _is_constant(y) and constant is None and not np.all(y):
            out = out._replace(mask=np.broadcast_to(np.asarray(y) != 0, shape))
            if np.all((np.asarray(y) == 0) | (np.asarray(y) == 1)):  # the entries that are not 0 are those of x
                out = out._replace(factor=x.factor)
        return out

    def _product(self, token: int, varies: tuple[bool, ...], x: Form, y: Form) -> Form:
        if x.exponents is not None and y.exponents is not None:
            factor = None if x.factor is None or y.factor is None else x.factor * y.factor
            return self._monomial(token, varies, _merged(x.exponents, y.exponents), factor)
        return Form(token, varies, x.degree + y.degree, x.power + y.power)

    def _div(self, eqn: Any, values: list[Any], token: int) -> Any:
        x, y = values
        varies = _any_varies(values, eqn.outvars[0].aval.shape)
        if not isinstance(y, Form):
            if _is_outer(y) and y.range.low <= 0.0 <= y.range.high:
                raise _NoForm
            constant = _uniform(y)
            return self._scaled(token, varies, x, 1.0 / constant if constant else None)
        inverse = self._raised(self._number("inverse", y.token), y, -1.0, _RATIO)
        if isinstance(x, Form):
            return self._product(token, varies, x, inverse)
        return self._scaled(token, varies, inverse, _uniform(x))

    def _raised(self, token: int, form: Form, power: float, reason: str) -> Form:
        """Raise a monomial to a power; nan where data decide it."""
        if form.exponents is None:
            raise _NoForm(reason)
        factor = _power(form.factor, power) if form.factor is not None and form.factor > 0 else None
        if form.factor is not None and form.factor < 0 and power == -1.0:
            factor = 1.0 / form.factor
        return self._monomial(token, form.varies, {g: e * power for g, e in form.exponents.items()}, factor)

    def _whole_power(self, token: int, form: Form, power: int) -> Any:
        if form.exponents is not None or power < 0:
            return self._raised(token, form, float(power), _NEGATIVE_POWER)
        return Form(token, form.varies, power * form.degree, power * form.power)

    def _integer_pow(self, eqn: Any, values: list[Any], token: int) -> Any:
        power = int(eqn.params["y"])
        return np.ones(eqn.outvars[0].aval.shape) if power == 0 else self._whole_power(token, values[0], power)

    def _square(self, eqn: Any, values: list[Any], token: int) -> Any:
        return self._whole_power(token, values[0], 2)

    def _pow(self, eqn: Any, values: list[Any], token: int) -> Any:
        x, y = values
        if not isinstance(x, Form) or isinstance(y, Form):
            raise _NoForm("a power whose exponent depends on latents, which is a power that can overflow")
        power = _uniform(y)
        if power is not None and power > 0 and power == round(power):
            found = self._whole_power(token, x, int(power))
        else:
            found = self._raised(token, x, math.nan if power is None else power, _REAL_POWER)
        return found._replace(varies=_any_varies([x], eqn.outvars[0].aval.shape))

    def _sqrt(self, eqn: Any, values: list[Any], token: int) -> Any:
        power = {"sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1.0 / 3.0}[eqn.primitive.name]
        return self._raised(token, values[0], power, _ROOT)

    def _log(self, eqn: Any, values: list[Any], token: int) -> Any:
        return self._logarithm(token, values[0])

    def _logarithm(self, token: int, form: Any) -> Any:
        if not isinstance(form, Form):
            return Data(token, is_outer=_is_outer(form))
        if form.exponents is None:
            raise _NoForm(_LOGARITHM)
        return self._logs(token, form.varies, form.exponents, form.factor)

    def _log1p(self, eqn: Any, values: list[Any], token: int) -> Any:
        one_more = self._add(eqn, [values[0], np.ones(())], self._number("one more", values[0].token))
        return self._logarithm(token, one_more)

    def _exp(self, eqn: Any, values: list[Any], token: int) -> Any:
        if values[0].logs is None:
            raise _NoForm
        return self._monomial(token, values[0].varies, values[0].logs, values[0].factor)

    def _expm1(self, eqn: Any, values: list[Any], token: int) -> Any:
        return self._add(eqn, [self._exp(eqn, values, self._number("exp", token)), -np.ones(())], token)

    def _logistic(self, eqn: Any, values: list[Any], token: int) -> Any:
        """Return a share again of its log odds."""
        odds = values[0].logs or {}
        above = [generator for generator, multiple in odds.items() if multiple == 1.0]
        below = [generator for generator, multiple in odds.items() if multiple == -1.0]
        is_share = len(odds) == 2 and len(above) == len(below) == 1 and values[0].factor is not None
        if is_share and above[0] == (below[0][0], not below[0][1]) and abs(values[0].factor - 1.0) < 1e-12:
            return self._monomial(token, values[0].varies, {above[0]: 1.0}, 1.0)
        raise _NoForm

    def _comparison(self, eqn: Any, values: list[Any], token: int) -> Any:
        name, (x, y), shape = eqn.primitive.name, values, eqn.outvars[0].aval.shape
        forms = [value for value in values if isinstance(value, Form)]
        if all(form.degree <= _MAX_PLAIN and form.power <= _MAX_PLAIN for form in forms):
            if self._token_of(x) == self._token_of(y):  # a test for nan, which data may have put there
                return np.full(shape, name in ("eq", "le", "ge")) if self._is_finite(x) else Data(token)
            if not isinstance(x, Form):
                x, y, name = y, x, {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(name, name)
            if _is_constant(y) and np.size(y):
                least, most, bounds = float(np.min(y)), float(np.max(y)), self._bounds(x)
                if bounds is not None and (bounds[1] <= least or bounds[0] >= most):
                    if not self._is_finite(x):
                        return Data(token)
                    is_below = bounds[1] <= least
                    return np.full(shape, name == "ne" or (name in ("lt", "le")) == is_below and name != "eq")
                if least == most == 0.0 and self._has_sign(x):
                    return Data(token)
        raise _NoForm

    def _test_of_finiteness(self, eqn: Any, values: list[Any], token: int) -> Any:
        if values[0].power > _MAX_PLAIN or values[0].degree > _MAX_PLAIN:
            raise _NoForm
        return np.full(eqn.outvars[0].aval.shape, True) if self._is_finite(values[0]) else Data(token)

    def _is_finite(self, form: Form) -> bool:
        """Return whether constants decide that a form of low power is finite; data may be infinite or nan."""
        return form.affine is not None or (form.factor is not None and math.isfinite(form.factor))

    def _abs(self, eqn: Any, values: list[Any], token: int) -> Any:
        if not self._has_sign(values[0]):
            raise _NoForm
        factor = values[0].factor
        return self._monomial(token, values[0].varies, values[0].exponents, None if factor is None else abs(factor))

    def _sign(self, eqn: Any, values: list[Any], token: int) -> Any:
        if not self._has_sign(values[0]) or values[0].power > _MAX_PLAIN:
            raise _NoForm
        return Data(token)

    def _has_sign(self, form: Form) -> bool:
        """Return whether constants or data, and no outer latents, decide the sign of a form."""
        return form.exponents is not None and (form.factor is not None or not self._has_outer)

    def _max(self, eqn: Any, values: list[Any], token: int) -> Any:
        return self._larger(eqn, values[0], values[1])

    def _min(self, eqn: Any, values: list[Any], token: int) -> Any:
        return self._larger(eqn, values[0], values[1], sign=-1.0)

    def _clamp(self, eqn: Any, values: list[Any], token: int) -> Any:
        low, x, high = values
        above = self._larger(eqn, x, low)
        return self._larger(eqn, above, high, sign=-1.0) if isinstance(above, Form) else above

    def _larger(self, eqn: Any, x: Any, y: Any, sign: float = 1.0) -> Any:
        """Return the larger of a form and a constant, if it is always the same one; with sign -1 the smaller."""
        if not isinstance(x, Form):
            x, y = y, x
        bounds = self._bounds(x) if isinstance(x, Form) and _is_constant(y) else None
        if bounds is None:
            raise _NoForm
        own, other = sorted((sign * bounds[0], sign * bounds[1])), sign * np.asarray(y, float)
        if np.max(other) <= own[0] + max(_CLOSE, 2.3e-16 * abs(own[0])):
            return x
        if np.min(other) >= own[1]:
            return np.broadcast_to(y, eqn.outvars[0].aval.shape)
        raise _NoForm

    def _reduce_sum(self, eqn: Any, values: list[Any], token: int) -> Any:
        form, axes, shape = values[0], tuple(eqn.params["axes"]), eqn.invars[0].aval.shape
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        varies, count = tuple(form.varies[axis] for axis in kept), math.prod(shape[axis] for axis in axes)
        if form.elements is not None and self._is_share(form):
            counts = form.elements[0].sum(axis=axes)
            found = None
            if counts.max(initial=0) <= 1:
                which = counts > 0
                if np.all(which == self._rows[form.elements[1]][np.argmax(which, -1)]):
                    return np.ones(which.shape[:-1])
                found = self._sum_of_elements(token, varies, which, form.elements[1])
            if found is not None:
                return found
        by = ("reduce_sum", axes)
        if count == 1:
            return self._alike(token, varies, form, *by)
        if form.mask is not None and form.mask.sum(axis=axes).max(initial=0) <= 1:
            is_full = bool(np.all(form.mask.sum(axis=axes)))
            return self._alike(token, varies, form, *by, form.mask.tobytes(), keeps_constants=is_full)
        if form.logs is not None:
            return self._logs(token, varies, self._renamed(form.logs, *by, times=count, is_share=False), None)
        if form.exponents is not None and not any(form.varies[axis] for axis in axes):
            factor = None if form.factor is None else count * form.factor
            return self._alike(token, varies, form, *by)._replace(factor=factor, affine=None)
        return _sum(token, varies, [form])

    def _cumsum(self, eqn: Any, values: list[Any], token: int) -> Any:
        form = values[0]
        if form.elements is not None and self._is_share(form):
            (which,) = reads_of_results(eqn, [Reads(form.elements[0])]) or (None,)
            is_disjoint = form.elements[0].sum(axis=eqn.params["axis"]).max(initial=0) <= 1
            if which is not None and is_disjoint:
                found = self._sum_of_elements(token, form.varies, which, form.elements[1])
                if found is not None:
                    return found
                # Where the sum is of all elements it is 1: such entries are shares with nothing left.
                if np.all(which.any(-1)) and not np.any(which & ~self._rows[form.elements[1]][np.argmax(which, -1)]):
                    number = self._number("elements", form.elements[1], which.shape, which.tobytes())
                    self._add_share(number)
                    sums = self._monomial(token, form.varies, {(number, False): 1.0}, 1.0)
                    return sums._replace(elements=(which, form.elements[1]))
        if form.logs is not None:
            by = ("cumsum", repr(eqn.params))
            times = eqn.invars[0].aval.shape[eqn.params["axis"]]
            return self._logs(token, form.varies, self._renamed(form.logs, *by, times=times, is_share=False), None)
        return _sum(token, form.varies, [form])

    def _product_along(self, eqn: Any, values: list[Any], token: int) -> Any:
        form, shape = values[0], eqn.invars[0].aval.shape
        axes = eqn.params["axes"] if "axes" in eqn.params else (eqn.params["axis"],)
        count = math.prod(shape[axis] for axis in axes)
        varies = form.varies
        if "axes" in eqn.params:
            varies = tuple(v for axis, v in enumerate(varies) if axis not in axes)
        if form.exponents is None:
            return Form(token, varies, count * form.degree, count * form.power)
        by = (eqn.primitive.name, repr(eqn.params))
        renamed = self._renamed(form.exponents, *by, times=count, is_share=False)
        is_plain = form.factor == 1.0
        return self._monomial(token, varies, renamed, 1.0 if is_plain else None)

    def _dot_general(self, eqn: Any, values: list[Any], token: int) -> Any:
        (own_sums, other_sums), (own_batch, other_batch) = eqn.params["dimension_numbers"]
        parts = [(values[0], eqn.invars[0], own_sums, own_batch), (values[1], eqn.invars[1], other_sums, other_batch)]
        free = [
            [axis for axis in range(len(atom.aval.shape)) if axis not in (*sums, *batch)]
            for _, atom, sums, batch in parts
        ]
        along = [v.varies if isinstance(v, Form) else (False,) * len(atom.aval.shape) for v, atom, _, _ in parts]
        varies = (
            *[along[0][i] or along[1][j] for i, j in zip(own_batch, other_batch, strict=True)],
            *[along[side][axis] for side in (0, 1) for axis in free[side]],
        )
        is_scaled = not any(along[0][i] or along[1][j] for i, j in zip(own_sums, other_sums, strict=True))
        x, y = values
        if isinstance(x, Form) and isinstance(y, Form):
            if x.exponents is not None and y.exponents is not None and is_scaled:
                return self._product(token, varies, x, y)._replace(factor=None, affine=None)
            return Form(token, varies, x.degree + y.degree, x.power + y.power)
        side = 0 if isinstance(x, Form) else 1
        form, other, sums = values[side], values[1 - side], parts[1 - side][2]
        by = ("dot_general", repr(eqn.params), side, self._token_of(other))
        if form.exponents is not None and (
            is_scaled or math.prod(parts[side][1].aval.shape[i] for i in parts[side][2]) == 1
        ):
            return self._alike(token, varies, form, *by, keeps_constants=False)
        if _is_constant(other) and np.count_nonzero(other, axis=tuple(sums)).max(initial=0) <= 1:  # picks entries
            is_one = bool(np.all(np.sum(np.asarray(other), axis=tuple(sums)) == 1.0))
            is_one &= bool(np.all(np.isin(other, (0, 1))))
            return self._alike(token, (True,) * len(varies), form, *by, keeps_constants=is_one)
        return _sum(token, varies, [form])

    def _cholesky(self, eqn: Any, values: list[Any], token: int) -> Any:
        form = values[0]
        if form.exponents is None or any(form.varies[-2:]):
            raise _NoForm("a factorisation of a matrix that latents do not multiply as a whole")
        return self._monomial(token, form.varies, {g: 0.5 * e for g, e in form.exponents.items()}, None)

    def _triangular_solve(self, eqn: Any, values: list[Any], token: int) -> Any:
        matrix, right = values
        inverse: Form | None = None
        if isinstance(matrix, Form):
            if matrix.exponents is None or any(matrix.varies[-2:]):
                raise _NoForm("a triangular solve with a matrix that latents do not multiply as a whole")
            inverse = self._raised(self._number("inverse", token), matrix, -1.0, "")._replace(factor=None, affine=None)
        ndim = len(eqn.outvars[0].aval.shape)
        if not isinstance(right, Form):
            assert inverse is not None
            return self._monomial(token, inverse.varies, inverse.exponents or {}, None)
        varies = (*_any_varies([v for v in (inverse, right) if v is not None], (0,) * ndim)[:-2], True, True)
        if inverse is None:
            if right.exponents is not None and not any(right.varies[-2:]):
                return self._alike(token, right.varies, right, "solve", self._token_of(matrix), keeps_constants=False)
            return _sum(token, varies, [right])
        if right.exponents is not None and not any(right.varies[-2:]):
            return self._product(token, varies, inverse, right)._replace(factor=None, affine=None)
        return Form(token, varies, right.degree, right.power + inverse.power)

    def _convert(self, eqn: Any, values: list[Any], token: int) -> Any:
        reason = lossy_conversion(eqn)
        if reason:
            raise _NoForm(reason)
        return values[0]


_RATIO = "division by a quantity that is not a product of powers of latents, which may have a pole between any points"
_NEGATIVE_POWER = "a negative power of a quantity that is not a product of powers of latents"
_REAL_POWER = "a real power of a quantity that is not a product of powers of latents"
_ROOT = "the square root of a quantity that is not a product of powers of latents"
_LOGARITHM = "the logarithm of a quantity that is not a product of powers of latents"

_RULES: dict[str, Callable[[Forms, Any, list[Any], int], Any]] = {
    "add": Forms._add,
    "add_any": Forms._add,
    "sub": Forms._sub,
    "neg": Forms._neg,
    "mul": Forms._mul,
    "div": Forms._div,
    "square": Forms._square,
    "integer_pow": Forms._integer_pow,
    "pow": Forms._pow,
    **dict.fromkeys(("sqrt", "rsqrt", "cbrt"), Forms._sqrt),
    "log": Forms._log,
    "log1p": Forms._log1p,
    "exp": Forms._exp,
    "expm1": Forms._expm1,
    "logistic": Forms._logistic,
    "is_finite": Forms._test_of_finiteness,
    "abs": Forms._abs,
    "sign": Forms._sign,
    "max": Forms._max,
    "min": Forms._min,
    "clamp": Forms._clamp,
    "reduce_sum": Forms._reduce_sum,
    "cumsum": Forms._cumsum,
    "reduce_prod": Forms._product_along,
    "cumprod": Forms._product_along,
    "dot_general": Forms._dot_general,
    "cholesky": Forms._cholesky,
    "triangular_solve": Forms._triangular_solve,
    "convert_element_type": Forms._convert,
}


def _is_constant(value: Any) -> bool:
    return not isinstance(value, Form | Data | Refused)


def _is_outer(value: Any) -> bool:
    return isinstance(value, Data) and value.is_outer


def _range_of(value: Any) -> Range:
    return value.range if isinstance(value, Data) else values_range(value)


def _refused(eqn: Any, callers: tuple[Any, ...], reason: str) -> list[Refused]:
    """Return the refusal of the results of an operation; without a reason, that of the table of primitives."""
    described = describe_primitive(eqn)
    line = source_line((eqn, *callers))
    return [Refused(reason or described.refusal, line, described.remedy)] * len(eqn.outvars)


def _uniform(value: Any) -> float | None:
    """Return the number that all entries of a constant are; None if there is none."""
    if not _is_constant(value) or not np.size(value):
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        return None
    first = float(array.flat[0])
    return first if np.all(array == first) and math.isfinite(first) else None


def _is_probability(value: Any) -> bool:
    return _is_constant(value) and bool(np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)))


def _is_positive(value: Any) -> bool:
    return _is_constant(value) and bool(np.all(np.asarray(value) > 0))


def _power(base: float, exponent: float) -> float | None:
    try:
        found = base**exponent
    except (OverflowError, ZeroDivisionError):
        return None
    return found if math.isfinite(found) and found != 0.0 else None


def _varying(shape: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple(size > 1 for size in shape)


def _any_varies(values: Sequence[Any], shape: tuple[int, ...]) -> tuple[bool, ...]:
    found = [value.varies for value in values if isinstance(value, Form) and len(value.varies) == len(shape)]
    return tuple(any(own[axis] for own in found) for axis in range(len(shape)))


def _sum(token: int, varies: tuple[bool, ...], values: Sequence[Any]) -> Form:
    """Return a sum that is no monomial."""
    forms = [value for value in values if isinstance(value, Form)]
    return Form(token, varies, max(form.degree for form in forms), max(form.power for form in forms))


def _merged(x: Powers, y: Powers) -> dict[Generator, float]:
    return {generator: x.get(generator, 0.0) + y.get(generator, 0.0) for generator in {**x, **y}}


def _varies_after_move(eqn: Any, form: Form, shape: tuple[int, ...]) -> tuple[bool, ...]:
    name, params = eqn.primitive.name, eqn.params
    if not any(form.varies):
        return (False,) * len(shape)
    if name == "broadcast_in_dim":
        varies = [False] * len(shape)
        for axis, target in enumerate(params["broadcast_dimensions"]):
            varies[target] = form.varies[axis]
        return tuple(varies)
    if name == "transpose":
        return tuple(form.varies[axis] for axis in params["permutation"])
    if name == "slice":
        return form.varies
    if name in ("reshape", "squeeze", "expand_dims"):
        old = eqn.invars[0].aval.shape
        kept = [varies for size, varies in zip(old, form.varies, strict=True) if size != 1]
        if [size for size in old if size != 1] == [size for size in shape if size != 1]:
            remaining = iter(kept)
            return tuple(size != 1 and next(remaining) for size in shape)
    return (True,) * len(shape)
