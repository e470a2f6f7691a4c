"""How other libraries compute our ops on the same graph: DGL, torch's sparse CSR, scipy, and PyG where it is installed.

Each function returns, by library, a call that does the work once. What a library can prepare beforehand (its graph, a matrix with the
weights in it) is prepared outside the call.

Legend: N destinations, M sources, E edges, F features, H heads, C channels a head.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from scipy import sparse
from torch import Tensor
from torch.nn import functional as F

from runner.gnn.dgl_compat import import_dgl
from runner.kernels.adjacency import Adjacency

Works = dict[str, Callable[[], Any]]
_SLOPE = 0.2  # of GAT's LeakyReLU


class Peers:
    """The libraries on one graph.

    Args:
        adjacency: on the device to measure.
        max_edge_bytes: PyG is left out where a value per edge and feature would take more.
    """

    def __init__(self, adjacency: Adjacency, max_edge_bytes: int = 2**28) -> None:
        self._adjacency, self._max_edge_bytes = adjacency, max_edge_bytes
        self._src, self._dst = adjacency.src_dst
        self._on_cpu = adjacency.device.type == "cpu"

    def spmm(self, x: Tensor, weight: Tensor | None, reduce: str) -> Works:
        """Sum, mean, max or min with no weight, one an edge [E], or one an edge and head [E, H] for x [N, H, C]."""
        works: Works = {}
        is_scalar = weight is None or weight.dim() == 1
        if self._has_dgl():
            works["dgl"] = self._dgl_spmm(x, weight, reduce)
        if is_scalar and x.dtype != torch.bfloat16:
            matrix = self._matrix(x.dtype, weight)
            if reduce == "sum":
                works["torch"] = lambda: matrix @ x
            elif self._on_cpu and reduce in ("max", "min"):
                works["torch"] = lambda: torch.sparse.mm(matrix, x, f"a{reduce}")
        if is_scalar and reduce == "sum" and self._on_cpu and x.dtype != torch.bfloat16:
            product = sparse.csr_array(
                (matrix.values().numpy(), self._adjacency.indices.numpy(), self._adjacency.indptr.numpy()),
                shape=(self._adjacency.num_dst, self._adjacency.num_src),
            )
            works["scipy"] = lambda: torch.from_numpy(product @ x.numpy())
        if self._has_pyg(x):
            works["pyg"] = lambda: self._scatter(self._weighted(x, weight), reduce)
        return works

    def sddmm_dot(self, u: Tensor, v: Tensor) -> Works:
        """Dot products [E, H] of u, v [N, H, C]."""
        works: Works = {}
        if self._has_dgl():
            works["dgl"] = lambda: import_dgl().ops.u_dot_v(self._dgl, u, v).squeeze(-1)
        if self._has_pyg(u):
            works["pyg"] = lambda: (u[self._src] * v[self._dst]).sum(-1)
        return works

    def edge_softmax(self, logits: Tensor) -> Works:
        """Softmax [E, H] over each destination's edges."""
        works: Works = {}
        if self._has_dgl():
            works["dgl"] = lambda: import_dgl().ops.edge_softmax(self._dgl, logits)
        if self._has_pyg(logits):
            works["pyg"] = lambda: self._pyg_softmax(logits)
        return works

    def attention(self, score: str, operands: tuple[Tensor, ...]) -> dict[str, Callable[[], Tensor]]:
        """Differentiable attention [N, H, C]; operands as in :mod:`runner.kernels.ops.attention`, with the scale of dot in them."""
        works: dict[str, Callable[[], Tensor]] = {}
        if self._has_dgl():
            works["dgl"] = lambda: self._dgl_attention(score, operands)
        if self._has_pyg(operands[0]):
            works["pyg"] = lambda: self._pyg_attention(score, operands)
        return works

    @cached_property
    def _dgl(self) -> Any:
        dtype = self._adjacency.indices.dtype
        graph = import_dgl().graph((self._src.to(dtype), self._dst.to(dtype)), num_nodes=self._adjacency.num_dst)
        return graph.formats(["coo", "csr", "csc"]).to(self._adjacency.device)

    def _has_dgl(self) -> bool:
        return self._on_cpu and self._adjacency.num_src == self._adjacency.num_dst and has_dgl()

    def _has_pyg(self, x: Tensor) -> bool:
        num_bytes = self._adjacency.num_edges * x.shape[1:].numel() * x.element_size()
        return has_pyg() and num_bytes <= self._max_edge_bytes

    def _matrix(self, dtype: torch.dtype, weight: Tensor | None) -> Tensor:
        adjacency = self._adjacency
        ones = torch.ones(adjacency.num_edges, dtype=dtype, device=adjacency.device)
        values = ones if weight is None else weight[adjacency.edge_ids]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support")
            return torch.sparse_csr_tensor(
                adjacency.indptr.to(adjacency.indices.dtype),
                adjacency.indices,
                values,
                (adjacency.num_dst, adjacency.num_src),
                check_invariants=False,
            )

    def _dgl_spmm(self, x: Tensor, weight: Tensor | None, reduce: str) -> Callable[[], Tensor]:
        ops, graph = import_dgl().ops, self._dgl
        if weight is None:
            return lambda: getattr(ops, f"copy_u_{reduce}")(graph, x)
        edges = weight.unsqueeze(-1)
        return lambda: getattr(ops, f"u_mul_e_{reduce}")(graph, x, edges)

    def _dgl_attention(self, score: str, operands: tuple[Tensor, ...]) -> Tensor:
        ops, graph = import_dgl().ops, self._dgl
        if score == "gat":
            value, key, query = operands
            logits = F.leaky_relu(ops.u_add_v(graph, key.unsqueeze(-1), query.unsqueeze(-1)), _SLOPE)
        elif score == "gatv2":
            value, query, vector = operands
            hidden = F.leaky_relu(ops.u_add_v(graph, value, query), _SLOPE)
            logits = (hidden * vector).sum(-1, keepdim=True)
        else:
            value, key, query = operands
            logits = ops.u_dot_v(graph, key, query)
        shares = ops.edge_softmax(graph, logits)
        result: Tensor = ops.u_mul_e_sum(graph, value, shares)
        return result

    def _pyg_attention(self, score: str, operands: tuple[Tensor, ...]) -> Tensor:
        src, dst = self._src, self._dst
        if score == "gat":
            value, key, query = operands
            logits = F.leaky_relu(key[src] + query[dst], _SLOPE)
        elif score == "gatv2":
            value, query, vector = operands
            logits = (F.leaky_relu(value[src] + query[dst], _SLOPE) * vector).sum(-1)
        else:
            value, key, query = operands
            logits = (key[src] * query[dst]).sum(-1)
        return self._scatter(value[src] * self._pyg_softmax(logits).unsqueeze(-1), "sum")

    def _pyg_softmax(self, logits: Tensor) -> Tensor:
        from torch_geometric.utils import softmax

        found: Tensor = softmax(logits, self._dst, num_nodes=self._adjacency.num_dst)
        return found

    def _weighted(self, x: Tensor, weight: Tensor | None) -> Tensor:
        messages = x[self._src]
        return messages if weight is None else messages * weight.unsqueeze(-1)

    def _scatter(self, messages: Tensor, reduce: str) -> Tensor:
        from torch_geometric.utils import scatter

        found: Tensor = scatter(messages, self._dst, dim=0, dim_size=self._adjacency.num_dst, reduce=reduce)
        return found


def has_dgl() -> bool:
    """Whether DGL is installed."""
    return importlib.util.find_spec("dgl") is not None


def has_pyg() -> bool:
    """Whether PyG is installed (extra ``bench``)."""
    return importlib.util.find_spec("torch_geometric") is not None
