"""Our ops as torch's: registration, finite differences, torch.compile, dispatch modes, second derivatives, errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import WEIRD, adjacency, random_edges
from torch import Tensor

from runner.errors import DataError, UserError
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

GRAPH = adjacency(random_edges(12, 40))
PLAIN = ("identity", 0.0, 0.0, 0, 12)
NOTHING = (None, None, None, None)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype).requires_grad_()


def test_opcheck() -> None:
    ops, graph, turned, num_edges = torch.ops.gearsail, GRAPH.csr, GRAPH.transposed.csr, GRAPH.num_edges
    x, weight, scale, bias = leaf(12, 6), leaf(num_edges, 2), leaf(12), leaf(6)
    told = ("elu", 1.0, 0.3, 5, 12)
    places = GRAPH.transposed.turned_entries
    gat, dot = (0.2, 0.1, 3), ("dot", 0.2, 0.5, 0.0, 0)
    cases = [
        (ops.spmm, (x, weight, scale, scale, bias, *told, *graph, *turned)),
        (ops.spmm, (x, None, None, None, None, *PLAIN, *graph, *turned)),
        (ops.spmm_extremum, (x, weight, scale, scale, bias, "max", True, *told, *graph, *turned, GRAPH.turned_entries)),
        (ops.spmm_extremum, (x.detach(), None, None, None, None, "min", False, *PLAIN, *graph, *NOTHING, None)),
        (ops.sddmm_dot, (x, x, 2, *graph, *turned)),
        (ops.sddmm, (x, x, "mul", *graph, *turned)),
        (ops.sddmm, (x, x, "sub", *graph, *turned)),
        (ops.edge_softmax, (weight, *graph)),
        (ops.gat, (leaf(12, 2, 3), leaf(12, 2), leaf(12, 2), *gat, *graph, *turned)),
        (ops.gat, (torch.rand(12, 2, 3), torch.rand(12, 2), torch.rand(12, 2), *gat, *graph, *NOTHING)),
        (ops.attention, (leaf(12, 2, 3), leaf(12, 2, 3), leaf(12, 2, 3), None, *dot, *graph, *turned, places)),
        (
            ops.attention,
            (leaf(12, 2, 3), None, leaf(12, 2, 3), leaf(2, 3), "gatv2", 0.2, 1.0, 0.1, 3, *graph, *turned, places),
        ),
    ]
    for op, arguments in cases:
        results = torch.library.opcheck(op.default, arguments)
        assert set(results.values()) == {"SUCCESS"}, (op, results)


def exact(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(leaf(*shape, dtype=torch.float64).detach().clone().requires_grad_() for shape in shapes)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("activation", ["identity", "relu", "elu", "leaky_relu"])
def test_gradcheck_of_spmm(reduce: str, activation: str) -> None:
    def op(x: Tensor, w: Tensor, r: Tensor, c: Tensor, b: Tensor) -> Tensor:
        scales = {"row_scale": r, "col_scale": c}
        return spmm(GRAPH, x, w, reduce=reduce, **scales, bias=b, activation=activation, dropout=0.2, seed=2)

    assert torch.autograd.gradcheck(op, exact((12, 3), (GRAPH.num_edges,), (12,), (12,), (3,)))


WIDE, NARROW = (12, 2, 3), (12, 2)
DIFFERENTIABLE: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    **{
        f"sddmm {operation}": (lambda u, v, operation=operation: sddmm(GRAPH, u, v, operation), (WIDE, WIDE))
        for operation in ("dot", "add", "sub", "mul")
    },
    "edge_softmax": (lambda s: edge_softmax(GRAPH, s), ((40, 2),)),
    "gat": (lambda v, k, q: gat_attention(GRAPH, v, k, q, dropout=0.2, seed=1), (WIDE, NARROW, NARROW)),
    "gatv2": (lambda v, q, a: gatv2_attention(GRAPH, v, q, a), (WIDE, WIDE, (2, 3))),
    "dot": (lambda v, k, q: dot_attention(GRAPH, v, k, q), (WIDE, WIDE, WIDE)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str) -> None:
    op, shapes = DIFFERENTIABLE[name]
    assert torch.autograd.gradcheck(op, exact(*shapes))


def layer(x: Tensor, weight: Tensor, heads: Tensor) -> Tensor:
    hidden = spmm(GRAPH, x @ weight, reduce="mean", activation="relu", dropout=0.2, seed=3)
    attended = gat_attention(GRAPH, hidden.view(12, 2, 4), heads, heads)
    shares = edge_softmax(GRAPH, sddmm(GRAPH, attended, attended))
    return spmm(GRAPH, attended, shares, reduce="max")


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_torch_compile_gives_the_same() -> None:
    inputs = (leaf(12, 5), leaf(5, 8), leaf(12, 2))
    expected = layer(*inputs)
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*inputs)
    assert torch.allclose(found, expected, atol=1e-6)
    for mine, other in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        assert torch.allclose(mine, other, atol=1e-5)


def test_fake_tensors_get_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(12, 2, 5))
        assert spmm(GRAPH, x).shape == (12, 2, 5)


def test_second_derivatives_are_refused_plainly() -> None:
    x = leaf(12, 3)
    with pytest.raises(UserError, match="gearsail::spmm: its gradient can't be differentiated again"):
        torch.autograd.grad(spmm(GRAPH, x, activation="elu").sum(), x, create_graph=True)


X, H, W = torch.randn(12, 6), torch.randn(12, 2, 3), torch.randn(40)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "rows": (lambda: spmm(GRAPH, torch.randn(11, 6)), r"x has shape \[11, 6\], the adjacency \[12, 12\] with 40 edges"),
    "no features": (lambda: spmm(GRAPH, torch.randn(12)), r"x has shape \[12\]"),
    "weight length": (lambda: spmm(GRAPH, X, torch.randn(39)), r"weight has shape \[39\].*40 edges"),
    "weight width": (lambda: spmm(GRAPH, X, torch.randn(40, 4)), r"weight has shape \[40, 4\], x \[12, 6\].*\[40\] or \[40, 6\]"),
    "weight dtype": (lambda: spmm(GRAPH, X, W.double()), "weight is float64, the features are float32"),
    "dtype": (lambda: spmm(GRAPH, X.half()), "x is float16: float32, float64, bfloat16"),
    "integers": (lambda: spmm(GRAPH, torch.ones(12, 6, dtype=torch.int64)), "x is int64"),
    "reduce": (lambda: spmm(GRAPH, X, reduce="maximum"), "reduce is 'maximum': did you mean 'max'"),
    "activation": (lambda: spmm(GRAPH, X, activation="Relu"), "activation is 'Relu'.*allowed: elu, identity, leaky_relu, relu"),
    "dropout": (lambda: spmm(GRAPH, X, dropout=1.0), r"dropout is 1.0: a probability in \[0, 1\)"),
    "bias": (lambda: spmm(GRAPH, X, bias=torch.randn(5)), r"bias has shape \[5\], x \[12, 6\]: bias needs shape \[6\]"),
    "row scale": (lambda: spmm(GRAPH, X, row_scale=torch.randn(6)), r"row_scale has shape \[6\].*\[12\]"),
    "scale dtype": (lambda: spmm(GRAPH, X, col_scale=torch.randn(12).double()), "col_scale is float64"),
    "device": (lambda: spmm(GRAPH, X.to("meta")), "x is on meta, the adjacency on cpu"),
    "sddmm shapes": (lambda: sddmm(GRAPH, X, torch.randn(12, 5)), r"u has shape \[12, 6\], v \[12, 5\]"),
    "sddmm operation": (lambda: sddmm(GRAPH, X, X, "div"), "operation is 'div'"),
    "logits": (lambda: edge_softmax(GRAPH, X), r"logits has shape \[12, 6\].*40 rows"),
    "norm": (lambda: edge_softmax(GRAPH, torch.randn(40, 1), "source"), "norm_by is 'source'"),
    "value": (lambda: gat_attention(GRAPH, X, X, X), r"value has shape \[12, 6\]: \[12, heads, channels\]"),
    "key": (lambda: gat_attention(GRAPH, H, X, X), r"key has shape \[12, 6\], value \[12, 2, 3\]: key needs shape \[12, 2\]"),
    "vector": (lambda: gatv2_attention(GRAPH, H, H, X), r"vector has shape \[12, 6\].*\[2, 3\]"),
    "query dtype": (lambda: dot_attention(GRAPH, H, H, H.double()), "query is float64"),
    "attention dropout": (lambda: gat_attention(GRAPH, H, X[:, :2], X[:, :2], dropout=-0.1), "dropout is -0.1"),
    "sparse": (lambda: sparse_linear(SparseFeatures.from_dense(X), W.view(20, 2)), r"weight has shape \[20, 2\], the features \[12, 6\]"),
    "sparse values": (lambda: SparseFeatures.from_csr(W, W[:1], W, 3), r"values has shape \[40\], indices \[1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_ids_out_of_range_never_reach_a_kernel() -> None:
    with pytest.raises(DataError, match="src holds ids from 0 to 12, allowed are 0 … 11"):
        Adjacency.from_edges(torch.tensor([0, 12]), torch.tensor([0, 1]), 12, 12)
    with pytest.raises(DataError, match="dst holds ids from -1"):
        Adjacency.from_edges(torch.tensor([0, 1]), torch.tensor([0, -1]), 12, 12)
    with pytest.raises(DataError, match="indices holds ids"):
        Adjacency.from_csr(torch.tensor([0, 1]), torch.tensor([7]), 5)
    with pytest.raises(DataError, match="indptr"):
        Adjacency.from_csr(torch.tensor([0, 3]), torch.tensor([1]), 5)
    with pytest.raises(UserError, match="int32"):
        Adjacency.from_csr(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1]), 5)


def test_without_a_compiler_torch_runs_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("spmm", "sddmm", "edge_softmax", "attention", "gat"):
        monkeypatch.setattr(sys.modules[f"runner.kernels.ops.{module}"], "has_kernels", lambda _device: False)
    for name in WEIRD:
        graph = adjacency(WEIRD[name])
        x = leaf(graph.num_src, 2, 3)
        weight = torch.rand(graph.num_edges, 2)
        y = spmm(graph, x, weight, reduce="max", activation="relu", dropout=0.2, seed=1)
        assert torch.allclose(
            y, reference.spmm(graph, x, weight, "max", None, reference.Epilogue(None, None, "relu", 0, 0.2, 1))
        )
        assert sddmm(graph, x, x).shape == (graph.num_edges, 2)
        assert edge_softmax(graph, weight).shape == weight.shape
        assert gat_attention(graph, x, x.sum(-1), x.sum(-1), dropout=0.1).shape == x.shape
        torch.autograd.grad(y.sum(), x)
