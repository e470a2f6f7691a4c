"""The CUDA kernels: compiled for two architectures without a GPU, emulated on the CPU, and, where there is a GPU, run on it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import check
from emulation import emulated
from graphs import WEIRD, adjacency, random_edges
from torch import Tensor

from runner.kernels import reference
from runner.kernels.adjacency import Adjacency, Csr
from runner.kernels.cpu import launch as cpu
from runner.kernels.cuda import launch as cuda
from runner.kernels.cuda import library
from runner.kernels.cuda.library import CHUNKS, GROUPS, compile_for
from runner.kernels.parameters import Epilogue, Scoring

ARCHITECTURES = ("sm_80", "sm_90")
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy (extra cuda13) is not installed"
)
gpu = pytest.mark.gpu
has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WIDE = {"float": 4, "double": 2, "bf16": 8}
TYPES = [(storage, index) for index in ("int", "int64") for storage in WIDE]


def variants() -> Iterator[tuple[str, dict[str, str | int]]]:
    """Every kernel at every width (lanes, features a lane, channels a lane); the other macros take turns, so that each value occurs."""
    products = itertools.cycle(itertools.product((0, 1, 2), (0, 1, 2, 3)))  # REDUCE, WEIGHTING
    types = itertools.cycle(TYPES)
    for group in GROUPS:
        for wide in (False, True):
            for _ in range(2):
                (reduce, weighting), (storage, index) = next(products), next(types)
                width = {"GROUP": group, "VEC": WIDE[storage] if wide else 1}
                told = {"REDUCE": reduce, "WEIGHTING": weighting, "PLACES": int(reduce > 0)}
                yield "spmm", {"STORAGE": storage, "INDEX": index, **width, **told}
        for source, macros in (
            ("sddmm", [{"OPERATION": kind} for kind in range(4)]),
            ("softmax", [{}]),
            ("extremum", [{}]),
        ):
            for told in macros:
                storage, index = next(types)
                yield source, {"STORAGE": storage, "INDEX": index, "GROUP": group, "VEC": 1, **told}
        for source, told in itertools.product(
            ("attention", "gat"), ({"SCORE": 0, "KEEPS": 0}, {"SCORE": 1, "KEEPS": 1})
        ):
            for chunks in CHUNKS if group == GROUPS[-1] else CHUNKS[:1]:
                storage, index = next(types)
                yield source, {"STORAGE": storage, "INDEX": index, "GROUP": group, "VEC": 1, **told, "CHUNKS": chunks}
    for storage in WIDE:
        yield "elementwise", {"STORAGE": storage, "INDEX": "int", "GROUP": 1, "VEC": 1}


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", ["spmm", "sddmm", "elementwise", "extremum", "softmax", "attention", "gat"])
def test_every_kernel_compiles_at_every_width(source: str, architecture: str) -> None:
    compiled = [compile_for(name, defines, architecture) for name, defines in variants() if name == source]
    assert compiled
    assert all(cubin[:4] == b"\x7fELF" for cubin in compiled)


@needs_nvrtc
def test_a_source_that_does_not_compile_is_quoted() -> None:
    with pytest.raises(RuntimeError, match=r"spmm\.cu.*error"):
        compile_for("spmm", {"STORAGE": "nothing", "INDEX": "int", "GROUP": 1, "VEC": 1}, "sm_90")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


GRAPHS = {name: adjacency(edges) for name, edges in WEIRD.items()}
GRAPHS["17 nodes, int64"] = Adjacency.from_edges(*random_edges(17, 80)[:2], 17, 17, torch.int64)
GRAPHS["bipartite"] = Adjacency.from_edges(random_edges(9, 50)[0], random_edges(30, 50)[1], 9, 30)
GRAPHS["long rows"] = Adjacency.from_edges(random_edges(9, 300)[0], random_edges(3, 300)[1], 9, 3)
SIDES = pytest.mark.parametrize("side", ["end", "start"])


class Differentiable(torch.autograd.Function):
    """A forward and a backward made of launcher calls, so that gradients can be compared as for the ops."""

    @staticmethod
    def forward(ctx: Any, there: Callable[..., Tensor], back: Callable[..., Any], *inputs: Tensor) -> Tensor:
        ctx.back, ctx.inputs = back, [entry.detach() for entry in inputs]
        return there(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return None, None, *ctx.back(upstream.contiguous(), *ctx.inputs)


@SIDES
@pytest.mark.parametrize("name", GRAPHS)
def test_products_by_emulation(name: str, side: str, built: Path) -> None:
    graph = GRAPHS[name]
    with emulated(built, guard=side) as g:
        csr, turned = guarded_graphs(graph, g)
        for width, reduce, per in itertools.product((1, 3, 33, 64), ("sum", "max", "min"), (None, 1, "width")):
            heads = width if per == "width" else 1
            weight = [] if per is None else [torch.rand(graph.num_edges, heads) + 0.5]

            def there(x: Tensor, *weight: Tensor, reduce: str = reduce) -> Tensor:
                return cuda.spmm(csr, g(x), g(weight[0]) if weight else None, None, Epilogue(), reduce)[0]

            def back(dy: Tensor, x: Tensor, *weight: Tensor, reduce: str = reduce, heads: int = heads) -> list[Tensor]:
                w = g(weight[0]) if weight else None
                if reduce == "sum":
                    dx = cuda.spmm(turned, g(dy), w, None, Epilogue())[0]
                    return [dx, *([cuda.sddmm(csr, g(x), g(dy), "dot", heads)] if weight else [])]
                places = cuda.spmm(csr, g(x), w, None, Epilogue(), reduce, True)[1]
                assert places is not None
                dx = cuda.extremum_grad_x(turned, g(graph.turned_entries), places, g(dy), w, None, None)
                return [
                    dx,
                    *([cuda.extremum_grad_weight(csr, places, g(dy), g(x), heads, None, None)] if weight else []),
                ]

            def plain(x: Tensor, *weight: Tensor, reduce: str = reduce) -> Tensor:
                w = weight[0] if weight and weight[0].shape[1] > 1 else weight[0].flatten() if weight else None
                return reference.spmm(graph, x, w, reduce)

            x = torch.randn(graph.num_src, width)
            op = lambda *inputs, there=there, back=back: Differentiable.apply(there, back, *inputs)  # noqa: E731
            check((name, width, reduce, per), op, plain, [x, *weight], scale=width**0.5)


@SIDES
@pytest.mark.parametrize("name", GRAPHS)
def test_softmax_by_emulation(name: str, side: str, built: Path) -> None:
    graph = GRAPHS[name]
    with emulated(built, guard=side) as g:
        csr, _ = guarded_graphs(graph, g)
        for heads in (1, 3, 8):

            def back(da: Tensor, logits: Tensor) -> list[Tensor]:
                return [cuda.edge_softmax_backward(csr, cuda.edge_softmax(csr, g(logits)), g(da))]

            op = lambda s, back=back: Differentiable.apply(lambda s: cuda.edge_softmax(csr, g(s)), back, s)  # noqa: E731
            check(
                (name, heads),
                op,
                lambda s: reference.edge_softmax(graph, s, "dst"),
                [3 * torch.randn(graph.num_edges, heads)],
            )


@SIDES
@pytest.mark.parametrize("name", GRAPHS)
def test_gat_by_emulation(name: str, side: str, built: Path) -> None:
    graph = GRAPHS[name]
    with emulated(built, guard=side) as g:
        csr, turned = guarded_graphs(graph, g)
        for heads, channels in ((1, 1), (2, 5), (3, 40), (1, 300)):
            scoring = Scoring("gat", 0.2, 1.0, 0.3, 4)

            def there(*inputs: Tensor) -> Tensor:
                return cuda.gat(csr, *map(g, inputs), scoring, False)[0]  # noqa: B023

            def back(dout: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
                given = tuple(map(g, inputs))
                return cuda.gat_backward(turned, given, cuda.gat(csr, *given, scoring, True), g(dout), scoring)  # noqa: B023

            op = lambda *inputs, there=there, back=back: Differentiable.apply(there, back, *inputs)  # noqa: E731
            plain = lambda v, k, q, told=scoring: reference.attention(graph, v, k, q, None, told)  # noqa: E731
            sizes = ((graph.num_src, heads, channels), (graph.num_src, heads), (graph.num_dst, heads))
            check((name, heads, channels), op, plain, [torch.randn(size) for size in sizes], scale=3 * channels**0.5)


@SIDES
@pytest.mark.parametrize("score", ["gatv2", "dot"])
@pytest.mark.parametrize("name", GRAPHS)
def test_attention_by_emulation(name: str, score: str, side: str, built: Path) -> None:
    graph = GRAPHS[name]
    with emulated(built, guard=side) as g:
        csr, turned = guarded_graphs(graph, g)
        for heads, channels in ((1, 1), (2, 5), (3, 40), (1, 300)):
            scoring = Scoring(score, 0.2, channels**-0.5, 0.3, 4)

            def operands(value: Tensor, second: Tensor, third: Tensor) -> tuple[Any, ...]:
                return (value, None, second, third) if score == "gatv2" else (value, second, third, None)

            def there(*inputs: Tensor, scoring: Scoring = scoring) -> Tensor:
                return cuda.attention(
                    csr, *(None if entry is None else g(entry) for entry in operands(*inputs)), scoring
                )[0]

            def back(dout: Tensor, *inputs: Tensor, scoring: Scoring = scoring) -> list[Tensor]:
                given = tuple(None if entry is None else g(entry) for entry in operands(*inputs))
                saved = cuda.attention(csr, *given, scoring)
                dscore, dvalue, dkey = cuda.attention_backward_sources(turned, given, saved, g(dout), scoring)
                if score == "gatv2":
                    by_entry = csr._replace(entry_ids=g(graph.transposed.turned_entries))
                    ends = cuda.attention_backward_destinations(by_entry, given[0], *given[2:], dscore, scoring)
                    return [dvalue, *ends]
                dscore = dscore[torch.argsort(graph.transposed.edge_ids)]
                keys = reference.gather(graph, given[1], "u")
                return [dvalue, dkey, reference.aggregate(graph, keys * dscore.unsqueeze(-1), "sum")]

            def plain(*inputs: Tensor, scoring: Scoring = scoring) -> Tensor:
                return reference.attention(graph, *operands(*inputs), scoring)

            wide = (heads, channels)
            source, destination = (graph.num_src, *wide), (graph.num_dst, *wide)
            sizes = (source, destination, wide) if score == "gatv2" else (source, source, destination)
            inputs = [torch.randn(size) for size in sizes]
            if score == "gatv2":  # as models begin: of larger scores, a few roundings would make up the whole error
                inputs[2] *= channels**-0.5
            op = lambda *inputs, there=there, back=back: Differentiable.apply(there, back, *inputs)  # noqa: E731
            check((name, heads, channels), op, plain, inputs, scale=3 * channels**0.5)


def close(found: Tensor, expected: Tensor) -> bool:
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[found.dtype]
    return torch.allclose(found, expected, atol=9 * tolerance, rtol=tolerance)


@SIDES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scales_epilogues_and_dtypes_equal_the_cpus(dtype: torch.dtype, side: str, built: Path) -> None:
    graph = GRAPHS["random directed"]
    x, weight = torch.randn(33, 24).to(dtype), torch.rand(graph.num_edges, 24).to(dtype)
    rows, columns, bias = (torch.randn(size).to(dtype) for size in (33, 33, 24))
    with emulated(built, guard=side) as g:
        csr, turned = guarded_graphs(graph, g)
        for activation, dropout in itertools.product(("identity", "relu", "elu", "leaky_relu"), (0.0, 0.3)):
            there = Epilogue(rows, bias, activation, 0.7, dropout, 9)
            here = there._replace(row_scale=g(rows), bias=g(bias))
            for reduce in ("sum", "max"):
                expected, places = cpu.spmm(graph.csr, x, weight, columns, there, reduce, reduce == "max")
                found, taken = cuda.spmm(csr, g(x), g(weight), g(columns), here, reduce, reduce == "max")
                assert close(found, expected)
                assert close(cuda.epilogue_backward(g(x), g(expected), here), cpu.epilogue_backward(x, expected, there))
            assert places is not None
            assert taken is not None
            assert torch.equal(taken, places)
        arguments, entries = (places, x, weight, rows, columns), graph.turned_entries
        mine = cuda.extremum_grad_x(turned, g(entries), *map(g, arguments))
        assert close(mine, cpu.extremum_grad_x(graph.transposed.csr, entries, *arguments))
        u, v = x[:, :6].contiguous(), x[:, 6:12].contiguous()
        for operation in ("add", "sub", "mul", "dot"):
            assert close(cuda.sddmm(csr, g(u), g(v), operation, 2), cpu.sddmm(graph.csr, u, v, operation, 2))


@pytest.mark.parametrize(
    ("source", "wanted", "put", "complaint"),
    [
        ("spmm", "at < num_features; at +=", "at < num_features + 1; at +=", "touched memory outside|off by"),
        ("spmm", "best[k] += message[k];", "best[k] = message[k];", "off by"),
        ("softmax", "total = group_sum(total);", "", "off by"),
        (
            "softmax",
            "number < whole_warps(num_rows * num_heads)",
            "number < num_rows * num_heads",
            "not together at an exchange",
        ),
    ],
)
def test_the_emulation_catches_a_wrong_kernel(
    source: str, wanted: str, put: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = library.source_text
    monkeypatch.setattr(
        library, "source_text", lambda name: right(name).replace(wanted, put) if name == source else right(name)
    )
    assert wanted in right(source)
    test = {"spmm": test_products_by_emulation, "softmax": test_softmax_by_emulation}[source]
    with pytest.raises(AssertionError, match=complaint):
        test("17 nodes, int64", "end", tmp_path)


def guarded_graphs(graph: Adjacency, guarded: Callable[[Tensor], Tensor]) -> tuple[Csr, Csr]:
    """The CSR of a graph and of its transpose, each array between guard pages."""
    found = [
        Csr(*(None if part is None else guarded(part) for part in version.csr)) for version in (graph, graph.transposed)
    ]  # type: ignore[arg-type]
    return found[0], found[1]


@gpu
@has_gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_ops_on_the_gpu(name: str) -> None:
    from runner.kernels import ops

    here = GRAPHS[name]
    there = here.to("cuda")

    def on_gpu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: function(*(entry.cuda() for entry in inputs)).cpu()

    for width, reduce in itertools.product((1, 3, 16, 33, 64, 257), ("sum", "mean", "max", "min")):
        inputs = [torch.randn(here.num_src, width), torch.rand(here.num_edges) + 0.5]
        op = on_gpu(lambda x, w, reduce=reduce: ops.spmm(there, x, w, reduce=reduce))
        check(
            (name, width, reduce),
            op,
            lambda x, w, reduce=reduce: reference.spmm(here, x, w, reduce),
            inputs,
            scale=width**0.5,
        )
    for heads, channels in ((1, 8), (8, 8), (4, 64), (2, 300)):
        inputs = [
            torch.randn(here.num_src, heads, channels),
            torch.randn(here.num_src, heads),
            torch.randn(here.num_dst, heads),
        ]
        op = on_gpu(lambda v, k, q: ops.gat_attention(there, v, k, q, dropout=0.2, seed=1))
        plain = lambda v, k, q: reference.attention(here, v, k, q, None, Scoring("gat", 0.2, 1.0, 0.2, 1))  # noqa: E731
        check((name, heads, channels), op, plain, inputs, scale=3 * channels**0.5)


@gpu
@has_gpu
def test_cuda_graphs_replay_our_kernels() -> None:
    from runner.kernels import ops

    graph = adjacency(random_edges(200, 3000)).to("cuda")
    x = torch.randn(200, 32, device="cuda")
    ops.spmm(graph, x)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        y = ops.spmm(graph, x)
    x.copy_(torch.randn(200, 32, device="cuda"))
    recorded.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, ops.spmm(graph, x))
