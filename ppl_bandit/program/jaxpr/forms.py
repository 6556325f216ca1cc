"""The domain of generalised polynomials: which quantities are sums and products of latents of low degree, decided for all data.

The log density of a conjugate program is a sum of few terms: polynomials of degree 2 of the real latents, powers of the others,
and logarithms of products of these. A certificate compares the density with such a form at random points. A generalised
polynomial of low degree cannot agree with it at all of these points and deviate from it in between; a ratio of sums can (a
pole of size 1e-13, a hill 1e-8 wide), and so can a product of many factors. So a number that latents reach is a `Form`, counted
in degrees, and what is no form is `Refused`, with the operation at which it stopped being one.

Generators are the positive latents and the shares: latents in (0, 1), sums of elements of a simplex, and 1 - share. A monomial
is a product of powers of generators, times data. Division, roots and logarithms are taken of monomials alone. No number is
looked at but constants of the program, so that the result holds for all data.

Outer latents, given which a program is to be conjugate, are data too, and `ranges` proves that what they reach is an analytic
function of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.program.jaxpr.entrywise import Entries, Entrywise, Known
from ppl_bandit.program.jaxpr.interpreter import SourceLine, is_jax_function, source_line
from ppl_bandit.program.jaxpr.primitives import Kind, describe_primitive
from ppl_bandit.program.jaxpr.ranges import (
    EVERYTHING,
    NoProof,
    Range,
    hull,
    lossy_conversion,
    product_range,
    result_range,
    softplus_range,
    sum_range,
    support_range,
    values_range,
)

_CLOSE = 1e-20  # latents are not followed closer to 0 than this
_MAX_PLAIN = 4.0  # a power up to which floating point neither overflows nor flattens
_MAX_TERMS = 4  # of a sum that is followed term by term
_MAX_LOGS = 256  # of a sum of logarithms
_MAX_COEFFICIENT = 1e200  # times a low power of a latent it does not overflow

Generator = tuple[int, bool]  # the number of a generator; whether 1 - this is meant
Powers = frozenset[tuple[Generator, float | None]]  # of a monomial; None where data decide the power
_ONE: Powers = frozenset()


class Form(NamedTuple):
    """A number that depends on latents as a generalised polynomial.

    Attributes:
        degree: as a polynomial of the real latents.
        power: the sum of the powers of generators in the largest term; 1 for logarithms.
        terms: monomials and their coefficients, None where data decide them; None if they are not followed.
        logs: of a sum of multiples of logarithms: the monomial whose logarithm it is.
        factor: the constant that the logarithm is also of; None where data decide it.
    """

    degree: float = 0
    power: float = 0.0
    terms: frozenset[tuple[Powers, float | None]] | None = None
    logs: Powers | None = None
    factor: float | None = None

    @property
    def monomial(self) -> tuple[Powers, float | None] | None:
        """The powers and the coefficient of a monomial; None if it is none."""
        return next(iter(self.terms)) if self.terms is not None and len(self.terms) == 1 else None


class Data(NamedTuple):
    """An unknown number that no latent reaches but outer ones.

    Attributes:
        range: of the number, as far as the ranges of data and of outer latents decide it.
        is_outer: whether outer latents reach it; it is proved to be an analytic function of these.
        name: equal for numbers that are computed from the same outer latents in the same way; None for others.
    """

    range: Range = EVERYTHING
    is_outer: bool = False
    name: int | None = None


class Refused(NamedTuple):
    """A number that is not proved to be a generalised polynomial, and the operation at which it stopped being one."""

    reason: str
    line: SourceLine
    remedy: str = ""


class Forms(Entrywise):
    """Forms of the latents of a program, and of what a jaxpr computes from them.

    Attributes:
        flattens: whether floating point may round to a constant what outer latents add to a quantity, far out.
    """

    def __init__(self, *, may_flatten: bool = False) -> None:
        super().__init__()
        self.flattens = False
        self._may_flatten, self._has_outer = may_flatten, False
        self._names: dict[Any, int] = {}
        self._sizes: dict[int, float] = {}  # of a generator, in units of the statistic of its family
        self._shares: set[int] = set()
        self._chosen: dict[int, Range] = {}  # bounds of a generator that stands for what data choose
        # Share of a simplex -> the shares of this simplex, the bits of its elements, those of all elements.
        self._elements: dict[int, tuple[dict[int, int], int, int]] = {}

    # Latents

    def outer(self, shape: tuple[int, ...], low: float, high: float) -> Entries:
        """Return outer latents between two bounds."""
        self._has_outer, own = True, support_range(low, high)
        return self.entries([Data(own, True, self._name(object())) for _ in range(math.prod(shape))], shape)

    def _name(self, structure: Any) -> int:
        return self._names.setdefault(structure, len(self._names))

    def positive(self, shape: tuple[int, ...], low: float | None, power: float) -> Entries:
        """Return latents above `low`, None if it is no constant; (z - low)^power is a statistic of their family."""
        return self._site(shape, low, 1.0, 1.0 / abs(power), is_share=False)

    def unit(self, shape: tuple[int, ...], low: float | None, high: float | None) -> Entries:
        """Return latents between two bounds, None if they are no constants."""
        width = 1.0 if low is None or high is None else high - low
        return self._site(shape, None if high is None else low, width, 1.0, is_share=True)

    def simplex(self, shape: tuple[int, ...]) -> Entries:
        """Return simplexes along the last axis."""
        size, every = shape[-1], (1 << shape[-1]) - 1
        simplexes: list[dict[int, int]] = [{} for _ in range(math.prod(shape[:-1]))]
        parts = [self._share_of_elements(own, 1 << element, every) for own in simplexes for element in range(size)]
        return self.entries(parts, shape)

    def _site(self, shape: tuple[int, ...], low: float | None, width: float, size: float, *, is_share: bool) -> Entries:
        """Return low + width * generator for each entry."""
        generators = [self._generator(size, is_share=is_share) for _ in range(math.prod(shape))]
        if low is None:
            return self.entries(Form(power=size), shape)
        return self.entries([self._sum({_ONE: low, _of(generator): width}) for generator in generators], shape)

    def _generator(self, size: float, *, is_share: bool) -> Generator:
        """Return a new generator."""
        number = len(self._sizes)
        self._sizes[number] = size
        if is_share:
            self._shares.add(number)
        return number, False

    def _share_of_elements(self, simplex: dict[int, int], own: int, every: int) -> Any:
        """Return a sum of elements of a simplex, which are the bits of an integer."""
        if own == every:
            return Known(1.0)
        first = min(own, every & ~own)
        if first not in simplex:
            simplex[first] = self._generator(1.0, is_share=True)[0]
            self._elements[simplex[first]] = simplex, first, every
        return self._monomial(_of((simplex[first], own != first)), 1.0)

    # The domain of numbers

    def unknown(self, array: np.ndarray | None = None) -> Data:
        """Return a number that no latent reaches."""
        return Data() if array is None else Data(values_range(array))

    def is_data(self, value: Any) -> bool:
        """Return whether no latent reaches a number."""
        return isinstance(value, Known) or (isinstance(value, Data) and not value.is_outer)

    def apply(self, eqn: Any, parts: Sequence[Any], callers: tuple[Any, ...]) -> Any:
        """Return the result of an elementwise operation on numbers."""
        name = eqn.primitive.name
        refused = next((part for part in parts if isinstance(part, Refused)), None)
        if refused is not None and not (name == "mul" and Known(0) in parts):
            return refused
        is_same = len(eqn.invars) > 1 and eqn.invars[0] is eqn.invars[1]
        if not any(isinstance(part, Form | Refused) for part in parts):
            return self._of_data(eqn, parts, callers, is_same)
        try:
            if name in _RULES:
                return _RULES[name](self, *parts)
            if name == "integer_pow":
                return self._whole_power(parts[0], int(eqn.params["y"]))
            if name == "convert_element_type" and lossy_conversion(eqn):
                raise NoProof(lossy_conversion(eqn))
            if name in ("convert_element_type", "stop_gradient"):
                return parts[0]
            if name in _ORDERED or describe_primitive(eqn).kind is Kind.COMPARISON:
                return self._ordered(eqn, parts, is_same=is_same)
            raise NoProof
        except NoProof as stop:
            return _refused(eqn, callers, str(stop))

    def add(self, x: Any, y: Any) -> Any:
        """Return a sum."""
        for part, other in ((x, y), (y, x)):
            if isinstance(part, Refused) or other == Known(0):
                return part
        if not isinstance(x, Form) and not isinstance(y, Form):
            if isinstance(x, Known) and isinstance(y, Known):
                return Known(x.number + y.number)
            return Data(sum_range(_range_of(x), _range_of(y)), _is_outer(x) or _is_outer(y))
        logs = [part for part in (x, y) if isinstance(part, Form) and part.logs is not None]
        rest = [part for part in (x, y) if part not in logs]
        if logs and not any(isinstance(part, Form) for part in rest):
            factors = [form.factor for form in logs] + [_exponential(part) for part in rest]
            powers = _merged(*(form.logs or _ONE for form in logs))
            return self._logarithm(powers, None if None in factors else math.prod(f for f in factors if f is not None))
        terms = [_terms_of(part) for part in (x, y)]
        if terms[0] is None or terms[1] is None:
            return _plain_sum((x, y))
        found = dict(terms[0])
        for powers, coefficient in terms[1].items():
            old = found.get(powers, 0.0)
            found[powers] = None if old is None or coefficient is None else old + coefficient
        return self._sum(found)

    def multiply(self, x: Any, y: Any) -> Any:
        """Return a product."""
        if Known(0) in (x, y):
            return Known(0.0)
        for part in (x, y):
            if isinstance(part, Refused):
                return part
        if isinstance(x, Form) and isinstance(y, Form):
            first, second = x.monomial, y.monomial
            if first is None or second is None:
                return Form(x.degree + y.degree, x.power + y.power)
            coefficients = first[1], second[1]
            coefficient = None if None in coefficients else first[1] * second[1]  # type: ignore[operator]
            return self._monomial(_merged(first[0], second[0]), coefficient)
        if isinstance(x, Form) or isinstance(y, Form):
            form, other = (x, y) if isinstance(x, Form) else (y, x)
            is_constant = isinstance(other, Known) and math.isfinite(other.number)
            return self._scaled(form, float(other.number) if is_constant else None)
        if isinstance(x, Known) and isinstance(y, Known):
            return Known(x.number * y.number)
        return Data(product_range(_range_of(x), _range_of(y)), _is_outer(x) or _is_outer(y))

    def choose(self, cases: Sequence[Any]) -> Any:
        """Return a number of which data decide which of several it is: a new generator, if all are monomials."""
        refused = next((case for case in cases if isinstance(case, Refused)), None)
        if refused is not None or len(set(cases)) == 1:
            return cases[0] if refused is None else refused
        forms = [case for case in cases if isinstance(case, Form)]
        if not forms:
            return Data(hull(list(map(_range_of, cases))), any(map(_is_outer, cases)))
        ranges = [self._bounds(case) if isinstance(case, Form) else _range_of(case) for case in cases]
        if all(map(self._is_probability, cases)):
            share = self._generator(max(form.power for form in forms), is_share=True)
            self._chosen[share[0]] = hull(ranges)
            return self._monomial(_of(share), 1.0)
        if all(form.logs is not None for form in forms):
            size = max(self._power_of(form.logs or _ONE) for form in forms)
            return self._logarithm(_of(self._generator(size, is_share=False)), None)
        if any(form.monomial is None for form in forms):
            return _plain_sum(forms)
        generator = self._generator(max(form.power for form in forms), is_share=False)
        self._chosen[generator[0]] = hull(ranges)
        return self._monomial(_of(generator), 1.0 if all(map(self._is_positive, cases)) else None)

    def _is_probability(self, case: Any) -> bool:
        """Return whether a number is a share or a known probability."""
        if isinstance(case, Known):
            return 0.0 <= case.number <= 1.0
        powers, factor = (isinstance(case, Form) and case.monomial) or (_ONE, None)
        return factor == 1.0 and len(powers) == 1 and all(g[0] in self._shares and e == 1.0 for g, e in powers)

    def mix(self, eqn: Any, values: Sequence[Any], callers: tuple[Any, ...]) -> Any:
        """Return the results of a branch, a factorisation or a triangular solve; other operations that mix entries refuse."""
        name = eqn.primitive.name
        found = [part for value in values if isinstance(value, Entries) for part in self.values(value)]
        if name == "cond" and all(map(self.is_data, self.values(values[0]))):
            return self._branches(eqn, values, callers)
        refused = next((part for part in found if isinstance(part, Refused)), None)
        if refused is not None:
            return refused
        if all(map(self.is_data, found)):
            return Data()
        if name == "dot_general":
            found = [self.multiply(x, y) for x in self.values(values[0]) for y in self.values(values[1])]
        if name == "dot_general" or (name == "scatter-add" and all(map(self.is_data, self.values(values[1])))):
            forms = [part for part in found if isinstance(part, Form)]
            return _plain_sum(forms) if forms else Data(is_outer=any(map(_is_outer, found)))
        try:
            if name == "cholesky":
                return self._cholesky(values[0].codes)
            if name == "triangular_solve" and not eqn.params["unit_diagonal"]:
                return self._triangular_solve(values[0], self.codes(values[1]))
            raise NoProof
        except NoProof as stop:
            return _refused(eqn, callers, str(stop))

    def call(self, eqn: Any, values: list[Any]) -> Sequence[Any] | None:
        """Return the softplus of outer latents, whose formula has a kink that the function has not."""
        if not is_jax_function(eqn, "softplus") or not any(map(_is_outer, self.values(values[0]))):
            return None
        found = {part: softplus_range(_range_of(part)) for part in self.values(values[0])}
        if any(isinstance(part, Form) for part in found) or (
            any(flattens for _, flattens in found.values()) and not self._may_flatten
        ):
            return None
        self.flattens |= any(flattens for _, flattens in found.values())
        codes = self.per_entry(lambda part: Data(found[part][0], is_outer=True), values[0].codes)
        return [Entries(codes)]

    # Data and outer latents

    def _of_data(self, eqn: Any, parts: Sequence[Any], callers: tuple[Any, ...], is_same: bool) -> Any:
        """Return the result of an operation on data and outer latents, with its range."""
        described, is_outer = describe_primitive(eqn), any(map(_is_outer, parts))
        if described.numpy is not None and all(isinstance(part, Known) for part in parts):
            with np.errstate(all="ignore"):
                number = np.asarray(described.numpy(eqn.params, *(np.asarray(part.number) for part in parts)))
            return Known(number.astype(eqn.outvars[0].aval.dtype).item())
        if not self._has_outer:
            return Data()
        ranges = list(map(_range_of, parts))
        names = [part.name if isinstance(part, Data) else part for part in parts]
        name = None if None in names else self._name((eqn.primitive.name, repr(eqn.params), *names))
        is_same |= name is not None and len(names) > 1 and names[0] == names[1]
        if eqn.primitive.name == "pow" and not isinstance(parts[1], Known):
            ranges[1] = Range(ranges[1].low, float(np.nextafter(ranges[1].high, math.inf)))  # no constant
        try:
            found, flattens = result_range(eqn, ranges, is_same=is_same)
            if flattens and is_outer and not self._may_flatten:
                raise NoProof
        except NoProof as stop:
            return _refused(eqn, callers, str(stop)) if is_outer else Data()
        self.flattens |= flattens and is_outer
        return Data(found, is_outer, name) if isinstance(found, Range) else Known(found)

    def _branches(self, eqn: Any, values: Sequence[Any], callers: tuple[Any, ...]) -> list[np.ndarray]:
        """Join the results of all branches that data may take."""
        branches = eqn.params["branches"]
        if not isinstance(values[0], Entries):
            branches = [branches[int(np.clip(int(values[0]), 0, len(branches) - 1))]]
        outs = [self.follow(b.jaxpr, b.consts, values[1:], (eqn, *callers)) for b in branches]
        if len(outs) == 1:
            return list(map(self.codes, outs[0]))
        return [self.chosen(cases[0].shape, *map(self.codes, cases)) for cases in zip(*outs, strict=True)]

    # Building forms

    def _power_of(self, powers: Powers) -> float:
        return float(sum(math.inf if e is None else abs(e) * self._sizes[number] for (number, _), e in powers))

    def _monomial(self, powers: Powers | Mapping[Generator, float | None], factor: float | None) -> Any:
        powers = _frozen(powers)
        if not powers and factor is not None:
            return Known(factor)
        return Form(power=self._power_of(powers), terms=frozenset({(powers, factor)}))

    def _logarithm(self, powers: Powers, factor: float | None) -> Form:
        return Form(power=1.0) if len(powers) > _MAX_LOGS else Form(power=1.0, logs=powers, factor=factor)

    def _sum(self, terms: Mapping[Powers, float | None]) -> Any:
        """Return a sum of terms, as a monomial if it is one."""
        found = {powers: coefficient for powers, coefficient in terms.items() if coefficient != 0.0}
        if len(found) > 1:
            found = self._simplified(found)
        if not found:
            return Known(0.0)
        if len(found) == 1:
            return self._monomial(*next(iter(found.items())))
        power = max(map(self._power_of, found))
        return Form(power=power, terms=frozenset(found.items()) if len(found) <= _MAX_TERMS else None)

    def _simplified(self, terms: dict[Powers, float | None]) -> dict[Powers, float | None]:
        """Return the same sum with fewer terms, by what shares add up to: u + (1 - u) = 1, also where a factor is common."""
        if None in terms.values() or any(power is None for powers in terms for _, power in powers):
            return terms
        common = {g: min(dict(powers).get(g, 0.0) for powers in terms) for powers in terms for g, _ in powers}  # type: ignore[type-var]
        factor = _frozen(common)
        inverse = frozenset((g, -power) for g, power in factor if power is not None)
        found: dict[Powers, float] = {}

        def put(powers: Powers, coefficient: float) -> None:
            """Add a term, with 1 - u written as two terms."""
            rest = next((own for own in powers if own[0][1] and own[1] == 1.0), None)
            if rest is not None:
                put(powers - {rest}, coefficient)
                put(_merged(powers - {rest}, _of((rest[0][0], False))), -coefficient)
                return
            total = found.pop(powers, 0.0) + coefficient
            if abs(total) > 4e-16 * abs(coefficient):
                found[powers] = total

        reduced = {_merged(powers, inverse): coefficient for powers, coefficient in terms.items()}
        if any(sum(own[0][1] for own in powers) > _MAX_TERMS for powers in reduced):
            return terms
        for powers, coefficient in reduced.items():
            put(powers, coefficient)  # type: ignore[arg-type]
        while (union := self._union_of_two(found)) is not None:
            before, (after, coefficient) = union
            for powers in before:
                del found[powers]
            put(after, coefficient)
        if len(found) == 2:
            for (base, whole), (powers, part) in permutations(found.items(), 2):
                own = [item for item in powers if item not in base]
                is_rest = len(own) == 1 and own[0][1] == 1.0 and own[0][0][0] in self._shares and base <= powers
                if is_rest and abs(whole + part) <= 4e-16 * abs(part):
                    found = {_merged(base, _of((own[0][0][0], True))): whole}
                    break
        return {_merged(powers, factor): coefficient for powers, coefficient in found.items()}

    def _union_of_two(self, terms: Mapping[Powers, float]) -> tuple[list[Powers], tuple[Powers, float]] | None:
        """Return two terms that are one sum of elements of a simplex, and this sum."""
        for (first, c), (second, d) in combinations(terms.items(), 2):
            own, other = first - second, second - first
            if len(own) != 1 or len(other) != 1:
                continue
            ((a, own_power),), ((b, other_power),) = own, other
            if own_power != 1.0 or other_power != 1.0 or a[0] not in self._elements or b[0] not in self._elements:
                continue
            (simplex, x, every), (of_other, y, _) = self._elements[a[0]], self._elements[b[0]]
            if simplex is not of_other:
                continue
            if c == d and not x & y:
                bits, sign = x | y, c
            elif c == -d and (x & y) in (x, y):
                bits, sign = x ^ y, c if x & y == y else d
            else:
                continue
            share = self._share_of_elements(simplex, bits, every)
            powers = _ONE if isinstance(share, Known) else share.monomial[0]
            return [first, second], (_merged(first & second, powers), sign)
        return None

    # Rules

    def _scaled(self, form: Form, by: float | None) -> Any:
        """Return a form times a constant or, if None, unknown numbers."""
        if form.logs is not None:
            factor = None
            if form.factor is not None and form.factor > 0 and by is not None:
                factor = _power(form.factor, by)
            return self._logarithm(frozenset((g, _times(m, by)) for g, m in form.logs), factor)
        terms = None if form.terms is None else frozenset((powers, _times(c, by)) for powers, c in form.terms)
        return form._replace(terms=terms)

    def _negative(self, part: Any) -> Any:
        return self.multiply(Known(-1.0), part)

    def _sub(self, x: Any, y: Any) -> Any:
        return self.add(x, self._negative(y))

    def _div(self, x: Any, y: Any) -> Any:
        if isinstance(y, Form):
            return self.multiply(x, self._raised(y, -1.0, _RATIO))
        if _is_outer(y) and y.range.low <= 0.0 <= y.range.high:
            raise NoProof
        is_constant = isinstance(y, Known) and y.number != 0 and math.isfinite(y.number)
        return self._scaled(x, 1.0 / y.number if is_constant else None)

    def _raised(self, form: Form, power: float | None, reason: str) -> Any:
        """Raise a monomial to a power; None where data decide it."""
        if form.monomial is None:
            raise NoProof(reason)
        powers, old = form.monomial
        factor = _power(old, power) if old is not None and old > 0 and power is not None else None
        if old is not None and old < 0 and power == -1.0:
            factor = 1.0 / old
        return self._monomial(frozenset((g, _times(e, power)) for g, e in powers), factor)

    def _whole_power(self, form: Form, power: int) -> Any:
        if power == 0:
            return Known(1.0)
        if form.monomial is not None or power < 0:
            return self._raised(form, float(power), _NEGATIVE_POWER)
        return Form(power * form.degree, power * form.power)

    def _pow(self, x: Any, y: Any) -> Any:
        if not isinstance(x, Form) or isinstance(y, Form):
            raise NoProof("a power whose exponent depends on latents, which is a power that can overflow")
        power = float(y.number) if isinstance(y, Known) and math.isfinite(y.number) else None
        if power is not None and power > 0 and power == round(power):
            return self._whole_power(x, int(power))
        return self._raised(x, power, _REAL_POWER)

    def _log(self, x: Any) -> Any:
        if not isinstance(x, Form):
            return Data(is_outer=_is_outer(x))
        if x.monomial is None:
            raise NoProof(_LOGARITHM)
        return self._logarithm(*x.monomial)

    def _exp(self, x: Form) -> Any:
        if x.logs is None:
            raise NoProof
        return self._monomial(x.logs, x.factor)

    def _logistic(self, x: Form) -> Any:
        """Return a share again of its log odds."""
        odds = {power: generator for generator, power in x.logs or ()}
        if len(x.logs or ()) == 2 and set(odds) == {1.0, -1.0} and x.factor is not None and abs(x.factor - 1.0) < 1e-12:
            (number, is_rest), below = odds[1.0], odds[-1.0]
            if below == (number, not is_rest):
                return self._monomial({(number, is_rest): 1.0}, 1.0)
        raise NoProof

    def _ordered(self, eqn: Any, parts: Sequence[Any], *, is_same: bool) -> Any:
        """Return the result of a comparison, a maximum or the like that the signs and bounds of its operands decide."""
        name, x = eqn.primitive.name, next(part for part in parts if isinstance(part, Form))
        if any(part.degree > _MAX_PLAIN or part.power > _MAX_PLAIN for part in parts if isinstance(part, Form)):
            raise NoProof
        is_comparison = describe_primitive(eqn).kind is Kind.COMPARISON
        is_known = all(isinstance(part, Known) or (isinstance(part, Form) and self._is_finite(part)) for part in parts)
        if name == "is_finite" or (is_comparison and is_same):
            # A test for infinity or nan, which data may have put there.
            return Known(name in ("is_finite", "eq", "le", "ge")) if is_known else Data()
        if is_known and name != "sign":
            ranges = [self._bounds(part) if isinstance(part, Form) else _range_of(part) for part in parts]
            try:
                found, _ = result_range(eqn, ranges, is_same=False)
                if isinstance(found, Range):
                    return parts[ranges.index(found)] if found in ranges else self._negative(x)
                return Known(found)
            except NoProof:
                pass
        has_sign = x.monomial is not None and (x.monomial[1] is not None or not self._has_outer)
        if x.monomial is not None and has_sign and name == "abs":
            return self._monomial(x.monomial[0], None)
        is_with_infinity = any(isinstance(part, Known) and math.isinf(part.number) for part in parts)
        if is_comparison and is_with_infinity:  # also a test for what data may have put there
            return Data()
        if has_sign and (name == "sign" or (is_comparison and Known(0) in parts)):
            return Data()
        raise NoProof

    def _bounds(self, form: Form) -> Range:
        """Return bounds that constants decide, of a form of low power."""
        terms = dict(form.terms or ())
        offset, rest = terms.pop(_ONE, 0.0), list(terms.items())
        powers, multiple = rest[0] if len(rest) == 1 else (_ONE, None)
        if offset is None or multiple is None:
            return EVERYTHING
        is_linear = len(powers) == 1 and all(power == 1.0 for _, power in powers)
        is_share = is_linear and all(number in self._shares for (number, _), _ in powers)
        own = Range(_CLOSE if is_linear else math.ulp(0.0), math.nextafter(1.0, 0.0) if is_share else math.inf)
        for (number, is_rest), _ in powers:
            if number in self._chosen:  # data may choose 0, or 1
                own = self._chosen[number] if is_linear and not is_rest else Range(0.0, math.inf)
        return sum_range(Range(offset, offset), product_range(Range(multiple, multiple), own))

    def _is_finite(self, part: Any) -> bool:
        """Return whether constants decide that a form of low power is finite; data may be infinite or nan."""
        coefficients = [c for _, c in part.terms] if part.terms is not None else [part.factor]
        return all(c is not None and abs(c) < _MAX_COEFFICIENT for c in coefficients)

    def _is_positive(self, part: Any) -> bool:
        """Return whether constants decide that a number is positive and finite."""
        if isinstance(part, Known):
            return 0 < part.number < math.inf
        factor = part.monomial[1] if isinstance(part, Form) and part.monomial is not None else None
        return factor is not None and factor > 0 and self._is_finite(part)

    # Matrices

    def _common(self, parts: Sequence[Any]) -> Powers | None:
        """Return the monomial that latents multiply several numbers with, which are otherwise data; None if they do not."""
        found = {
            part.monomial[0] if isinstance(part, Form) and part.monomial is not None else None
            for part in parts
            if part != Known(0)
        }
        return found.pop() if len(found) == 1 else None

    def _inverse(self, matrix: np.ndarray, power: float, reason: str) -> Any:
        """Return the entries of a power of a matrix, or of its root, all as one value."""
        parts = self.values(Entries(matrix))
        if not any(isinstance(part, Form) for part in parts):
            return Data(is_outer=any(map(_is_outer, parts)))
        powers = self._common(parts)
        if powers is None:
            raise NoProof(f"{reason} a matrix that latents do not multiply as a whole")
        return self._monomial(frozenset((generator, _times(e, power)) for generator, e in powers), None)

    def _cholesky(self, codes: np.ndarray) -> list[np.ndarray]:
        found = np.empty_like(codes)
        for place in np.ndindex(codes.shape[:-2]):
            own = self._inverse(codes[place], 0.5, "a factorisation of")
            found[place] = self.code(own)
            on_diagonal = own._replace(range=Range(_CLOSE, math.inf)) if isinstance(own, Data) else own
            np.fill_diagonal(found[place], self.code(on_diagonal))
        return [found]

    def _triangular_solve(self, matrices: Any, codes: np.ndarray) -> list[np.ndarray]:
        found, own = np.empty_like(codes), self.codes(matrices)
        for place in np.ndindex(codes.shape[:-2]):
            inverse = self._inverse(own[place], -1.0, "a triangular solve with")
            parts = self.values(Entries(codes[place]))
            forms = [part for part in parts if isinstance(part, Form)]
            powers = self._common(parts)
            if forms:
                right = _plain_sum(forms) if powers is None else self._monomial(powers, None)
            else:
                right = Data(is_outer=any(map(_is_outer, parts)))
                on_diagonal = [_range_of(self.table[code]) for code in np.diagonal(own[place])]
                may_be_zero = isinstance(matrices, Entries) and any(x.low <= 0.0 <= x.high for x in on_diagonal)
                if may_be_zero and not isinstance(inverse, Form):
                    raise NoProof
            found[place] = self.code(self.multiply(inverse, right))
        return [found]


_RATIO = "division by a quantity that is not a product of powers of latents, which may have a pole between any points"
_NEGATIVE_POWER = "a negative power of a quantity that is not a product of powers of latents"
_REAL_POWER = "a real power of a quantity that is not a product of powers of latents"
_ROOT = "the square root of a quantity that is not a product of powers of latents"
_LOGARITHM = "the logarithm of a quantity that is not a product of powers of latents"

_ORDERED = ("abs", "sign", "max", "min", "clamp", "is_finite")
_RULES: dict[str, Callable[..., Any]] = {
    "add": Forms.add,
    "add_any": Forms.add,
    "sub": Forms._sub,
    "neg": Forms._negative,
    "mul": Forms.multiply,
    "div": Forms._div,
    "square": lambda forms, x: forms._whole_power(x, 2),
    "pow": Forms._pow,
    "sqrt": lambda forms, x: forms._raised(x, 0.5, _ROOT),
    "rsqrt": lambda forms, x: forms._raised(x, -0.5, _ROOT),
    "cbrt": lambda forms, x: forms._raised(x, 1.0 / 3.0, _ROOT),
    "log": Forms._log,
    "log1p": lambda forms, x: forms._log(forms.add(x, Known(1.0))),
    "exp": Forms._exp,
    "expm1": lambda forms, x: forms.add(forms._exp(x), Known(-1.0)),
    "logistic": Forms._logistic,
}


def _refused(eqn: Any, callers: tuple[Any, ...], reason: str) -> Refused:
    """Return the refusal of the results of an operation; without a reason, that of the table of primitives."""
    described = describe_primitive(eqn)
    return Refused(reason or described.refusal, source_line((eqn, *callers)), described.remedy)


def _is_outer(part: Any) -> bool:
    return isinstance(part, Data) and part.is_outer


def _range_of(part: Any) -> Range:
    return (
        part.range if isinstance(part, Data) else values_range(part.number) if isinstance(part, Known) else EVERYTHING
    )


def _terms_of(part: Any) -> Mapping[Powers, float | None] | None:
    if isinstance(part, Form):
        return None if part.terms is None else dict(part.terms)
    return {_ONE: float(part.number) if isinstance(part, Known) and math.isfinite(part.number) else None}


def _exponential(part: Any) -> float | None:
    return math.exp(part.number) if isinstance(part, Known) and abs(part.number) < 700.0 else None


def _plain_sum(parts: Sequence[Any]) -> Form:
    """Return a sum that is not followed term by term."""
    forms = [part for part in parts if isinstance(part, Form)]
    return Form(max(form.degree for form in forms), max(form.power for form in forms))


def _of(generator: Generator) -> Powers:
    return frozenset([(generator, 1.0)])


def _frozen(powers: Powers | Mapping[Generator, float | None]) -> Powers:
    items = powers.items() if isinstance(powers, Mapping) else powers
    return frozenset((generator, power) for generator, power in items if power != 0.0)


def _merged(*several: Powers) -> Powers:
    found: dict[Generator, float | None] = {}
    for powers in several:
        for generator, power in powers:
            old = found.get(generator, 0.0)
            found[generator] = None if old is None or power is None else old + power
    return _frozen(found)


def _times(x: float | None, y: float | None) -> float | None:
    return None if x is None or y is None else x * y


def _power(base: float, exponent: float) -> float | None:
    try:
        found = base**exponent
    except (OverflowError, ZeroDivisionError):
        return None
    return found if math.isfinite(found) and found != 0.0 else None
