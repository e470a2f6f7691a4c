"""DGL's own SpMM as a candidate beside the runner's kernels, so that a strategy is never forced off it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from runner.gnn.dgl_compat import import_dgl
from runner.kernels.formats import Format, Kernel, Part, num_bytes_of


def csr_dgl(part: Part) -> Format:
    """CSR rows, DGL's product; without weights where all are 1, which is DGL's fast path."""
    return Format("csr_dgl", part.work(), partial(_csr_dgl, part))


def _csr_dgl(part: Part) -> Kernel:
    dgl, adjacency = import_dgl(), part.adjacency
    assert adjacency.num_src == adjacency.num_dst
    dtype = adjacency.indices.dtype
    edge_ids = torch.arange(adjacency.num_edges, dtype=dtype)  # left out, DGL fails on weighted products of width 1
    graph = dgl.graph(("csc", (adjacency.indptr.to(dtype), adjacency.indices, edge_ids)), num_nodes=adjacency.num_dst)
    weight = part.values if part.is_weighted else None

    def run(x: Tensor) -> Tensor:
        product: Tensor = (
            dgl.ops.copy_u_sum(graph, x) if weight is None else dgl.ops.u_mul_e_sum(graph, x, weight.unsqueeze(1))
        )
        return product

    return Kernel("csr_dgl", run, num_bytes_of(adjacency.indptr, adjacency.indices, edge_ids, part.values))
