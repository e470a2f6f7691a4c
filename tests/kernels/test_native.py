"""The strategy native: every kind of message passing on our kernels, equal to DGL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import WEIRD, adjacency
from torch import Tensor, nn

from runner.gnn.capture import capture
from runner.gnn.dgl_compat import import_dgl
from runner.kernels.lower import Executable
from runner.kernels.native import kernel_name, lower
from runner.kernels.opgraph import Call

dgl = import_dgl()
fn = dgl.function


class Passing(nn.Module):
    """One round of message passing with DGL's functions."""

    def __init__(self, message: Any, reduce: Any, weight: tuple[int, ...] = (), heads: bool = False) -> None:
        super().__init__()
        self.lin, self.message, self.reduce, self.weight, self.heads = nn.Linear(6, 6), message, reduce, weight, heads
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            hidden = self.lin(x)
            graph.ndata["h"] = hidden.view(-1, 2, 3) if self.heads else hidden
            graph.ndata["k"] = graph.ndata["h"].sin()
            if self.weight:
                graph.apply_edges(fn.u_dot_v("h", "k", "w"))
                graph.edata["w"] = (2 + (graph.edata["w"] * self.scale).tanh()).expand(-1, *self.weight).contiguous()
            graph.update_all(self.message, self.reduce)
            return graph.ndata["o"].flatten(1)


CASES = {
    "copy, sum": (Passing(fn.copy_u("h", "m"), fn.sum("m", "o")), "spmm"),
    "copy, mean": (Passing(fn.copy_u("h", "m"), fn.mean("m", "o")), "spmm"),
    "copy, max": (Passing(fn.copy_u("h", "m"), fn.max("m", "o")), "spmm"),
    "weighted": (Passing(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"), (1,)), "spmm"),
    "weighted the other way": (Passing(fn.e_mul_u("w", "h", "m"), fn.sum("m", "o"), (1,)), "spmm"),
    "per head": (Passing(fn.u_mul_e("h", "w", "m"), fn.mean("m", "o"), (2, 1), heads=True), "spmm"),
    "per feature": (Passing(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"), (6,)), "spmm"),
    "plus an edge value": (Passing(fn.u_add_e("h", "w", "m"), fn.max("m", "o"), (6,)), "a message per edge"),
    "edge values": (Passing(fn.copy_e("w", "m"), fn.sum("m", "o"), (6,)), "a message per edge"),
    "both ends": (Passing(fn.u_sub_v("h", "k", "m"), fn.min("m", "o")), "a message per edge"),
    "both ends, turned": (Passing(fn.v_sub_u("h", "k", "m"), fn.mean("m", "o")), "a message per edge"),
    "both ends, product": (Passing(fn.u_mul_v("h", "k", "m"), fn.sum("m", "o")), "a message per edge"),
    "quotient": (Passing(fn.u_div_e("h", "w", "m"), fn.sum("m", "o"), (1,)), "a message per edge"),
    "dot": (Passing(fn.u_dot_v("h", "k", "m"), fn.sum("m", "o")), "a message per edge"),
}
GRAPHS = ["random directed", "random symmetric", "isolated nodes", "duplicates and loops", "hub"]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("case", CASES)
def test_equals_dgl(name: str, case: str) -> None:
    torch.manual_seed(0)
    module, kernel = CASES[case]
    src, dst, num_nodes = WEIRD[name]
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    x = torch.randn(num_nodes, 6)
    captured = capture(module, graph, x, adjacency(WEIRD[name]))
    passing = [op for op in captured.ops if not isinstance(op, Call)]
    assert kernel_name(captured, passing[-1]).startswith(kernel)
    expected, found = module(graph, x), Executable(captured, lower)(x)
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4)
    parameters = [parameter for parameter in module.parameters() if parameter is not module.scale]
    for mine, other in zip(
        torch.autograd.grad(found.sin().sum(), parameters),
        torch.autograd.grad(expected.sin().sum(), parameters),
        strict=True,
    ):
        assert torch.allclose(mine, other, atol=1e-4, rtol=1e-3)
