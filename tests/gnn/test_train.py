"""Models, batches, metrics, the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.errors import ConfigError, UserError
from runner.gnn import models
from runner.gnn.batches import FullGraph, GraphBatches, SampledNodes, to_dgl
from runner.gnn.data.graph_data import GraphData, Split
from runner.gnn.data.load import load
from runner.gnn.metrics import check_metric, evaluate
from runner.gnn.models import build_model
from runner.gnn.train import FitResult, Trainer
from runner.schema import DatasetConfig, ModelConfig, TrainConfig

CPU = torch.device("cpu")
PLANTED = DatasetConfig(
    num_nodes=300, num_communities=10, num_classes=3, num_features=8, feature_signal=0.5, self_loops="add"
)
SET = DatasetConfig(
    task="graph", num_nodes=300, num_graphs=30, num_classes=2, num_features=8, mean_degree=4, feature_signal=0.5
)


@pytest.fixture(scope="module")
def planted() -> GraphData:
    return load(PLANTED)


@pytest.fixture(scope="module")
def graph_set() -> GraphData:
    return load(SET)


def trainer(data: GraphData, config: TrainConfig, seed: int = 0, model: str = "gcn") -> Trainer:
    torch.manual_seed(seed)
    module = build_model(ModelConfig(name=model), data.num_features, data.num_classes, "node")
    graph = to_dgl(data, CPU)
    source = FullGraph(lambda features: module(graph, features), data.dense_features(), data.labels, data.split)
    return Trainer(module, source, config, seed)


def losses(fit: FitResult) -> list[float]:
    return [record["loss"] for record in fit.history]


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp"])
def test_every_model_learns(planted: GraphData, name: str) -> None:
    fit = trainer(planted, TrainConfig(epochs=30), model=name).fit()
    assert losses(fit)[-1] < 0.8 * losses(fit)[0]
    assert fit.test_metric > 1.3 / planted.num_classes


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_depth_width_norm_and_residual_shape_the_module(name: str, norm: str) -> None:
    config = ModelConfig(name=name, num_layers=4, hidden=6, heads=3, out_heads=2, norm=norm, residual=True)
    module = build_model(config, 8, 5, "node")
    assert isinstance(module, models.StackedNet)
    assert len(module.layers) == 4
    data = load(PLANTED)
    assert module(to_dgl(data, CPU), data.dense_features()).shape == (300, 5)


def test_equal_seeds_give_equal_bits_and_others_do_not(planted: GraphData) -> None:
    one, same, other = (trainer(planted, TrainConfig(epochs=5), seed).fit() for seed in (0, 0, 1))
    assert losses(one) == losses(same)
    assert losses(one) != losses(other)


def fit_like(fit: FitResult) -> list[dict[str, float]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in fit.history]


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(epochs=9),
        TrainConfig(epochs=9, schedule="step", schedule_every=2),
        TrainConfig(epochs=9, schedule="cosine", optimizer="adamw"),
        TrainConfig(epochs=9, optimizer="sgd", eval_every=3),
        TrainConfig(epochs=9, select="last"),
        TrainConfig(epochs=9, patience=2, select="loss"),
    ],
    ids=["plain", "step", "cosine", "sgd", "last", "patience"],
)
def test_a_resumed_run_has_the_same_curve(planted: GraphData, config: TrainConfig, tmp_path: Path) -> None:
    whole = trainer(planted, config).fit()
    first = trainer(planted, config)

    class KilledError(Exception):
        pass

    def on_epoch(record: dict[str, float]) -> None:
        if record["epoch"] == 3:
            torch.save(first.state(), tmp_path / "state.pt")
            raise KilledError

    with pytest.raises(KilledError):
        first.fit(on_epoch)
    torch.manual_seed(12345)
    second = trainer(planted, config)
    second.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed = second.fit()
    assert fit_like(resumed) == fit_like(whole)
    assert (resumed.test_metric, resumed.best_epoch) == (whole.test_metric, whole.best_epoch)


class Scripted:
    """A source whose validation follows a script, so that selection can be tested by hand."""

    def __init__(self, module: nn.Module, val_right: list[int]) -> None:
        self.module, self.script = module, iter(val_right)

    def train_batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.module(torch.ones(4, 2)), torch.tensor([0, 1, 0, 1])

    def evaluate(self, parts: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        right = next(self.script, 0)
        labels = torch.zeros(10, dtype=torch.int64)
        logits = torch.tensor([[1.0, 0.0]] * right + [[0.0, 1.0]] * (10 - right))
        return dict.fromkeys(parts, (logits, labels))


def test_patience_counts_epochs_without_a_better_validation() -> None:
    module = nn.Linear(2, 2)
    config = TrainConfig(epochs=50, patience=3)
    fit = Trainer(module, Scripted(module, [3, 5, 4, 4, 4, 4, 4]), config, 0).fit()
    assert fit.best_epoch == 1
    assert len(fit.history) == 5, "epochs 2, 3 and 4 were not better; the third ends it"


def test_select_last_keeps_the_last() -> None:
    module = nn.Linear(2, 2)
    assert Trainer(module, Scripted(module, [9, 1, 1]), TrainConfig(epochs=3, select="last"), 0).fit().best_epoch == 2


def test_the_selected_weights_are_the_ones_tested(planted: GraphData) -> None:
    config = TrainConfig(epochs=6, lr=0.5)
    run = trainer(planted, config)
    seen: list[dict[str, Tensor]] = []
    fit = run.fit(lambda _: seen.append({name: value.clone() for name, value in run.module.state_dict().items()}))
    best = seen[fit.best_epoch]
    assert all(torch.equal(value, best[name]) for name, value in run.module.state_dict().items())


def whole(module: nn.Module, graph: Any, data: GraphData) -> FullGraph:
    return FullGraph(lambda features: module(graph, features), data.dense_features(), data.labels, data.split)


def sampled(module: nn.Module, data: GraphData) -> SampledNodes:
    graph = to_dgl(data, CPU)
    return SampledNodes(module, graph, data, [3, 3], 50, whole(module, graph, data))


def test_sampled_blocks_with_all_neighbours_equal_the_full_graph(planted: GraphData) -> None:
    torch.manual_seed(0)
    data = dataclasses.replace(planted, edge_weight=torch.rand(planted.num_edges) + 0.1)
    module = build_model(ModelConfig(name="sage", edge_weight=True), data.num_features, data.num_classes, "node").eval()
    graph = to_dgl(data, CPU)
    everything = module(graph, data.dense_features())
    source = SampledNodes(module, graph, data, [-1, -1], 64, whole(module, graph, data))
    seen = 0
    order = data.split.train[torch.randperm(180, generator=torch.Generator().manual_seed(4))]
    for logits, labels in source.train_batches(4):
        rows = order[seen : seen + len(labels)]
        assert torch.equal(labels, data.labels[rows])
        assert torch.allclose(logits, everything[rows], atol=1e-5)
        seen += len(labels)
    assert seen == 180


def test_sampling_repeats_with_its_seed(planted: GraphData) -> None:
    torch.manual_seed(0)
    module = build_model(ModelConfig(name="sage", dropout=0.0), planted.num_features, planted.num_classes, "node")
    source = sampled(module, planted)
    runs = [[float(logits.sum().detach()) for logits, _ in source.train_batches(seed)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("name", ["gcn", "gin"])
@pytest.mark.parametrize("readout", ["sum", "mean", "max"])
def test_a_batch_of_graphs_equals_its_graphs_one_by_one(graph_set: GraphData, name: str, readout: str) -> None:
    torch.manual_seed(0)
    module = build_model(ModelConfig(name=name, readout=readout), 8, 2, "graph").eval()
    everyone = torch.arange(30)
    together = GraphBatches(module, graph_set, Split(train=everyone, val=everyone[:0], test=everyone), 30, CPU)
    alone = GraphBatches(module, graph_set, Split(train=everyone, val=everyone[:0], test=everyone), 1, CPU)
    (one,) = together.train_batches(3)
    singles = list(alone.train_batches(3))
    assert torch.allclose(one[0], torch.cat([logits for logits, _ in singles]), atol=1e-5)
    assert torch.equal(one[1], torch.cat([labels for _, labels in singles]))
    assert "val" not in together.evaluate(("val",))


def test_graph_classification_learns(graph_set: GraphData) -> None:
    torch.manual_seed(0)
    module = build_model(ModelConfig(name="gin", norm="batch"), 8, 2, "graph")
    fit = Trainer(module, GraphBatches(module, graph_set, graph_set.split, 8, CPU), TrainConfig(epochs=15), 0).fit()
    assert losses(fit)[-1] < losses(fit)[0]


def test_metrics_by_hand() -> None:
    logits, labels = torch.tensor([[2.0, 0], [0, 1], [1, 0], [3, 0]]), torch.tensor([0, 1, 1, 0])
    assert evaluate("accuracy", logits, labels) == 0.75
    assert evaluate("macro_f1", logits, labels) == pytest.approx((0.8 + 2 / 3) / 2)
    assert evaluate("roc_auc", logits, labels) == pytest.approx(1.0)
    assert evaluate("roc_auc", logits, torch.zeros(4, dtype=torch.int64)) != evaluate("accuracy", logits, labels)
    assert torch.tensor(evaluate("accuracy", logits[:0], labels[:0])).isnan()
    with pytest.raises(ConfigError, match="is for two classes, this graph has 3"):
        check_metric("roc_auc", 3)


class Mine(nn.Module):
    """A user's own module, found by import path."""

    def __init__(self, num_features: int, num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)
        self.width = width

    def forward(self, graph: object, features: Tensor) -> Tensor:
        out: Tensor = self.linear(features)
        return out


