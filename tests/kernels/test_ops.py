"""Every op against the fp64 reference, output and gradients, on weird graphs, widths and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import check
from graphs import WEIRD, adjacency, random_edges
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.kernels import reference
from runner.kernels.adjacency import Adjacency
from runner.kernels.ops import (
    SparseFeatures,
    dot_attention,
    edge_softmax,
    gat_attention,
    gatv2_attention,
    sddmm,
    sparse_linear,
    spmm,
)
from runner.kernels.parameters import Epilogue, Scoring

WIDTHS = (1, 3, 16, 31, 33, 64, 100, 128, 257)
REDUCERS = ("sum", "mean", "max", "min")
HEADS = ((1, 1), (1, 8), (1, 33), (2, 4), (3, 5), (8, 8), (8, 2), (17, 1), (20, 3), (4, 64))
SLOPES = {"identity": 0.0, "relu": 0.0, "elu": 1.3, "leaky_relu": 0.1}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def bipartite(num_src: int, num_dst: int, num_edges: int, **options: torch.dtype) -> Adjacency:
    generator = torch.Generator().manual_seed(num_edges)
    src = torch.randint(0, num_src, (num_edges,), generator=generator)
    dst = torch.randint(0, num_dst, (num_edges,), generator=generator)
    return Adjacency.from_edges(src, dst, num_src, num_dst, **options)  # type: ignore[arg-type]


GRAPHS: dict[str, Adjacency] = {name: adjacency(edges) for name, edges in WEIRD.items()}
GRAPHS |= {
    "more sources": bipartite(40, 7, 90),
    "more destinations": bipartite(5, 60, 80),
    "no sources' edges": bipartite(9, 3, 0),
    "15 nodes": adjacency(random_edges(15, 60)),
    "16 nodes": adjacency(random_edges(16, 60)),
    "17 nodes": adjacency(random_edges(17, 60)),
    "1024 nodes": adjacency(random_edges(1024, 9000)),
    "int64": bipartite(20, 20, 70, index_dtype=torch.int64),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("reduce", REDUCERS)
def test_spmm_at_every_width(name: str, reduce: str) -> None:
    graph = GRAPHS[name]
    weight = torch.rand(graph.num_edges) + 0.5
    for width in WIDTHS:
        x = normal(graph.num_src, width)
        check(
            (name, width),
            lambda x: spmm(graph, x, reduce=reduce),
            lambda x: reference.spmm(graph, x, None, reduce),
            [x],
        )
        check(
            (name, width, "weighted"),
            lambda x, w: spmm(graph, x, w, reduce=reduce),
            lambda x, w: reference.spmm(graph, x, w, reduce),
            [x, weight],
            scale=width**0.5,
        )


@pytest.mark.parametrize("name", GRAPHS)
def test_spmm_without_gradients_gives_the_same(name: str) -> None:
    graph = GRAPHS[name]
    for width in WIDTHS:
        x, weight = normal(graph.num_src, width), torch.rand(graph.num_edges)
        for reduce in REDUCERS:
            with_gradient = spmm(graph, x.clone().requires_grad_(), weight, reduce=reduce)
            assert torch.equal(spmm(graph, x, weight, reduce=reduce), with_gradient.detach())


@pytest.mark.parametrize(
    "name", ["hub", "random directed", "more sources", "no edges", "duplicates and loops", "1024 nodes"]
)
@pytest.mark.parametrize("reduce", REDUCERS)
def test_spmm_with_a_weight_per_head_or_feature(name: str, reduce: str) -> None:
    graph = GRAPHS[name]
    for heads, channels in HEADS:
        x, weight = normal(graph.num_src, heads, channels), normal(graph.num_edges, heads)
        plain = lambda x, w: reference.spmm(graph, x, w, reduce)  # noqa: E731
        check(
            (name, heads, channels),
            lambda x, w: spmm(graph, x, w, reduce=reduce),
            plain,
            [x, weight],
            scale=channels**0.5,
        )
    for width in (2, 16, 33):
        x, weight = normal(graph.num_src, width), normal(graph.num_edges, width)
        plain = lambda x, w: reference.spmm(graph, x, w, reduce)  # noqa: E731
        check((name, "per feature", width), lambda x, w: spmm(graph, x, w, reduce=reduce), plain, [x, weight])


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("reduce", REDUCERS)
@pytest.mark.parametrize("name", ["random directed", "more destinations", "hub"])
def test_spmm_scales_and_epilogue(name: str, reduce: str, activation: str, dropout: float) -> None:
    graph, slope = GRAPHS[name], SLOPES[activation]
    told: dict[str, Any] = {"activation": activation, "dropout": dropout, "slope": slope, "seed": 11}
    for width in (3, 33):
        inputs = [normal(graph.num_src, width), torch.rand(graph.num_edges) + 0.5]
        inputs += [normal(graph.num_dst), normal(graph.num_src), normal(width)]
        check(
            (name, width),
            lambda x, w, r, c, b: spmm(graph, x, w, reduce=reduce, row_scale=r, col_scale=c, bias=b, **told),
            lambda x, w, r, c, b: reference.spmm(
                graph, x, w, reduce, c, Epilogue(r, b, activation, slope, dropout, 11)
            ),
            inputs,
            scale=10 * width**0.5,
        )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("operation", ["dot", "add", "sub", "mul"])
def test_sddmm(name: str, operation: str) -> None:
    graph = GRAPHS[name]

    def plain(u: Tensor, v: Tensor) -> Tensor:
        both = reference.gather(graph, u, "u"), reference.gather(graph, v, "v")
        combined = reference.edge_apply(operation, *both)
        return combined.squeeze(-1) if operation == "dot" else combined

    for shape in ((1,), (3,), (33,), (8, 8), (3, 5), (2, 64)):
        inputs = [normal(graph.num_src, *shape), normal(graph.num_dst, *shape, seed=1)]
        check((name, shape), lambda u, v: sddmm(graph, u, v, operation), plain, inputs, scale=shape[-1] ** 0.5)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_edge_softmax(name: str, norm_by: str) -> None:
    graph = GRAPHS[name]
    for heads in (1, 2, 3, 8, 16, 17, 40):
        logits = 3 * normal(graph.num_edges, heads)
        plain = lambda s: reference.edge_softmax(graph, s, norm_by)  # noqa: E731
        check((name, heads), lambda s: edge_softmax(graph, s, norm_by), plain, [logits])
    huge = torch.cat([torch.full((graph.num_edges, 1), 3e4), torch.full((graph.num_edges, 1), -3e4)], 1)
    assert edge_softmax(graph, huge, norm_by).isfinite().all()


def attention_inputs(graph: Adjacency, score: str, heads: int, channels: int) -> list[Tensor]:
    value = normal(graph.num_src, heads, channels)
    if score == "gat":
        return [value, normal(graph.num_src, heads), normal(graph.num_dst, heads, seed=1)]
    query = normal(graph.num_dst, heads, channels, seed=1)
    return (
        [value, query, normal(heads, channels)]
        if score == "gatv2"
        else [value, normal(graph.num_src, heads, channels, seed=2), query]
    )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("score", ["gat", "gatv2", "dot"])
def test_attention(name: str, score: str) -> None:
    graph = GRAPHS[name]
    functions = {"gat": gat_attention, "gatv2": gatv2_attention, "dot": dot_attention}
    for heads, channels in HEADS:
        for dropout in (0.0, 0.3):
            scoring = Scoring(score, 0.2, channels**-0.5, dropout, 5)

            def plain(value: Tensor, second: Tensor, third: Tensor, scoring: Scoring = scoring) -> Tensor:
                operands = (None, second, third) if score == "gatv2" else (second, third, None)
                return reference.attention(graph, value, *operands, scoring)

            inputs = attention_inputs(graph, score, heads, channels)
            check(
                (name, heads, channels, dropout),
                lambda *given, dropout=dropout: functions[score](graph, *given, dropout=dropout, seed=5),
                plain,
                inputs,
                scale=3 * channels**0.5,
            )


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_hub_with_100_000_edges(reduce: str) -> None:
    num_edges = 100_000
    src = torch.arange(num_edges) % 301
    graph = Adjacency.from_edges(src, torch.zeros_like(src), 301, 3)
    x, weight = normal(301, 5), normal(num_edges)
    check(
        "hub",
        lambda x, w: spmm(graph, x, w, reduce=reduce),
        lambda x, w: reference.spmm(graph, x, w, reduce),
        [x, weight],
    )
    logits = normal(num_edges, 2)
    check("softmax", lambda s: edge_softmax(graph, s), lambda s: reference.edge_softmax(graph, s, "dst"), [logits])
    inputs = attention_inputs(graph, "gat", 2, 4)
    plain = lambda v, k, q: reference.attention(graph, v, k, q, None, Scoring("gat"))  # noqa: E731
    check("attention", lambda v, k, q: gat_attention(graph, v, k, q), plain, inputs, scale=10)


@given(
    num_src=st.integers(1, 40),
    num_dst=st.integers(1, 40),
    num_edges=st.integers(0, 200),
    width=st.integers(1, 70),
    reduce=st.sampled_from(REDUCERS),
    wide=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_spmm_on_any_graph(
    num_src: int, num_dst: int, num_edges: int, width: int, reduce: str, wide: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(0, bound, (num_edges,), generator=generator) for bound in (num_src, num_dst)]
    graph = Adjacency.from_edges(*ends, num_src, num_dst, torch.int64 if wide else None)
    x, weight = normal(num_src, width, seed=seed), normal(num_edges, seed=seed)
    plain = lambda x, w: reference.spmm(graph, x, w, reduce)  # noqa: E731
    check(seed, lambda x, w: spmm(graph, x, w, reduce=reduce), plain, [x, weight], scale=width**0.5)


@pytest.mark.parametrize("layout", ["transposed", "every other column", "every other row", "expanded row", "unaligned"])
def test_features_in_any_layout(layout: str) -> None:
    graph = GRAPHS["random directed"]
    num_nodes = graph.num_src
    x = {
        "transposed": normal(20, num_nodes).T,
        "every other column": normal(num_nodes, 40)[:, ::2],
        "every other row": normal(2 * num_nodes, 20)[::2],
        "expanded row": normal(1, 20).expand(num_nodes, 20),
        "unaligned": normal(num_nodes * 20 + 1)[1:].view(num_nodes, 20),
    }[layout]
    weight = normal(graph.num_edges, 2)[:, 0]
    for reduce in REDUCERS:
        assert torch.equal(
            spmm(graph, x, weight, reduce=reduce), spmm(graph, x.contiguous(), weight.contiguous(), reduce=reduce)
        )
    assert torch.equal(sddmm(graph, x, x), sddmm(graph, x.contiguous(), x.contiguous()))
    heads = x.reshape(num_nodes, 4, 5)
    key = normal(4, num_nodes).T
    assert torch.equal(
        gat_attention(graph, heads, key, key),
        gat_attention(graph, heads.contiguous(), key.contiguous(), key.contiguous()),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    graph = GRAPHS["random symmetric"]
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    x, weight = normal(graph.num_src, 33).to(dtype), normal(graph.num_edges).to(dtype)
    for reduce in REDUCERS:
        expected = reference.spmm(graph, x.double(), weight.double(), reduce)
        found = spmm(graph, x, weight, reduce=reduce, activation="leaky_relu", slope=1.0)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, atol=tolerance * 10, rtol=tolerance)
    logits = normal(graph.num_edges, 3).to(dtype)
    expected = reference.edge_softmax(graph, logits.double(), "dst")
    assert torch.allclose(edge_softmax(graph, logits).double(), expected, atol=tolerance, rtol=tolerance)
    for score, function in (("gat", gat_attention), ("gatv2", gatv2_attention), ("dot", dot_attention)):
        inputs = [entry.to(dtype).requires_grad_() for entry in attention_inputs(graph, score, 2, 8)]
        second, third = (entry.double() for entry in inputs[1:])
        operands = (None, second, third) if score == "gatv2" else (second, third, None)
        out = function(graph, *inputs)  # type: ignore[operator]
        right = reference.attention(graph, inputs[0].double(), *operands, Scoring(score, 0.2, 8**-0.5))
        assert torch.allclose(out.double(), right, atol=tolerance * 4, rtol=tolerance * 2)
        for mine, other in zip(
            torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(right.sum(), inputs), strict=True
        ):
            assert mine.dtype == dtype
            assert torch.allclose(mine.double(), other.double(), atol=tolerance * 20, rtol=tolerance * 4)


def test_bf16_sums_do_not_stick() -> None:
    num_edges = 4000  # in bf16 a sum of ones stops at 256
    graph = Adjacency.from_edges(
        torch.zeros(num_edges, dtype=torch.int64), torch.zeros(num_edges, dtype=torch.int64), 1, 1
    )
    assert float(spmm(graph, torch.ones(1, 1, dtype=torch.bfloat16))) == 4000 - 4000 % 16


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_and_infinities_pass_through(reduce: str) -> None:
    src, dst = torch.tensor([0, 1, 1, 2, 3, 3]), torch.tensor([0, 0, 1, 1, 2, 3])
    graph = Adjacency.from_edges(src, dst, 4, 5)
    x = torch.tensor([[1.0] * 20, [float("nan")] * 20, [2.0] * 20, [float("inf")] * 20])
    for features in (x, x.clone().requires_grad_()):
        y = spmm(graph, features, reduce=reduce).detach()
        assert y[:2].isnan().all()
        assert (y[2:4] == float("inf")).all()
        assert (y[4] == 0).all()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_tie_goes_to_the_lowest_source_then_edge_id(reduce: str) -> None:
    graph = Adjacency.from_edges(torch.tensor([2, 1, 1]), torch.tensor([0, 0, 0]), 3, 1)
    x, weight = torch.ones(3, 1, requires_grad=True), torch.ones(3, requires_grad=True)
    gradients = torch.autograd.grad(spmm(graph, x, weight, reduce=reduce), [x, weight])
    assert gradients[0].flatten().tolist() == [0, 1, 0]
    assert gradients[1].tolist() == [0, 1, 0]


def test_sparse_linear_equals_the_dense_product() -> None:
    x = (normal(50, 70) * (torch.rand(50, 70, generator=torch.Generator().manual_seed(1)) < 0.1)).contiguous()
    for features, dense in (
        (SparseFeatures.from_dense(x), x),
        (SparseFeatures.from_dense((x != 0).float()), (x != 0).float()),
    ):
        check(
            "sparse",
            lambda w, b, features=features: sparse_linear(features, w, b),
            lambda w, b, dense=dense: dense.to(w.dtype) @ w + b,
            [normal(70, 16), normal(16)],
        )
    values = SparseFeatures.from_dense(x).values
    assert values is not None
    pattern = SparseFeatures.from_dense(x).pattern
    weight = normal(70, 16)
    check(
        "values",
        lambda v, w: sparse_linear(SparseFeatures(pattern, v), w),
        lambda v, w: torch.zeros(50, 70, dtype=v.dtype).index_put((pattern.rows.long(), pattern.indices.long()), v) @ w,
        [values, weight],
        scale=4,
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_seed_gives_the_same_bits(threads: int) -> None:
    graph = adjacency(random_edges(3000, 40_000))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for _ in range(3):
            x = normal(3000, 32).requires_grad_()
            heads = x.view(3000, 4, 8)
            y = spmm(graph, x, reduce="mean", dropout=0.5, seed=3, activation="elu")
            z = gatv2_attention(graph, heads, heads, heads[0], dropout=0.3, seed=4)
            results.append((y.detach(), z.detach(), *torch.autograd.grad(y.sum() + z.sum(), [x])))
        for other in results[1:]:
            assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


def test_another_seed_drops_others() -> None:
    graph, x = GRAPHS["random directed"], torch.ones(33, 64)
    dropped = [spmm(graph, x, dropout=0.5, seed=seed) == 0 for seed in (1, 2, 2**40 + 1, -1)]
    assert all(not torch.equal(one, two) for at, one in enumerate(dropped) for two in dropped[:at])


def test_attention_keeps_nothing_per_edge_and_channel() -> None:
    from runner.tasks.measure import peak_memory

    graph = adjacency(random_edges(200, 20_000))
    peaks = {}
    for channels in (4, 64):
        for score, function in (("gat", gat_attention), ("gatv2", gatv2_attention), ("dot", dot_attention)):
            inputs = [entry.requires_grad_() for entry in attention_inputs(graph, score, 2, channels)]
            peaks[score, channels] = (
                peak_memory(
                    lambda inputs=inputs, function=function: torch.autograd.grad(
                        function(graph, *inputs).sum(), inputs
                    ),  # type: ignore[misc,operator]
                    torch.device("cpu"),
                )
                - 4 * 6 * 200 * 2 * channels
            )  # a few arrays of a node's size
    for score in ("gat", "gatv2", "dot"):
        assert peaks[score, 64] < 2 * 4 * 20_000 * 2 + 10**5, peaks  # two numbers an edge and head at most
        assert peaks[score, 64] - peaks[score, 4] < 10**5, peaks
