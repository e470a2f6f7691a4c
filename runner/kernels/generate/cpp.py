"""A description → C++ for the CPU: one kernel forward, one walk over each side's edges backward.

The small formulas of a tile of edges are computed with a lane an edge, the wide ones edge by edge with a lane a channel; nothing of an
edge's size is stored but gradients that are asked for. A walk goes over the rows of the destinations (v), or of the sources (u) on the
transposed graph; what the other end has is gathered.

Legend: N rows, E edges, K leading dimensions of a message, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from runner.kernels.generate.description import Description
from runner.kernels.generate.expressions import Formula, in_order
from runner.kernels.generate.walks import OPERATORS, Term, Walk, Writer, told_of, walks


def source(description: Description) -> str:
    """Return the C++ of a description's kernels, for the STORAGE and INDEX that it is built for."""
    functions = [_Writer(walk, description).function() for walk in walks(description)]
    return "\n".join([f"#define CHANNELS {description.channels}", '#include "generated.h"', *functions, ""])


class _Writer(Writer):
    """Writes one walk."""

    def __init__(self, walk: Walk, description: Description) -> None:
        super().__init__(walk, description)
        # what passes between the stages of a tile: small formulas that wide ones read; ``channel_sums``, that small ones read
        self.down = list(dict.fromkeys(
            argument for formula in self.order if formula.is_wide or formula.function == "sum"
            for argument in formula.arguments if not argument.is_wide and not self._is_at_hand(argument)
        ))  # fmt: skip
        small = (*walk.small_sums, *walk.per_edge, *walk.totals)
        self.small_results = [entry for entry in small if not entry[2].is_wide]

    def function(self) -> str:
        """The whole function."""
        body = [
            *self._before_rows(),
            "for (int64_t row = graph->blocks[block]; row < graph->blocks[block + 1]; ++row) {",
            *_in(self._row()),
            "}",
        ]
        body += self._after_rows()
        head = (
            f'extern "C" void {self.walk.name}(const Graph* graph, const S* const* in, S* const* out, double* parts, int64_t num_parts, '
            "int num_threads) {"
        )
        return "\n".join(
            [head, "  for_blocks(graph->num_blocks, num_threads, [&](int64_t block) {", *_in(_in(body)), "  });", "}"]
        )

    # --- pieces, from the outside in -----------------------------------------------------------------------------------

    def _before_rows(self) -> Iterator[str]:
        for formula in self._operands(wide=False, target="w"):
            slot, index = told_of(formula)
            yield f"const A {self.names[formula]} = value(in[{slot}] + {index});"
        for at, (_, _, formula) in enumerate(self.walk.totals):
            yield f"Vector total{at}[NV] = {{}};" if formula.is_wide else f"Edges total{at} = {{}};"

    def _after_rows(self) -> Iterator[str]:
        at = 0
        for number, (_, _, formula) in enumerate(self.walk.totals):
            if formula.is_wide:
                yield f"for (int v = 0; v < NV; ++v) keep<W>(parts + block * num_parts + {at} + offset_of(v), total{number}[v]);"
                at += self.channels
            else:
                yield f"parts[block * num_parts + {at}] = sum_of<A, kEdges>(total{number});"
                at += 1

    def _row(self) -> Iterator[str]:
        for slot in self._slots(self.walk.near):
            yield f"const S* near{slot} = in[{slot}] + row * {self.widths[slot]};"
        for formula in self._operands(wide=False, target=self.walk.near):
            slot, index = told_of(formula)
            yield f"const A {self.names[formula]} = value(near{slot} + {index});"
        for at in range(len(self.walk.sums)):
            yield f"Vector sum{at}[NV] = {{}};"
        for at in range(len(self.walk.small_sums)):
            yield f"Edges small_sum{at} = {{}};"
        yield "for (int64_t first = graph->indptr[row]; first < graph->indptr[row + 1]; first += kTile) {"
        yield from _in(self._tile())
        yield "}"
        yield from self._store()

    def _store(self) -> Iterator[str]:
        if self.is_mean:
            yield "const int64_t degree = graph->indptr[row + 1] - graph->indptr[row];"
            yield "const A share = degree > 1 ? A(1) / A(degree) : A(1);"
        factor = " * share" if self.is_mean else ""
        for at, (slot, index, _) in enumerate(self.walk.sums):
            place = f"{self._out(slot)} + row * {self._out_width(slot)} + {index * self.channels}"
            yield f"for (int v = 0; v < NV; ++v) store<W>({place} + offset_of(v), sum{at}[v]{factor});"
        for at, (slot, index, _) in enumerate(self.walk.small_sums):
            yield f"store<1>({self._out(slot)} + row * {self._out_width(slot)} + {index}, sum_of<A, kEdges>(small_sum{at}));"

    def _tile(self) -> Iterator[str]:
        yield "const int64_t count = graph->indptr[row + 1] - first < kTile ? graph->indptr[row + 1] - first : kTile;"
        yield "const I* indices = graph->indices + first;"
        if self.down:
            yield f"A down[{len(self.down)}][kTile];"
            yield "for (int64_t k = 0; k < count; k += kEdges) {"
            yield from _in(
                self._small_stage(self.down, [f"store<kEdges>(down[{at}] + k, {{}});" for at in range(len(self.down))])
            )
            yield "}"
        if self.channel_sums:
            yield f"A up[{len(self.channel_sums)}][kTile] = {{}};"
        if any(formula.is_wide for formula in self.order):
            yield from self._wide_stage()
        if self.small_results:
            yield "for (int64_t k = 0; k < count; k += kEdges) {"
            yield "  const int64_t left = count - k;"
            yield from _in(
                self._small_stage(
                    [entry[2] for entry in self.small_results], [self._take(entry) for entry in self.small_results]
                )
            )
            yield "}"

    def _take(self, entry: Term) -> str:
        """What is done with a small result of a vector of edges."""
        slot, index, _ = entry
        if entry in self.walk.small_sums:
            return f"small_sum{self.walk.small_sums.index(entry)} += only(left, {{}});"
        if entry in self.walk.totals:
            return f"total{self.walk.totals.index(entry)} += only(left, {{}});"
        return f"scatter(left, graph->edge_ids, first + k, {self._out(slot)} + {index}, {self._out_width(slot)}, {{}});"

    def _small_stage(self, roots: Sequence[Formula], then: Sequence[str]) -> Iterator[str]:
        """Formulas with a lane an edge, from edge first + k on, then what is done with each root."""
        kept = set[Formula]()
        for formula in in_order(roots, stop=lambda entry: entry.function == "sum"):
            if formula.function == "constant" or self._is_at_hand(formula):
                continue
            kept.add(formula)
            yield f"const Edges {self.names[formula]} = {self._small(formula)};"
        for root, line in zip(roots, then, strict=True):
            yield line.format(self._lane(root, "Edges"))

    def _small(self, formula: Formula) -> str:
        if formula.function == "sum":
            return f"load<kEdges>(up[{self.channel_sums.index(formula)}] + k)"
        if formula.function == "operand":
            slot, index = told_of(formula)
            if self.targets[slot] == "e":
                return f"gather_edges(count - k, graph->edge_ids, first + k, in[{slot}] + {index}, {self.widths[slot]})"
            return f"gather(count - k, indices + k, in[{slot}] + {index}, {self.widths[slot]})"
        return self._call(formula, "kEdges", [self._lane(argument, "Edges") for argument in formula.arguments])

    def _wide_stage(self) -> Iterator[str]:
        for at in range(len(self.walk.sums)):
            yield f"Vector part{at}[NV] = {{}};"
        for at, (_, _, formula) in enumerate(self.walk.totals):
            if formula.is_wide:
                yield f"Vector total_part{at}[NV] = {{}};"
        yield "for (int64_t k = 0; k < count; ++k) {"
        yield from _in(self._edge())
        yield "}"
        for at in range(len(self.walk.sums)):
            yield f"for (int v = 0; v < NV; ++v) sum{at}[v] += part{at}[v];"
        for at, (_, _, formula) in enumerate(self.walk.totals):
            if formula.is_wide:
                yield f"for (int v = 0; v < NV; ++v) total{at}[v] += total_part{at}[v];"

    def _edge(self) -> Iterator[str]:
        far = self._slots(self.walk.far)
        if far:
            yield "if (first + k + kPrefetchAhead < graph->num_entries) {"
            for slot in far:
                yield f"  prefetch(in[{slot}] + int64_t(indices[k + kPrefetchAhead]) * {self.widths[slot]}, {self.widths[slot]});"
            yield "}"
        for slot in far:
            yield f"const S* far{slot} = in[{slot}] + int64_t(indices[k]) * {self.widths[slot]};"
        edges = self._slots("e")
        if edges or any(formula.is_wide for _, _, formula in self.walk.per_edge):
            yield "const int64_t edge = graph->edge(first + k);"
        for slot in edges:
            yield f"const S* edge{slot} = in[{slot}] + edge * {self.widths[slot]};"
        for at, formula in enumerate(self.down):
            yield f"const A {self.names[formula]} = down[{at}][k];"
        for at in range(len(self.channel_sums)):
            yield f"Vector up{at} = {{}};"
        yield '_Pragma("GCC unroll 8")'
        yield "for (int v = 0; v < NV; ++v) {"
        yield "  const int64_t at = offset_of(v);"
        yield from _in(self._vector())
        yield "}"
        for at in range(len(self.channel_sums)):
            yield f"up[{at}][k] = sum_of<A, W>(up{at});"

    def _vector(self) -> Iterator[str]:
        for formula in self.order:
            if formula.is_wide:
                yield f"const Vector {self.names[formula]} = {self._wide(formula)};"
        for at, formula in enumerate(self.channel_sums):
            yield f"up{at} += fresh(v, {self._lane(formula.arguments[0], 'Vector')});"
        for at, (_, _, formula) in enumerate(self.walk.sums):
            yield f"part{at}[v] += {self._lane(formula, 'Vector')};"
        for at, (_, _, formula) in enumerate(self.walk.totals):
            if formula.is_wide:
                yield f"total_part{at}[v] += {self.names[formula]};"
        for slot, index, formula in self.walk.per_edge:
            if formula.is_wide:
                place = f"{self._out(slot)} + edge * {self._out_width(slot)} + {index * self.channels} + at"
                yield f"store<W>({place}, {self.names[formula]});"

    def _wide(self, formula: Formula) -> str:
        if formula.function != "operand":
            return self._call(formula, "W", [self._lane(argument, "Vector") for argument in formula.arguments])
        slot, index = told_of(formula)
        target = self.targets[slot]
        row = {"e": f"edge{slot}", "w": f"in[{slot}]"}.get(
            target, f"near{slot}" if target == self.walk.near else f"far{slot}"
        )
        return f"load<W>({row} + {index * self.channels} + at)"

    # --- words ---------------------------------------------------------------------------------------------------------

    def _call(self, formula: Formula, width: str, arguments: list[str]) -> str:
        if formula.function in OPERATORS:
            return OPERATORS[formula.function].format(*arguments)
        told = [f"A({number!r})" for number in formula.told]
        return f"{formula.function}_of<{width}>({', '.join([*arguments, *told])})"

    def _lane(self, formula: Formula, kind: str) -> str:
        """A formula as lanes: a constant, or a number that all edges or channels share, in all of them."""
        if formula.function == "constant":
            return f"all<{kind}>(A({formula.told[0]!r}))"
        is_shared = self._is_at_hand(formula) or (kind == "Vector" and not formula.is_wide)
        return f"all<{kind}>({self.names[formula]})" if is_shared else self.names[formula]

    def _is_at_hand(self, formula: Formula) -> bool:
        """Whether it is a constant, or a small operand that is one number for all of a row's edges."""
        if formula.function == "constant":
            return True
        is_small = formula.function == "operand" and not formula.is_wide
        return is_small and self.targets[int(formula.told[0])] in ("w", self.walk.near)

    def _operands(self, wide: bool, target: str) -> Iterator[Formula]:
        for formula in self.order:
            if (
                formula.function == "operand"
                and formula.is_wide == wide
                and self.targets[int(formula.told[0])] == target
            ):
                yield formula

    def _slots(self, target: str) -> list[int]:
        """Operands with a row to point to: wide ones of the far end and of edges, all of the near end."""
        kinds = (True, False) if target == self.walk.near else (True,)
        return sorted({int(formula.told[0]) for wide in kinds for formula in self._operands(wide, target)})

    def _out(self, slot: int) -> str:
        return f"out[{max(slot, 0)}]"

    def _out_width(self, slot: int) -> int:
        return self.widths[slot]


def _in(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield "  " + line
