"""A generated graph with communities, class-correlated features and a skewed degree.

Each community belongs to one class; a share of the edges falls inside communities; expected degrees follow a power law.
Node numbers carry no information: communities are scattered over them, as in a graph from the wild. The same config
gives the same graph, bit for bit.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from runner.gnn.data.graph_data import RawGraph
from runner.schema import DatasetConfig

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MAX_ROUNDS = 64  # a graph close to complete runs out of free pairs
_MAX_COMPLETE = 2000  # nodes; up to here all pairs can be listed, beyond, a graph that dense is left a few edges short


def generate(config: DatasetConfig) -> RawGraph:
    """Generate the graph, or with ``num_graphs`` above 1 a set of graphs, that ``config`` describes."""
    rng = np.random.default_rng(config.seed)
    is_set = config.num_graphs > 1
    community = _assign(
        rng, config.num_nodes, config.num_graphs if is_set else config.num_communities, scatter=not is_set
    )
    class_of_community = rng.permutation(np.arange(community.max() + 1) % config.num_classes)
    node_class = class_of_community[community]
    weight = (1 - rng.random(config.num_nodes)) ** (-1 / (config.degree_exponent - 1))
    pairs = _draw_pairs(rng, community, weight, config.mean_degree, 1.0 if is_set else config.intra_fraction)
    means = rng.standard_normal((config.num_classes, config.num_features))
    features = config.feature_signal * means[node_class] + rng.standard_normal((config.num_nodes, config.num_features))
    both = np.concatenate([pairs, pairs[:, ::-1]])
    what = "graphs" if is_set else "communities"
    raw = RawGraph(
        name="planted",
        src=torch.from_numpy(both[:, 0].copy()),
        dst=torch.from_numpy(both[:, 1].copy()),
        num_nodes=config.num_nodes,
        features=torch.from_numpy(features.astype(np.float32)),
        notes=(
            f"generated {config.num_nodes} nodes in {community.max() + 1} {what}, {len(both)} directed edges, seed {config.seed}",
        ),
    )
    if not is_set:
        return dataclasses.replace(raw, labels=torch.from_numpy(node_class))
    offsets = torch.from_numpy(np.searchsorted(community, np.arange(config.num_graphs + 1)))
    return dataclasses.replace(raw, graph_offsets=offsets, graph_labels=torch.from_numpy(class_of_community))


def _assign(rng: np.random.Generator, num_nodes: int, num_communities: int, scatter: bool) -> Ints:
    """Give every community two nodes at least where there are enough, and the rest at random."""
    sure = np.repeat(np.arange(num_communities), min(2, num_nodes // num_communities))
    rest = rng.integers(0, num_communities, num_nodes - len(sure))
    community = np.concatenate([sure, rest])
    return rng.permutation(community) if scatter else np.sort(community)


def _draw_pairs(
    rng: np.random.Generator, community: Ints, weight: Floats, mean_degree: float, intra_fraction: float
) -> Ints:
    """Draw distinct undirected pairs (u < v), ends in proportion to ``weight``, until the mean degree is met."""
    num_nodes = len(community)
    wanted = min(round(num_nodes * mean_degree / 2), num_nodes * (num_nodes - 1) // 2)
    order = np.argsort(community, kind="stable")
    cumulative = np.concatenate([[0.0], np.cumsum(weight[order])])
    bounds = np.searchsorted(community[order], np.arange(community.max() + 2))
    codes = np.empty(0, np.int64)
    for _ in range(_MAX_ROUNDS):
        missing = wanted - len(codes)
        if missing <= 0:
            break
        first = _pick(rng, cumulative, 0.0, cumulative[-1], missing)
        home = community[order[first]]
        inside = rng.random(missing) < intra_fraction
        low = np.where(inside, cumulative[bounds[home]], 0.0)
        high = np.where(inside, cumulative[bounds[home + 1]], cumulative[-1])
        second = _pick(rng, cumulative, low, high, missing)
        u, v = order[first], order[second]
        fresh = (np.minimum(u, v) * num_nodes + np.maximum(u, v))[u != v]
        codes = np.concatenate([codes, np.setdiff1d(fresh, codes)])
    if len(codes) < wanted and num_nodes <= _MAX_COMPLETE and intra_fraction < 1:
        codes = np.concatenate([codes, _draw_rest(rng, codes, num_nodes, wanted - len(codes))])
    return np.stack([codes // num_nodes, codes % num_nodes], axis=1)


def _draw_rest(rng: np.random.Generator, taken: Ints, num_nodes: int, count: int) -> Ints:
    """Draw from the pairs that are still free, all alike: in a small, nearly complete graph the weighted draws don't find them."""
    u, v = np.triu_indices(num_nodes, k=1)
    return rng.choice(np.setdiff1d(u * num_nodes + v, taken), count, replace=False)


def _pick(rng: np.random.Generator, cumulative: Floats, low: Floats | float, high: Floats | float, count: int) -> Ints:
    """Draw positions between two points of a cumulative weight."""
    drawn = low + rng.random(count) * (high - low)
    return np.clip(np.searchsorted(cumulative, drawn, side="right") - 1, 0, len(cumulative) - 2)
