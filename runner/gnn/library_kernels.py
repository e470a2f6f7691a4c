"""DGL's own SpMM as a candidate beside the runner's kernels, so that a strategy is never forced off it."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.gnn.dgl_compat import import_dgl
from runner.kernels.density.formats import Kernel, Part


def csr_dgl(part: Part) -> Kernel:
    """CSR rows, DGL's product; without weights where all are 1, which is DGL's fast path."""
    dgl, adjacency = import_dgl(), part.adjacency
    assert adjacency.num_src == adjacency.num_dst
    empty = torch.empty(0, dtype=torch.int64)
    graph = dgl.graph(("csc", (adjacency.indptr, adjacency.indices, empty)), num_nodes=adjacency.num_dst)
    weight = None if bool((part.values == 1).all()) else part.values

    def run(x: Tensor) -> Tensor:
        product: Tensor = (
            dgl.ops.copy_u_sum(graph, x) if weight is None else dgl.ops.u_mul_e_sum(graph, x, weight.unsqueeze(1))
        )
        return product

    return Kernel("csr_dgl", run, 0)
