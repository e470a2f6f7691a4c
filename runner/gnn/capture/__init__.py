"""DGL module → op graph: the module's forward runs once, for real, while every torch call and every message passing is recorded.

What can't be recorded raises a CaptureError that names it. A tensor that depends on the features and was made out of sight still
carries its gradient history, or passes one of DGL's doors, and is refused by that; what slips through even so is caught by
:mod:`runner.kernels.verify`, which compares on other weights, in both modes and over consecutive steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import CaptureError
from runner.gnn.capture.guards import closed_doors, recording_graph, untouched
from runner.gnn.capture.recorder import Recorder
from runner.kernels.adjacency import Adjacency
from runner.kernels.opgraph import OpGraph

__all__ = ["capture"]


def capture(module: nn.Module, graph: Any, features: Tensor, adjacency: Adjacency | Sequence[Adjacency]) -> OpGraph:
    """Record ``module(graph, features)`` in the module's present mode (train or eval).

    The module's parameters, buffers and attributes, the graph's data and the global random state are left as they were.

    Args:
        module: any module made of torch calls, ``update_all`` / ``apply_edges`` with DGL's built-in functions, and ``edge_softmax``.
        graph: a DGLGraph with one type of nodes.
        features: float [N, F]; the values matter only to code that fails on some of them.
        adjacency: the same graph, edge ids as in ``graph``; of one with several relations, each, in the order of its canonical edge types.

    Raises:
        CaptureError: for what can't be recorded, with its place in the code.
    """
    relations = (adjacency,) if isinstance(adjacency, Adjacency) else tuple(adjacency)
    if graph.is_block or len(graph.ntypes) != 1:
        given = "a sampled block" if graph.is_block else f"one with {len(graph.ntypes)}"
        raise CaptureError(f"only a graph with one type of nodes can be captured, not {given}")
    if len(relations) != len(graph.canonical_etypes):
        raise CaptureError(
            f"the graph has {len(graph.canonical_etypes)} relations, an adjacency was given for {len(relations)} of them"
        )
    recorder = Recorder(module, graph, features, relations)
    twin = recording_graph(graph, recorder)
    with (
        untouched(module, recorder),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        closed_doors(recorder),
    ):
        with recorder:
            output = module(twin, recorder.features)
        return recorder.finish(output)
