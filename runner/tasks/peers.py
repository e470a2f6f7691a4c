"""PyG's modules beside ours in the tables: built where they can take part, held to DGL's output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from runner.errors import VerificationError
from runner.gnn.pyg_peers import PygNet, reason_against
from runner.kernels.verify import evaluation, relative_difference
from runner.schema import Config
from runner.tasks.full_graph import FullGraphExperiment

Peer = tuple[nn.Module, Callable[[Tensor], Tensor]]
_TOLERANCE = 1e-4
_TAKES_MATRIX = {"pyg": True, "pyg_compiled": False}


def peers_of(experiment: FullGraphExperiment, config: Config, say: Callable[[str], None]) -> dict[str, Peer]:
    """Return PyG's modules, and how each is called; what is left out is said.

    Raises:
        VerificationError: where one differs from DGL's output.
    """
    found: dict[str, Peer] = {}
    for name in config.task.peers:
        is_sparse = _TAKES_MATRIX[name]
        reason = reason_against(config.model, experiment.adjacency, experiment.data.num_features, is_sparse)
        if reason is not None:
            say(f"{config.dataset.name}, {config.model.name}: {name} is left out: {reason}")
            continue
        module = PygNet(experiment.module, config.model, experiment.adjacency, is_sparse)
        torch._dynamo.reset()  # each row compiles anew; what the last one left counts against a limit of recompilations
        call: Callable[[Tensor], Tensor] = torch.compile(module, dynamic=False) if name == "pyg_compiled" else module
        expected = evaluation(experiment.module, partial(experiment.module, experiment.graph, experiment.features))
        difference = relative_difference(expected, evaluation(module, partial(module, experiment.features)))
        if difference > _TOLERANCE:
            raise VerificationError(
                f"{name} differs from DGL on {config.dataset.name}, {config.model.name} by {difference:.1e}"
            )
        found[name] = (module, call)
    return found