def test_a_custom_module_needs_its_package_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(name="custom", target=f"{__name__}:Mine", kwargs={"width": 9})
    monkeypatch.delenv(models.ALLOWED_PACKAGES, raising=False)
    with pytest.raises(ConfigError, match=rf"{models.ALLOWED_PACKAGES}={__name__.split('.', maxsplit=1)[0]}"):
        build_model(config, 3, 2, "node")
    monkeypatch.setenv(models.ALLOWED_PACKAGES, f"other, {__name__.split('.', maxsplit=1)[0]}")
    module = build_model(config, 3, 2, "node")
    assert isinstance(module, Mine)
    assert module.width == 9
    for target, words in (
        ("nocolon", "package.module:Class"),
        (f"{__name__}:Mint", "did you mean 'Mine'"),
        (f"{__name__}:CPU", "no torch module"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_model(dataclasses.replace(config, target=target), 3, 2, "node")
    with pytest.raises(ConfigError, match="unexpected keyword"):
        build_model(dataclasses.replace(config, kwargs={"wide": 1}), 3, 2, "node")


def test_training_that_diverges_says_so(planted: GraphData) -> None:
    data = dataclasses.replace(planted, features=planted.dense_features() * 1e30)
    with pytest.raises(UserError, match=r"training diverged: the loss is .* in epoch \d+ with seed 0; lower train.lr"):
        trainer(data, TrainConfig(epochs=20, optimizer="sgd", lr=1e3), model="gin").fit()


def test_a_rest_of_one_joins_the_batch_before(graph_set: GraphData) -> None:
    torch.manual_seed(0)
    module = build_model(ModelConfig(name="gin", norm="batch"), 8, 2, "graph")
    items = torch.arange(9)
    source = GraphBatches(module, graph_set, Split(train=items, val=items[:0], test=items), 4, CPU)
    assert [len(labels) for _, labels in source.train_batches(0)] == [4, 5]


def test_sampling_does_not_depend_on_the_number_of_threads(planted: GraphData) -> None:
    torch.manual_seed(0)
    module = build_model(ModelConfig(name="sage", dropout=0.0), planted.num_features, planted.num_classes, "node")
    source = sampled(module, planted)
    sums = []
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        sums.append([round(float(logits.sum().detach()), 3) for logits, _ in source.train_batches(1)])
    torch.set_num_threads(1)
    assert all(entry == pytest.approx(sums[0], abs=1e-2) for entry in sums)
