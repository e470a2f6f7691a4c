"""What went wrong once, or nearly: empty widths, odd tensors, modes, values at the edge of the numbers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import check
from graphs import adjacency, random_edges
from torch import Tensor

from runner.errors import UserError
from runner.kernels import reference
from runner.kernels.adjacency import Adjacency
from runner.kernels.cuda import launch as cuda
from runner.kernels.cuda import library
from runner.kernels.ops import SparseFeatures, dot_attention, edge_softmax, gat_attention, sddmm, sparse_linear, spmm
from runner.kernels.parameters import Epilogue, Scoring

SRC, DST, _ = random_edges(40, 300)
W = torch.ones(3, 2)


@pytest.fixture
def graph() -> Adjacency:
    return Adjacency.from_edges(SRC, DST, 40, 40)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_no_features_give_no_features(graph: Adjacency, reduce: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(40, *shape, requires_grad=True)
    y = spmm(graph, x, torch.rand(300), reduce=reduce, activation="relu")
    assert y.shape == (40, *shape)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    assert sddmm(graph, x, x, "add").shape == (300, *shape)
    assert sddmm(graph, x, x, "dot").shape == (300, *shape[:-1])
    assert edge_softmax(graph, torch.zeros(300, 0)).shape == (300, 0)


def test_no_nodes_at_all() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    for num_dst in (0, 3):
        empty = Adjacency.from_edges(nothing, nothing, 0, num_dst)
        for shape in ((5,), (2, 5)):
            assert torch.equal(spmm(empty, torch.zeros(0, *shape)), torch.zeros(num_dst, *shape))
        value = torch.zeros(0, 2, 3)
        assert gat_attention(empty, value, torch.zeros(0, 2), torch.zeros(num_dst, 2)).shape == (num_dst, 2, 3)


def test_csr_arrays_may_be_strided_and_are_copied(graph: Adjacency) -> None:
    strided = torch.stack([graph.indices, torch.full_like(graph.indices, 7)], 1)[:, 0]
    taken = Adjacency.from_csr(torch.stack([graph.indptr] * 2, 1)[:, 0], strided, 40)
    strided.fill_(2**30)
    x = torch.randn(40, 16)
    assert torch.equal(spmm(taken, x), spmm(graph, x))


def test_a_selection_of_edges_is_refused_where_ids_matter(graph: Adjacency) -> None:
    chosen = graph.select(torch.arange(300) % 30 == 0)
    for call in (
        lambda: spmm(chosen, torch.ones(40, 2), torch.ones(10)),
        lambda: edge_softmax(chosen, torch.ones(10, 1)),
    ):
        with pytest.raises(UserError, match="a selection of 10 edges keeps its graph's edge ids"):
            call()
    whole = Adjacency.from_csr(chosen.indptr, chosen.indices, 40)
    assert spmm(whole, torch.ones(40, 2), torch.ones(10)).sum() == 20


def test_the_default_device_is_not_ours(graph: Adjacency) -> None:
    x = torch.randn(40, 8)
    with torch.device("meta"):
        y = spmm(graph, x)
        z = gat_attention(graph, x.view(40, 2, 4), x[:, :2], x[:, :2])
    assert y.device.type == z.device.type == "cpu"


def test_a_lazily_negated_tensor(graph: Adjacency) -> None:
    x = torch.randn(40, 8)
    assert torch.allclose(spmm(graph, torch._neg_view(x)), -spmm(graph, x))


def test_wrapped_and_fake_tensors_do_not_reach_a_kernel(graph: Adjacency) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(40, 8)
    twin = spmm(graph, TwoTensor(x, x))
    assert torch.equal(twin.a, spmm(graph, x))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
    assert spmm(graph, fake).shape == (40, 8)


def test_transforms_do_not_spoil_the_graph(graph: Adjacency) -> None:
    stacked = torch.randn(2, 40, 8)
    both = torch.func.vmap(lambda x: spmm(graph, x))(stacked)
    assert torch.allclose(both, torch.stack([spmm(graph, x) for x in stacked]), atol=1e-5)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: spmm(graph, x).sum())(stacked[0])
    assert torch.allclose(spmm(graph, stacked[0]), reference.spmm(graph, stacked[0]), atol=1e-5)


def test_training_after_inference(graph: Adjacency) -> None:
    with torch.inference_mode():
        spmm(graph, torch.randn(40, 8), reduce="mean")
        edge_softmax(graph, torch.randn(300, 2))
    x, logits = torch.randn(40, 8, requires_grad=True), torch.randn(300, 2, requires_grad=True)
    torch.autograd.grad(spmm(graph, x, reduce="mean").sum() + edge_softmax(graph, logits).sum(), [x, logits])


@pytest.mark.parametrize("needs", range(5))
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_any_one_input_may_need_a_gradient(graph: Adjacency, needs: int, reduce: str) -> None:
    inputs = [torch.randn(40, 6), torch.randn(300), torch.randn(40), torch.randn(40), torch.randn(6)]

    def only(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        return [x if at == needs else entry.to(dtype) for at, entry in enumerate(inputs)]

    def ours(x: Tensor) -> Tensor:
        y, w, r, c, b = only(x, x.dtype)
        return spmm(graph, y, w, reduce=reduce, row_scale=r, col_scale=c, bias=b, activation="elu")

    def plain(x: Tensor) -> Tensor:
        y, w, r, c, b = only(x, x.dtype)
        return reference.spmm(graph, y, w, reduce, c, Epilogue(r, b, "elu", 1.0))

    check((needs, reduce), ours, plain, [inputs[needs]], scale=30)


def test_elu_of_small_values_is_not_lost(graph: Adjacency) -> None:
    x = -torch.rand(40, 40) * 1e-5
    for dtype in (torch.float32, torch.float64):
        expected = reference.spmm(graph, x.double(), None, "sum", None, Epilogue(None, None, "elu", 1.0))
        found = spmm(graph, x.to(dtype), activation="elu").double()
        assert torch.allclose(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)
    steep = torch.linspace(-1, 0, 40).unsqueeze(1)
    loops = Adjacency.from_edges(torch.arange(40), torch.arange(40), 40, 40)
    found = spmm(loops, steep, activation="elu").double()
    assert torch.allclose(found, torch.expm1(steep.double()), rtol=3e-7, atol=0)


def test_scores_of_minus_infinity() -> None:
    hub = Adjacency.from_edges(torch.arange(300), torch.zeros(300, dtype=torch.int64), 300, 1)
    value, query = torch.randn(300, 2, 4), torch.randn(1, 2)
    for masked in (slice(0, 200), slice(100, 300), slice(5, 295)):
        key = torch.randn(300, 2)
        key[masked] = -torch.inf
        expected = reference.attention(hub, value, key, query, None, Scoring("gat"))
        assert torch.allclose(gat_attention(hub, value, key, query), expected, atol=1e-5)


def test_the_gradient_of_max_on_graphs_with_rows_in_any_order(graph: Adjacency) -> None:
    turned_about = torch.cat([graph.indices[a:b].flip(0) for a, b in zip(graph.indptr, graph.indptr[1:], strict=False)])
    mixed = Adjacency.from_csr(graph.indptr, turned_about, 40)
    for version in (mixed, mixed.transposed, graph.incidence, graph.incidence.transposed):
        x = torch.randn(version.num_src, 5)
        check(
            "max",
            lambda x, g=version: spmm(g, x, reduce="max"),
            lambda x, g=version: reference.spmm(g, x, None, "max"),
            [x],
        )


def test_of_several_nan_the_first_gets_the_gradient() -> None:
    row = Adjacency.from_edges(torch.arange(3), torch.zeros(3, dtype=torch.int64), 3, 1)
    x = torch.tensor([[torch.nan], [1.0], [torch.nan]], requires_grad=True)
    assert torch.autograd.grad(spmm(row, x, reduce="max").sum(), x)[0].flatten().tolist() == [1, 0, 0]


def test_stored_ones_that_are_trained_keep_their_gradient() -> None:
    values = torch.ones(3, requires_grad=True)
    features = SparseFeatures.from_csr(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), values, 3)
    assert torch.autograd.grad(sparse_linear(features, torch.randn(3, 2)).sum(), values)[0].shape == (3,)


BAD: dict[str, tuple[Callable[[Adjacency], Any], str]] = {
    "slope": (lambda g: spmm(g, torch.ones(40, 2), activation="leaky_relu", slope=-0.1), "slope is -0.1: at least 0"),
    "seed": (lambda g: spmm(g, torch.ones(40, 2), dropout=0.1, seed=2**64), "seed is 18446744073709551616"),
    "odd seed": (lambda g: spmm(g, torch.ones(40, 2), dropout=0.1, seed=1.5), "seed is 1.5"),  # type: ignore[arg-type]
    "scale": (lambda g: dot_attention(g, *[torch.ones(40, 1, 2)] * 3, scale=torch.ones(1)), "scale is a tensor"),  # type: ignore[arg-type]
    "wrapped id": (lambda _: SparseFeatures.from_csr(torch.tensor([0, 1]), torch.tensor([2**32]), torch.ones(1), 5), "ids from 4294967296"),
    "value dtype": (lambda _: sparse_linear(SparseFeatures.from_dense(torch.rand(3, 3).double()), W), "the features' values"),
    "float ids": (lambda _: Adjacency.from_edges(torch.tensor([0.7]), torch.tensor([0]), 1, 1), r"src is torch.float32 of shape \[1\]"),
    "float dst": (lambda _: Adjacency.from_edges(torch.tensor([0]), torch.tensor([0.0]), 1, 1), "dst is torch.float32"),
    "ids in two dimensions": (lambda _: Adjacency.from_edges(SRC.view(2, -1), DST, 40, 40), r"src is torch.int64 of shape \[2, 150\]"),
    "2-D indptr": (lambda _: Adjacency.from_csr(torch.zeros(2, 2, dtype=torch.int64), SRC, 40), "both need one dimension"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_more_bad_input(graph: Adjacency, name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(UserError, match=message):
        call(graph)


def test_a_used_graph_can_be_pickled(graph: Adjacency) -> None:
    x = torch.randn(40, 3)
    expected = spmm(graph, x)
    assert torch.equal(spmm(pickle.loads(pickle.dumps(graph)), x), expected)


def test_many_threads_of_python(graph: Adjacency) -> None:
    from concurrent.futures import ThreadPoolExecutor

    inputs = [torch.randn(40, width) for width in (3, 16, 33, 64)] * 8
    expected = [spmm(graph, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: spmm(graph, x), inputs))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_a_cuda_kernel_takes_as_a_double_is_a_float(graph: Adjacency, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy hands an int on as an int, which the emulation can't show."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(
        library, "function", lambda _s, name, **_d: lambda _g, _b, arguments, _w: seen.append((name, arguments))
    )
    value, narrow = torch.randn(40, 2, 4), torch.randn(40, 2)
    turned, scoring = graph.transposed.csr, Scoring("gatv2", 1, 1, 0, 3)
    operands = (value, narrow, narrow)
    cuda.gat_backward(turned, operands, cuda.gat(graph.csr, *operands, scoring, True), value, scoring)
    saved = cuda.attention(graph.csr, value, None, value, value[0], scoring)
    cuda.attention_backward_sources(turned, (value, None, value, value[0]), saved, value, scoring)
    cuda.attention_backward_destinations(graph.csr, value, value, value[0], narrow, scoring)
    cuda.spmm(graph.csr, value.flatten(1), None, None, Epilogue(activation="elu", slope=1, dropout=0))
    counts = {name: [type(entry) for entry in arguments].count(float) for name, arguments in seen}
    assert counts == {
        "gat": 2,
        "gat_backward_destinations": 1,
        "gat_backward_sources": 2,
        "attention": 3,
        "attention_dots": 0,
        "attention_backward_sources": 3,
        "attention_backward_destinations": 1,
        "spmm": 2,
    }


def test_narrow_vectors_and_packed_slices_with_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.kernels.cpu import launch

    monkeypatch.setattr(launch, "last_cache_bytes", lambda: 40 * 32 * 8 + 1)
    big = adjacency(random_edges(40, 400))
    for heads, channels in ((1, 200), (2, 100), (4, 64), (8, 32)):
        for dtype in (torch.float32, torch.float64):
            x, weight = torch.randn(40, heads, channels).to(dtype), torch.randn(400, heads).to(dtype)
            expected = reference.spmm(big, x.double(), weight.double(), "sum")
            assert torch.allclose(spmm(big, x, weight).double(), expected, atol=1e-4)
            assert torch.allclose(spmm(big, x).double(), reference.spmm(big, x.double()), atol=1e-4)


def test_a_destination_without_edges_has_no_gradient_whatever_comes_from_above() -> None:
    graph = Adjacency.from_edges(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 2]), 3, 3)
    value, key, query = (torch.randn(shape, requires_grad=True) for shape in ((3, 2, 4), (3, 2), (3, 2)))
    for upstream in (torch.inf, torch.nan):
        dout = torch.ones(3, 2, 4)
        dout[1] = upstream
        gradients = torch.autograd.grad(gat_attention(graph, value, key, query), (value, key, query), dout)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert not gradients[2][1].any()
    with torch.no_grad():
        value[[0, 1, 2]] = torch.tensor([1.0, 1.0, torch.inf]).view(3, 1, 1)
    lonely = Adjacency.from_edges(torch.tensor([0, 1]), torch.tensor([0, 0]), 3, 3)
    gradients = torch.autograd.grad(gat_attention(lonely, value, key, query).sum(), (value, key, query))
    assert all(gradient.isfinite().all() for gradient in gradients), (
        "a source without edges has no gradient, whatever it holds"
    )
