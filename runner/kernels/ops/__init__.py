"""The ops that strategies stand on: torch ops of our own, with kernels for CPU and CUDA, differentiable, traced by ``torch.compile``."""

from runner.kernels.ops.attention import dot_attention, gatv2_attention
from runner.kernels.ops.edge_softmax import edge_softmax
from runner.kernels.ops.gat import gat_attention
from runner.kernels.ops.sddmm import sddmm
from runner.kernels.ops.sparse_linear import SparseFeatures, sparse_linear
from runner.kernels.ops.spmm import spmm

__all__ = [
    "SparseFeatures",
    "dot_attention",
    "edge_softmax",
    "gat_attention",
    "gatv2_attention",
    "sddmm",
    "sparse_linear",
    "spmm",
]
