"""The reference itself: against DGL on every message and reducer, and by finite differences."""

from __future__ import annotations

import pytest
import torch
from graphs import WEIRD, adjacency
from torch import Tensor

from runner.gnn.dgl_compat import import_dgl
from runner.kernels import reference

GRAPHS = [name for name in WEIRD if name not in ("no edges", "one node, no edge")]


def message(name: str, operation: str, u: Tensor, e: Tensor) -> Tensor:
    graph = adjacency(WEIRD[name])
    lhs = reference.gather(graph, u, "u")
    return reference.edge_apply(operation, lhs, None if operation == "copy" else reference.gather(graph, e, "e"))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("operation", ["copy", "add", "sub", "mul", "div"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_equals_dgl(name: str, operation: str, reduce: str) -> None:
    dgl = import_dgl()
    src, dst, num_nodes = WEIRD[name]
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    u = torch.randn(num_nodes, 3, dtype=torch.float64, requires_grad=True)
    e = (torch.rand(len(src), 1, dtype=torch.float64) + 0.5).requires_grad_(True)
    ours = reference.aggregate(adjacency(WEIRD[name]), message(name, operation, u, e), reduce)
    ours_grad = torch.autograd.grad(ours.sin().sum(), [u] if operation == "copy" else [u, e])
    with graph.local_scope():
        graph.ndata["h"], graph.edata["w"] = u, e
        fn = dgl.function
        function = fn.copy_u("h", "m") if operation == "copy" else getattr(fn, f"u_{operation}_e")("h", "w", "m")
        graph.update_all(function, getattr(fn, reduce)("m", "o"))
        theirs = graph.ndata["o"]
    theirs_grad = torch.autograd.grad(theirs.sin().sum(), [u] if operation == "copy" else [u, e])
    assert torch.allclose(ours, theirs, atol=1e-12)
    for mine, other in zip(ours_grad, theirs_grad, strict=True):
        assert torch.allclose(mine, other, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_edge_softmax_equals_dgl(name: str) -> None:
    dgl = import_dgl()
    src, dst, num_nodes = WEIRD[name]
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    logits = torch.randn(len(src), 2, dtype=torch.float64, requires_grad=True)
    for norm_by in ("dst", "src"):
        ours = reference.edge_softmax(adjacency(WEIRD[name]), logits, norm_by)
        theirs = dgl.ops.edge_softmax(graph, logits, norm_by=norm_by)
        assert torch.allclose(ours, theirs, atol=1e-12)
        for mine, other in zip(
            torch.autograd.grad(ours.sin().sum(), logits), torch.autograd.grad(theirs.sin().sum(), logits), strict=True
        ):
            assert torch.allclose(mine, other, atol=1e-12)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_gradients_by_finite_differences(reduce: str) -> None:
    graph = adjacency(WEIRD["random directed"])
    values = torch.randn(graph.num_edges, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference.aggregate(graph, x, reduce), values)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_nothing_to_reduce_is_zero(reduce: str) -> None:
    graph = adjacency(WEIRD["no edges"])
    assert reference.aggregate(graph, torch.empty(0, 3), reduce).tolist() == [[0.0] * 3] * 5
