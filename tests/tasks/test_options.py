"""Every option that is read makes another run: an option that does nothing is a defect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import compose

from runner import experiment
from runner.results import read_metrics

SMALL = ("dataset.num_nodes=300", "dataset.num_communities=8", "dataset.num_features=8")

CHANGES = """
train.seed=1
train.lr=0.02
train.weight_decay=0.1
train.optimizer=sgd
train.optimizer=adamw train.weight_decay=0.1
train.schedule=cosine
train.schedule=step train.schedule_every=1
train.schedule=step train.schedule_every=1 train.schedule_factor=0.1
model.hidden=8
model.num_layers=3
model.dropout=0.1
model.input_dropout=0.3
model.activation=tanh
model.norm=layer
model.norm=batch
model.bias=false
model.num_layers=3 model.residual=true
model=sage
model=sage model.aggregator=pool
model=gin
model=gin model.mlp_layers=3
model=gin model.learn_eps=true
model=gat
model=gat model.heads=2
model=gat model.attention_dropout=0
model=gat model.out_heads=2
model=gatv2
model=sgc
model=sgc model.num_hops=4
model=appnp
model=appnp model.alpha=0.5
model=appnp model.num_hops=3
dataset.seed=1
dataset.num_classes=4
dataset.mean_degree=20
dataset.intra_fraction=0.1
dataset.degree_exponent=5
dataset.feature_signal=2
dataset.split_seed=1
dataset.train_fraction=0.3
dataset.self_loops=remove
dataset.normalize=standard
dataset.normalize=row
dataset.features=degree
dataset.features=random:9
dataset.features=random:9 dataset.seed=1
dataset.labels=degree:3
train=sampled
train=sampled train.fanouts=[1,1]
train=sampled train.fanouts=[2,1]
train=sampled train.batch_size=32
train=sampled model=sage
"""


@pytest.mark.parametrize("options", [tuple(line.split()) for line in CHANGES.split("\n") if line], ids=" ".join)
def test_every_option_changes_the_curve(
    run_experiment: Callable[..., dict[str, Any]], tmp_path: Path, options: tuple[str, ...], seen_curves: dict[Any, Any]
) -> None:
    """An option that is read makes another run: no two of these may have the same losses."""
    run_experiment(*SMALL, *options, "train.epochs=3")
    curve = tuple(entry["loss"] for entry in read_metrics(tmp_path / "run"))
    assert seen_curves.setdefault(curve, options) == options, "the same curve as other options gave"


@pytest.fixture(scope="module")
def seen_curves(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Curves by their losses, the default's among them."""
    config = compose(*SMALL, "train.epochs=3")
    folder = tmp_path_factory.mktemp("default")
    experiment.run(config, folder, overrides=[], choices={})
    return {tuple(entry["loss"] for entry in read_metrics(folder)): ("default",)}
