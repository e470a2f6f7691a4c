"""Formulas of one edge: what a message is, element by element, and its derivatives.

A formula is *wide* where it has one value for each channel of a message, *small* where it has one for the edge. Equal formulas are one
object, so that what is computed twice is seen to be the same.

Legend: C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

MOST_CACHED = 1 << 16


@dataclass(frozen=True, eq=False)
class Formula:
    """A value of an edge.

    Attributes:
        function: ``operand``, ``constant``, ``sum`` (over the channels of a wide argument), or a name of :data:`FUNCTIONS`.
        arguments: formulas.
        told: operand: (slot, index); constant: its value; a function's numbers.
        is_wide: one value a channel.
    """

    function: str
    arguments: tuple[Formula, ...]
    told: tuple[float, ...]
    is_wide: bool


@lru_cache(MOST_CACHED)
def _make(function: str, arguments: tuple[Formula, ...], told: tuple[float, ...], is_wide: bool) -> Formula:
    return Formula(function, arguments, told, is_wide)


def operand(slot: int, index: int, is_wide: bool) -> Formula:
    """An element of an operand's row: number ``index``, or the channels from ``index`` · C on."""
    return _make("operand", (), (slot, index), is_wide)


def constant(value: float) -> Formula:
    """A number."""
    return _make("constant", (), (value,), False)


def apply(function: str, *arguments: Formula, told: tuple[float, ...] = ()) -> Formula:
    """A function of formulas, simplified where an argument is 0 or 1."""
    values = [argument.told[0] if argument.function == "constant" else None for argument in arguments]
    match function:
        case "add" if values[0] == 0 or values[1] == 0:
            return arguments[1] if values[0] == 0 else arguments[0]
        case "sub" if values[1] == 0:
            return arguments[0]
        case "mul" if values[0] == 1 or values[1] == 1:
            return arguments[1] if values[0] == 1 else arguments[0]
        case "mul" if values[0] == 0 or values[1] == 0:
            return constant(0.0)
    return _make(function, arguments, told, any(argument.is_wide for argument in arguments))


def total(formula: Formula) -> Formula:
    """The sum over the channels of a wide formula."""
    return _make("sum", (formula,), (), False)


def add(one: Formula, other: Formula) -> Formula:
    return apply("add", one, other)


def sub(one: Formula, other: Formula) -> Formula:
    return apply("sub", one, other)


def mul(one: Formula, other: Formula) -> Formula:
    return apply("mul", one, other)


def _less_square(y: Formula) -> Formula:
    return sub(constant(1.0), mul(y, y))


# A function's derivative by its argument, from the argument, its value, and its numbers.
_Derivative = Callable[[Formula, Formula, tuple[float, ...]], Formula]
MAPS: dict[str, _Derivative] = {
    "relu": lambda x, _, __: apply("positive", x, constant(1.0), constant(0.0)),
    "leaky_relu": lambda x, _, told: apply("positive", x, constant(1.0), constant(told[0])),
    "elu": lambda x, y, told: apply("positive", x, constant(1.0), add(y, constant(told[0]))),
    "tanh": lambda _, y, __: _less_square(y),
    "sigmoid": lambda _, y, __: mul(y, sub(constant(1.0), y)),
    "softplus": lambda x, _, __: apply("sigmoid", x),
    "exp": lambda _, y, __: y,
    "sqrt": lambda _, y, __: apply("div", constant(0.5), y),
    "square": lambda x, _, __: mul(constant(2.0), x),
    "neg": lambda _, __, ___: constant(-1.0),
    "scale": lambda _, __, told: constant(told[0]),
    "shift": lambda _, __, ___: constant(1.0),
}


def _partials(formula: Formula) -> tuple[Formula, ...]:
    """The derivative of a function by each of its arguments."""
    arguments = formula.arguments
    match formula.function:
        case "add":
            return constant(1.0), constant(1.0)
        case "sub":
            return constant(1.0), constant(-1.0)
        case "mul":
            return arguments[1], arguments[0]
        case "div":
            quotient = apply("div", constant(1.0), arguments[1])
            return quotient, apply("neg", mul(formula, quotient))
    return (MAPS[formula.function](arguments[0], formula, formula.told),)


def gradients(outputs: Iterable[tuple[Formula, Formula]]) -> dict[Formula, Formula]:
    """Return the gradient of each operand, small ones summed over the channels that they reach.

    Args:
        outputs: each wide result with the formula of its gradient.
    """
    pairs = list(outputs)
    found: dict[Formula, Formula] = {}
    for output, gradient in pairs:
        found[output] = add(found[output], gradient) if output in found else gradient
    order = list(in_order(output for output, _ in pairs))
    for formula in reversed(order):
        if formula not in found or formula.function in ("operand", "constant"):
            continue
        for argument, partial in zip(formula.arguments, _partials(formula), strict=True):
            share = mul(found[formula], partial)
            if share.is_wide and not argument.is_wide:
                share = total(share)
            found[argument] = add(found[argument], share) if argument in found else share
    return {formula: gradient for formula, gradient in found.items() if formula.function == "operand"}


def in_order(roots: Iterable[Formula], stop: Callable[[Formula], bool] = lambda _: False) -> Iterator[Formula]:
    """Yield formulas and all that they are made of, each once, arguments first; those of a formula where ``stop`` holds are left out."""
    seen: set[Formula] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            formula, is_done = stack.pop()
            if formula in seen:
                continue
            if is_done:
                seen.add(formula)
                yield formula
                continue
            stack.append((formula, True))
            if not stop(formula):
                stack += [(argument, False) for argument in reversed(formula.arguments)]
