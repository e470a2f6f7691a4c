"""The cases of ``+exp=kernels``: an op on a graph at a width, ours and the other libraries', on the same inputs.

Legend: N nodes, E edges, F features, H heads, C = F / H channels a head, s bytes an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from runner.gnn.data.graph_data import Features, RawGraph
from runner.gnn.kernel_peers import Peers
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
from runner.schema import KERNEL_HEADS

_INDEX_BYTES = 4
_SPARSE_SHAPE = (1000, 0.015)  # features, density: of graphs that bring none


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        op: its name.
        num_features: F, for ``edge_softmax`` the heads, for ``sparse_linear`` the features out.
        ours: does the work once on our kernels.
        peers: by library, the same work.
        floor_bytes: what must move at least: each input read once, each output written once.
        direction: forward, or forward+backward.
        tolerance: largest difference between libraries, of the largest entry.
    """

    op: str
    num_features: int
    ours: Callable[[], Any]
    peers: dict[str, Callable[[], Any]]
    floor_bytes: float
    direction: str = "forward"
    tolerance: float = field(default=1e-4)


class GraphCases:
    """The cases of one graph.

    Args:
        raw: the graph. Values per edge come in the order of its own list of edges, as models have them; but where an edge's weight never
            changes (``spmm_weighted``) everyone may lay it out beforehand; ``spmm_weighted_by_id`` is the same with ours left as it comes.
        device: where it is measured.
        dtype: of features and weights.
    """

    def __init__(self, raw: RawGraph, device: torch.device, dtype: torch.dtype) -> None:
        self.adjacency = Adjacency.from_edges(raw.src, raw.dst, raw.num_nodes, raw.num_nodes).to(device)
        self._in_order = Adjacency.from_csr(self.adjacency.indptr, self.adjacency.indices, raw.num_nodes)
        self.name, self._features, self._device, self._dtype = raw.name, raw.features, device, dtype
        self._size = torch.empty(0, dtype=dtype).element_size()
        self.peers = Peers(self.adjacency)
        self._generator = torch.Generator().manual_seed(0)

    def of(self, op: str, widths: list[int]) -> Iterator[Case]:
        """Yield the cases of an op."""
        match op.split("_", 1):
            case ["spmm", kind]:
                for width in widths:
                    yield self._spmm(op, kind, width)
            case ["sddmm", _]:
                for width in widths:
                    yield self._sddmm(op, width)
            case ["attention", score]:
                for width in widths:
                    yield self._attention(op, score, width)
            case ["edge", _]:
                yield self._edge_softmax(op)
            case _:
                for width in widths:
                    yield self._sparse_linear(op, width)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype).to(self._device)

    @property
    def _graph_bytes(self) -> float:
        return 8 * (self.adjacency.num_dst + 1) + _INDEX_BYTES * self.adjacency.num_edges

    def _spmm(self, op: str, kind: str, width: int) -> Case:
        num_nodes, num_edges = self.adjacency.num_dst, self.adjacency.num_edges
        is_per_head, is_fixed = kind == "per_head", kind == "weighted"
        x = self._random(*((num_nodes, KERNEL_HEADS, width // KERNEL_HEADS) if is_per_head else (num_nodes, width)))
        weight = (
            self._random(num_edges, KERNEL_HEADS)
            if is_per_head
            else self._random(num_edges)
            if "weighted" in kind
            else None
        )
        reduce = kind if kind in ("mean", "max", "min") else "sum"
        works = self.peers.spmm(x, weight, reduce)
        ours = partial(spmm, self.adjacency, x, weight, reduce=reduce)
        if is_fixed and weight is not None:
            ours = partial(spmm, self._in_order, x, weight[self.adjacency.edge_ids])
        num_bytes = self._graph_bytes + 2 * x.nbytes + (0 if weight is None else weight.nbytes)
        return Case(op, width, ours, works, num_bytes)

    def _sddmm(self, op: str, width: int) -> Case:
        u, v = (self._random(self.adjacency.num_dst, KERNEL_HEADS, width // KERNEL_HEADS) for _ in range(2))
        out_bytes = self.adjacency.num_edges * KERNEL_HEADS * self._size
        return Case(
            op,
            width,
            partial(sddmm, self.adjacency, u, v),
            self.peers.sddmm_dot(u, v),
            self._graph_bytes + 2 * u.nbytes + out_bytes,
        )

    def _edge_softmax(self, op: str) -> Case:
        logits = self._random(self.adjacency.num_edges, KERNEL_HEADS)
        works = self.peers.edge_softmax(logits)
        return Case(
            op,
            KERNEL_HEADS,
            partial(edge_softmax, self.adjacency, logits),
            works,
            self._graph_bytes + 2 * logits.nbytes,
        )

    def _attention(self, op: str, score: str, width: int) -> Case:
        num_nodes, channels = self.adjacency.num_dst, width // KERNEL_HEADS
        wide, narrow = (num_nodes, KERNEL_HEADS, channels), (num_nodes, KERNEL_HEADS)
        shapes = {"gat": (wide, narrow, narrow), "gatv2": (wide, wide, wide[1:]), "dot": (wide, wide, wide)}[score]
        operands = tuple(self._random(*shape).requires_grad_() for shape in shapes)
        functions: dict[str, Callable[..., Tensor]] = {
            "gat": gat_attention,
            "gatv2": gatv2_attention,
            "dot": partial(dot_attention, scale=1.0),
        }
        upstream = self._random(*wide)
        if score == "dot":
            operands = (operands[0], (operands[1].detach() / channels**0.5).requires_grad_(), operands[2])

        def there_and_back(attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
            out = attend()
            return (out, *torch.autograd.grad(out, operands, upstream))

        # forward: graph, operands, out; backward: the graph twice, operands, out, both gradients, and a number an edge and head, twice
        operand_bytes = sum(operand.nbytes for operand in operands)
        scores = 2 * self.adjacency.num_edges * KERNEL_HEADS * max(self._size, 4)
        return Case(
            op,
            width,
            partial(there_and_back, partial(functions[score], self.adjacency, *operands)),
            {name: partial(there_and_back, work) for name, work in self.peers.attention(score, operands).items()},
            3 * self._graph_bytes + 3 * operand_bytes + 3 * upstream.nbytes + scores,
            "forward+backward",
            1e-3,
        )

    @cached_property
    def _sparse(self) -> sparse.csr_array:
        return as_sparse(self._features, self.adjacency.num_dst)

    def _sparse_linear(self, op: str, width: int) -> Case:
        stored = self._sparse
        indptr, indices = (torch.from_numpy(part.astype(np.int64)) for part in (stored.indptr, stored.indices))
        values = torch.from_numpy(stored.data).to(self._dtype)
        features = SparseFeatures.from_csr(indptr, indices, values, stored.shape[1]).to(self._device)
        weight = self._random(stored.shape[1], width).requires_grad_()
        upstream = self._random(stored.shape[0], width)

        def there_and_back(multiply: Callable[[], Tensor]) -> tuple[Tensor, ...]:
            out = multiply()
            return (out, *torch.autograd.grad(out, weight, upstream))

        peers: dict[str, Callable[[], Any]] = {}
        if 4 * stored.shape[0] * stored.shape[1] <= 2**31:
            dense = torch.from_numpy(stored.toarray()).to(self._dtype).to(self._device)
            peers["dense"] = partial(there_and_back, lambda: dense @ weight)
        if self._device.type == "cpu" and self._dtype != torch.bfloat16:
            matrix = stored.astype(np.float64 if self._dtype == torch.float64 else np.float32)
            turned = matrix.T.tocsr()
            peers["scipy"] = lambda: (
                torch.from_numpy(matrix @ weight.detach().numpy()),
                torch.from_numpy(turned @ upstream.numpy()),
            )
        stored_bytes = stored.nnz * (_INDEX_BYTES + (0 if features.values is None else self._size))
        floor = 2 * stored_bytes + 2 * weight.nbytes + 2 * upstream.nbytes
        work = partial(there_and_back, lambda: sparse_linear(features, weight))
        return Case(op, width, work, peers, floor, "forward+backward")


def as_sparse(features: Features | None, num_rows: int) -> sparse.csr_array:
    """Return a graph's own features where they are sparse, else generated ones."""
    if isinstance(features, sparse.csr_array):
        return features
    num_features, density = _SPARSE_SHAPE
    rng = np.random.default_rng(0)
    made = sparse.random_array((num_rows, num_features), density=density, format="csr", dtype=np.float32, rng=rng)
    return sparse.csr_array(made)  # type: ignore[call-overload]
