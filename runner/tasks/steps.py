"""Whole training steps, as tables time them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runner.gnn.train import train_step
from runner.tasks.full_graph import FullGraphExperiment


def step_of(
    forward: Callable[[Tensor], Tensor],
    experiment: FullGraphExperiment,
    place: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
) -> Callable[[], Any]:
    """Return a training step: forward, loss, backward, update.

    Args:
        forward: features -> logits, in an order of nodes.
        experiment: the graph's features, labels and split.
        place: brings rows into that order.
        optimizer: of the parameters that the forward reads.
    """
    features, labels = place(experiment.features), place(experiment.labels)
    is_trained = torch.zeros(experiment.data.num_nodes, dtype=torch.bool)
    is_trained[experiment.data.split.train] = True
    rows = place(is_trained).nonzero().flatten()
    wanted = labels[rows]

    def step() -> None:
        train_step((forward(features)[rows], wanted), optimizer)

    return step
