"""A description → CUDA C++: a group of lanes walks a row's edges, its lanes on neighbouring channels.

Every lane computes the small formulas of an edge; sums over channels are made by the group, so that its whole warp walks as many edges as
its longest row has. Gradients of weights are added up by each group and left for the host to add.

Legend: N rows, E edges, C channels of a message.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.kernels.generate.description import Description
from runner.kernels.generate.expressions import Formula, in_order
from runner.kernels.generate.walks import OPERATORS, Term, Writer, told_of, walks


def source(description: Description) -> str:
    """Return the CUDA C++ of a description's kernels, for the STORAGE, INDEX and GROUP that it is built for."""
    kernels = [_Writer(walk, description).kernel() for walk in walks(description)]
    head = [
        '#include "generated.cuh"',
        f"constexpr int C = {description.channels};",
        "constexpr int NC = (C + GROUP - 1) / GROUP;",
    ]
    return "\n".join([*head, *kernels, ""])


class _Writer(Writer):
    """Writes one walk."""

    def kernel(self) -> str:
        """The whole kernel."""
        inputs = [f"const S* in{slot}" for slot in range(len(self.targets))]
        outputs = [f"S* out{slot}" for slot in range(len(self.targets))]
        arguments = [
            "const int64* indptr",
            "const I* indices",
            "const I* edge_ids",
            "int64 num_rows",
            *inputs,
            *outputs,
            "double* parts",
        ]
        lines = [
            f'extern "C" __global__ void {self.walk.name}({", ".join(arguments)}) {{',
            "  const Graph g{indptr, indices, edge_ids, num_rows};",
            *self._totals_begin(),
            "  for (int64 item = group_number(); item < whole_warps(num_rows); item += num_groups()) {",
            "    const bool is_real = item < num_rows;",
            "    const int64 row = is_real ? item : 0, begin = is_real ? indptr[row] : 0, length = is_real ? indptr[row + 1] - begin : 0;",
            "    const int64 longest = warp_max(length);",
            *(f"    A sum{at}[NC] = {{}};" for at in range(len(self.walk.sums))),
            *(f"    A small_sum{at} = A(0);" for at in range(len(self.walk.small_sums))),
            "    for (int64 k = 0; k < longest; ++k) {",
            "      const bool is_edge = k < length;",
            "      const int64 entry = is_edge ? begin + k : 0, far = is_edge ? int64(indices[entry]) : 0;",
            "      const int64 edge = is_edge ? g.edge(entry) : 0;",
            *("      " + line for line in self._edge()),
            "    }",
            *("    " + line for line in self._store()),
            "  }",
            *self._totals_end(),
            "}",
        ]
        return "\n".join(lines)

    def _edge(self) -> Iterator[str]:
        before = [formula for formula in self.order if not formula.is_wide and not self._needs_up(formula)]
        after = [
            formula
            for formula in self.order
            if not formula.is_wide and self._needs_up(formula) and formula.function != "sum"
        ]
        yield from (
            f"const A {self.names[formula]} = {self._value(formula)};"
            for formula in before
            if formula.function != "constant"
        )
        yield from (f"A {self.names[formula]} = A(0);" for formula in self.channel_sums)
        if any(formula.is_wide for formula in self.order):
            yield "#pragma unroll"
            yield "for (int n = 0; n < NC; ++n) {"
            yield "  const int c = lane_of_group() + n * GROUP;"
            yield "  if (is_edge && c < C) {"
            yield from ("    " + line for line in self._channel())
            yield "  }"
            yield "}"
        yield from (f"{self.names[formula]} = group_sum({self.names[formula]});" for formula in self.channel_sums)
        yield from (f"const A {self.names[formula]} = {self._value(formula)};" for formula in after)
        yield from self._take_small()

    def _channel(self) -> Iterator[str]:
        for formula in self.order:
            if formula.is_wide:
                yield f"const A {self.names[formula]} = {self._value(formula)};"
        for formula in self.channel_sums:
            yield f"{self.names[formula]} += {self._name(formula.arguments[0])};"
        for at, (_, _, formula) in enumerate(self.walk.sums):
            yield f"sum{at}[n] += {self._name(formula)};"
        for at, (_, _, formula) in enumerate(self.walk.totals):
            if formula.is_wide:
                yield f"total{at}[n] += {self._name(formula)};"
        for slot, index, formula in self.walk.per_edge:
            if formula.is_wide:
                yield f"keep(out{slot} + edge * {self.widths[slot]} + {index * self.channels} + c, {self._name(formula)});"

    def _take_small(self) -> Iterator[str]:
        lines = [f"small_sum{at} += {self._name(formula)};" for at, (_, _, formula) in enumerate(self.walk.small_sums)]
        lines += [
            f"total{at} += {self._name(formula)};"
            for at, (_, _, formula) in enumerate(self.walk.totals)
            if not formula.is_wide
        ]
        lines += [
            f"if (lane_of_group() == 0) keep(out{slot} + edge * {self.widths[slot]} + {index}, {self._name(formula)});"
            for slot, index, formula in self.walk.per_edge
            if not formula.is_wide
        ]
        if lines:
            yield "if (is_edge) {"
            yield from ("  " + line for line in lines)
            yield "}"

    def _store(self) -> Iterator[str]:
        yield "if (!is_real) continue;"
        factor = " * share" if self.is_mean else ""
        if self.is_mean:
            yield "const A share = length > 1 ? A(1) / A(length) : A(1);"
        for at, term in enumerate(self.walk.sums):
            place = f"out{self._slot(term)} + row * {self.widths[self._slot(term)]} + {term[1] * self.channels} + c"
            yield (
                "for (int n = 0; n < NC; ++n) { const int c = lane_of_group() + n * GROUP; "
                f"if (c < C) keep({place}, sum{at}[n]{factor}); }}"
            )
        for at, (slot, index, _) in enumerate(self.walk.small_sums):
            yield f"if (lane_of_group() == 0) keep(out{slot} + row * {self.widths[slot]} + {index}, small_sum{at});"

    def _totals_begin(self) -> Iterator[str]:
        for at, (_, _, formula) in enumerate(self.walk.totals):
            yield f"  A total{at}[NC] = {{}};" if formula.is_wide else f"  A total{at} = A(0);"

    def _totals_end(self) -> Iterator[str]:
        place, num_totals = 0, self.walk.num_totals(self.channels)
        for at, (_, _, formula) in enumerate(self.walk.totals):
            to = f"parts[group_number() * {num_totals} + {place}"
            if formula.is_wide:
                yield "  for (int n = 0; n < NC; ++n) {"
                yield f"    const int c = lane_of_group() + n * GROUP; if (c < C) {to} + c] = total{at}[n];"
                yield "  }"
                place += self.channels
            else:
                yield f"  if (lane_of_group() == 0) {to}] = total{at};"
                place += 1

    # --- words ---------------------------------------------------------------------------------------------------------

    def _slot(self, term: Term) -> int:
        return len(self.targets) - 1 if term[0] < 0 else term[0]

    def _value(self, formula: Formula) -> str:
        if formula.function == "operand":
            slot, index = told_of(formula)
            target = self.targets[slot]
            row = {"e": "edge", self.walk.near: "row", self.walk.far: "far"}.get(target)
            place = f"in{slot}" + (f" + {row} * {self.widths[slot]}" if row else "")
            return (
                f"value(*({place} + {index * self.channels} + c))"
                if formula.is_wide
                else f"value(*({place} + {index}))"
            )
        arguments = [self._name(argument) for argument in formula.arguments]
        if formula.function in OPERATORS:
            return OPERATORS[formula.function].format(*arguments)
        told = [f"A({number!r})" for number in formula.told]
        return f"{formula.function}_of({', '.join([*arguments, *told])})"

    def _name(self, formula: Formula) -> str:
        return f"A({formula.told[0]!r})" if formula.function == "constant" else self.names[formula]

    def _needs_up(self, formula: Formula) -> bool:
        """Whether a sum over channels is among what a formula is made of."""
        return any(inner.function == "sum" for inner in in_order([formula]))
