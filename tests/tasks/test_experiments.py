"""Experiments end to end, shrunk: every exp file, every task, every strategy, and what they leave behind."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, compose
from rich.console import Console

from runner import experiment
from runner.errors import ConfigError, UserError, VerificationError
from runner.gnn.batches import to_dgl
from runner.gnn.data.graph_data import RawGraph
from runner.gnn.data.load import load
from runner.gnn.data.npz import write_npz
from runner.gnn.dgl_compat import has_cuda, import_dgl
from runner.gnn.models import build_model
from runner.kernels.density import autograd, plans
from runner.kernels.density.select import assemble
from runner.kernels.verify import Agreement
from runner.results import read_metrics, read_result
from runner.schema import TABLE_TASKS, DatasetConfig
from runner.tasks import benchmark, measure, train

Run = Callable[..., dict[str, Any]]
SMALL = (
    "dataset.num_nodes=300",
    "dataset.num_communities=8",
    "dataset.num_features=8",
    "kernel.block_size=32",
    "kernel.num_trials=2",
)
FAST = (*SMALL, "train.epochs=4", "task.num_steps=3", "task.num_warmup=1")


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "exp").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_file_runs_shrunk(path: Path, run_experiment: Run, request: pytest.FixtureRequest) -> None:
    config = compose(f"+exp={path.stem}")
    roots = {"MUTAG": "tu"}
    shrink = ["train.epochs=3", "train.repeats=1", "task.num_steps=3", "kernel.num_trials=2"]
    planted = "planted" if config.task.name in TABLE_TASKS else "planted_small"
    shrink += [
        "task.num_features=[16]",
        f"task.graphs=[{planted}]",
        "task.num_rounds=3",
        "task.case_seconds=0",
        "task.peers=[]",
    ]
    if config.dataset.name != "planted":
        data_root = request.getfixturevalue("data_root")  # a test that needs none isn't skipped without it
        shrink += [f"dataset.root={data_root / roots.get(config.dataset.name, 'graphs')}", "dataset.download=false"]
    if config.train.folds:
        shrink += ["train.folds=3"]
    record = run_experiment(f"+exp={path.stem}", *shrink)
    assert record["status"] == "finished"
    assert record["fingerprint"]


def test_the_main_job_leaves_the_promised_record(run_experiment: Run, tmp_path: Path) -> None:
    run_experiment("+exp=adaptgear", *FAST, "train.repeats=2")
    record = read_result(tmp_path / "run")
    assert {"schema_version", "fingerprint", "config", "environment", "status"} <= set(record)
    baseline, adaptive = record["strategies"]
    assert (baseline["name"], adaptive["name"]) == ("baseline", "density_adaptive")
    for row in (baseline, adaptive):
        assert set(row["step_ms"]) == {"median", "q1", "q3", "n"}
        assert row["step_ms"]["n"] == 3
        assert row["peak_memory_bytes"] > 300 * 8 * 4
        assert len(row["test_metrics"]) == 2
    assert baseline["speedup"] == 1.0
    assert (baseline["max_loss_diff"], baseline["max_grad_diff"], baseline["preprocess_s"]) == (0, 0, 0)
    assert adaptive["max_loss_diff"] < 1e-5
    assert adaptive["curve_max_loss_diff"] < 1e-4
    assert adaptive["preprocess_s"] > 0
    assert record["environment"]["num_threads"] == torch.get_num_threads()
    curves = read_metrics(tmp_path / "run")
    assert len(curves) == 2 * 2 * 4
    text = (tmp_path / "run" / "run.log").read_text()
    assert "density_adaptive" in text
    assert "speed-up" in text


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "sgc", "appnp"])
@pytest.mark.parametrize(
    "extra", [(), ("dataset.self_loops=keep", "dataset.normalize=standard")], ids=["loops", "plain"]
)
def test_density_adaptive_has_baselines_curve(
    run_experiment: Run, tmp_path: Path, model: str, extra: tuple[str, ...]
) -> None:
    """Dropout on: the masks are the same, so the curves are. A smooth activation, since rounding may turn a ReLU over."""
    smooth = () if model == "sgc" else ("model.activation=tanh",)
    options = (*FAST, *extra, *smooth, f"model={model}", "train.epochs=20")
    for kernel in ("baseline", "density_adaptive"):
        run_experiment(*options, f"kernel={kernel}", folder=kernel)
    one, two = (read_metrics(tmp_path / kernel) for kernel in ("baseline", "density_adaptive"))
    assert len(one) == len(two) == 20
    for mine, other in zip(two, one, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.fixture
def weighted_file(tmp_path: Path) -> Path:
    """A directed, weighted graph with isolated nodes, loops and duplicates."""
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(0, 110, (900,), generator=generator) for _ in range(2))
    graph = RawGraph(
        name="odd",
        src=src,
        dst=dst,
        num_nodes=120,
        edge_weight=torch.rand(900, generator=generator) + 0.1,
        features=torch.randn(120, 5, generator=generator),
        labels=torch.arange(120) % 3,
    )
    write_npz(tmp_path / "odd.npz", graph)
    return tmp_path / "odd.npz"


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "sgc", "appnp"])
@pytest.mark.parametrize("partition", ["metis", "none"])
def test_density_adaptive_on_a_directed_weighted_multigraph(
    run_experiment: Run, weighted_file: Path, model: str, partition: str
) -> None:
    record = run_experiment(
        "dataset=file", f"dataset.path={weighted_file}", f"model={model}", "model.edge_weight=true", "kernel=density_adaptive",
        f"kernel.partition={partition}", "kernel.block_size=8", "kernel.num_trials=2", "kernel.min_intra_fraction=0", "train.epochs=2",
    )  # fmt: skip
    assert record["agreement"].max_output_diff < 2e-5
    assert record["strategy_report"]["split"]
    directions = {choice["direction"] for choice in record["strategy_report"]["choices"]}
    if model != "sgc":  # whose only weights come after the propagation
        assert directions == {"forward", "backward"}, "a directed graph has a plan of its own for each direction"


def test_forcing_the_split_changes_nothing_but_the_kernels(
    run_experiment: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With any gain enough, the split is what runs; its answer is checked like every other."""
    real = plans.choose

    def always_split(candidates: Any, width: int, trials: int, _: float, extra: Any) -> Any:
        choice = real(candidates, width, trials, -1e9, extra)
        assert len(choice.names) == 2
        return choice

    monkeypatch.setattr(plans, "choose", always_split)
    for kernel in ("baseline", "density_adaptive"):
        run_experiment(*FAST, f"kernel={kernel}", "train.epochs=10", folder=kernel)
    one, two = (read_metrics(tmp_path / kernel) for kernel in ("baseline", "density_adaptive"))
    assert [entry["loss"] for entry in two] == pytest.approx([entry["loss"] for entry in one], rel=1e-4)


def test_a_wrong_strategy_fails_the_run_with_the_ops_name(
    run_experiment: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = autograd.SpMMFunction.forward

    def wrong(ctx: Any, x: torch.Tensor, run: Any, back: Any) -> torch.Tensor:
        return forward(ctx, x, run, back) * 1.01

    monkeypatch.setattr(autograd.SpMMFunction, "forward", staticmethod(wrong))
    with pytest.raises(
        VerificationError, match=r"density_adaptive differs from baseline at 'copy_u → sum' \(graphconv.py:"
    ):
        run_experiment("+exp=adaptgear", *FAST)
    record = read_result(tmp_path / "run")
    assert record["status"] == "failed"
    assert "copy_u → sum" in record["error"]
    assert "strategies" not in record, "nothing was timed"


def test_a_wrong_backward_fails_the_run(run_experiment: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of others: a directed graph's backward on the graph as it is, not on its transpose."""

    def untransposed(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].contiguous() * 0.5, None, None

    monkeypatch.setattr(autograd.SpMMFunction, "backward", staticmethod(untransposed))
    with pytest.raises(VerificationError, match="the backward of an op"):
        run_experiment("+exp=adaptgear", *FAST)


def test_fallback_only_on_request(run_experiment: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights every edge anew"):
        compose("model=gat", "kernel=density_adaptive")
    record = run_experiment(*FAST, "model=gat", "model.heads=2", "kernel=density_adaptive", "kernel.fallback=true")
    assert record["strategy"] == "baseline"
    assert "baseline runs in its place" in (tmp_path / "run" / "run.log").read_text()
    row = run_experiment("+exp=adaptgear", *FAST, "train.repeats=1", "model=gat", "kernel.fallback=true", folder="b")[
        "strategies"
    ][1]
    assert (row["name"], row["ran_as"]) == ("density_adaptive", "baseline")


def test_explain_prints_the_op_graph_and_the_choices(run_experiment: Run, tmp_path: Path) -> None:
    run_experiment(*FAST, "kernel=density_adaptive", "kernel.explain=true", "kernel.keep_choices=false")
    text = (tmp_path / "run" / "run.log").read_text()
    for words in (
        "op graph in training",
        "copy_u → sum",
        "communities of",
        "by density, from 0: ",
        "single: csr_torch",
        "width 8",
    ):
        assert words in text


def test_weights_travel_between_strategies(run_experiment: Run, tmp_path: Path) -> None:
    run_experiment(*FAST, "kernel=density_adaptive")
    config = compose(*FAST)
    data = load(config.dataset)
    module = build_model(config.model, data.num_features, data.num_classes, "node")
    module.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True))
    assert module(to_dgl(data, torch.device("cpu")), data.dense_features()).shape == (300, data.num_classes)


@pytest.mark.parametrize(
    "options",
    [
        ("train=sampled", "train.batch_size=64"),
        ("train.schedule=cosine", "train.metric=macro_f1"),
        ("dataset.num_classes=2", "train.metric=roc_auc"),
        ("model=gatv2", "model.heads=2"),
        ("dataset=planted_graphs", "model=gin", "model.norm=batch"),
        ("dataset=planted_graphs", "model=gcn"),
        ("dataset=planted_graphs", "model=gin", "train.folds=3"),
        ("train.select=last", "dataset.val_fraction=0"),
        ("train.repeats=3", "train.patience=2"),
        ("cluster.num_threads=1",),
        ("dataset.features=random:5", "dataset.labels=degree:3"),
    ],
    ids=" ".join,
)
def test_ways_to_train(run_experiment: Run, options: tuple[str, ...]) -> None:
    small = () if options[0] == "dataset=planted_graphs" else SMALL[:3]
    record = run_experiment(*options, *small, "train.epochs=3")
    assert record["status"] == "finished"
    assert record["test_metric_mean"] == record["test_metric_mean"]


def test_the_threads_of_one_job_are_not_those_of_the_next(run_experiment: Run) -> None:
    before = torch.get_num_threads()
    record = run_experiment(*FAST, "cluster.num_threads=2", "train.epochs=1")
    assert record["environment"]["num_threads"] == 2
    assert torch.get_num_threads() == before


def test_repeats_use_seeds_of_their_own(run_experiment: Run) -> None:
    record = run_experiment(*FAST, "train.repeats=3", "train.seed=5")
    assert [run["seed"] for run in record["runs"]] == [5, 6, 7]
    assert len({run["test_loss"] for run in record["runs"]}) == 3
    alone = run_experiment(*FAST, "train.seed=6", folder="alone")
    assert alone["runs"][0]["test_loss"] == record["runs"][1]["test_loss"]


def test_cross_validation_reports_one_epoch_for_all_folds(run_experiment: Run, tmp_path: Path) -> None:
    record = run_experiment("dataset=planted_graphs", "model=gin", "train.folds=3", "train.epochs=4")
    (found,) = record["cross_validation"]
    curves = [
        [entry["val_metric"] for entry in read_metrics(tmp_path / "run") if entry["fold"] == fold] for fold in range(3)
    ]
    means = [sum(curve[epoch] for curve in curves) / 3 for epoch in range(4)]
    assert found["mean"] == pytest.approx(max(means))
    assert means[found["epoch"]] == pytest.approx(max(means))
    assert record["test_metric_mean"] == found["mean"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("device=cuda",), "device=cuda: "),
        (("train.metric=roc_auc",), "is for two classes, this graph has 8"),
        (("model.edge_weight=true",), "has no edge weights"),
        (("dataset.val_fraction=0",), "the validation split is empty"),
        (("train.resume=/nowhere",), "no checkpoint.pt there"),
        (
            (
                "dataset.num_nodes=2",
                "dataset.num_communities=1",
                "dataset.num_classes=2",
                "dataset.train_fraction=0.5",
                "dataset.val_fraction=0",
                "train.select=last",
                "train=sampled",
                "model=gin",
                "model.norm=batch",
            ),
            "a single row to normalise over",
        ),
        (("dataset=planted_graphs", "model=gin", "train.folds=99"), "a fold needs one of each class"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_only_the_data_or_the_machine_can_tell(
    run_experiment: Run, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    if torch.cuda.is_available() and options == ("device=cuda",):
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=words):
        run_experiment(*options, "train.epochs=2")
    assert words in read_result(tmp_path / "run")["error"]


def test_weights_that_a_normalisation_can_not_take(run_experiment: Run, tmp_path: Path) -> None:
    graph = RawGraph(
        name="neg",
        src=torch.tensor([0, 1, 2]),
        dst=torch.tensor([1, 2, 0]),
        num_nodes=3,
        edge_weight=torch.tensor([1.0, -1.0, 1.0]),
        features=torch.eye(3),
        labels=torch.tensor([0, 1, 0]),
    )
    write_npz(tmp_path / "neg.npz", graph)
    with pytest.raises(ConfigError, match="edge 1 of neg has weight -1"):
        run_experiment("dataset=file", f"dataset.path={tmp_path / 'neg.npz'}", "model=sgc", "model.edge_weight=true",
                       "dataset.train_fraction=0.3", "dataset.val_fraction=0.3")  # fmt: skip


def test_an_unexpected_failure_is_recorded_and_raised(
    run_experiment: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> dict[str, Any]:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(experiment.TASKS, "train", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        run_experiment()
    assert read_result(tmp_path / "run")["status"] == "failed"
    assert read_result(tmp_path / "run")["error"] == "RuntimeError: out of luck"
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


def test_ctrl_c_is_recorded(run_experiment: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setitem(experiment.TASKS, "train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_experiment()
    assert read_result(tmp_path / "run")["status"] == "interrupted"


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def work() -> None:
        one = torch.ones(1000, 250)
        two = one + 1
        del one
        three = two * 2
        del two, three

    assert 2_000_000 <= measure.peak_memory(work, torch.device("cpu")) < 2_100_000


def test_timed_steps_are_interleaved_and_alike(monkeypatch: pytest.MonkeyPatch, run_experiment: Run) -> None:
    order: list[str] = []
    real = measure.seconds

    def note(work: Any, device: Any) -> float:
        order.append(work.args[0])
        return real(work, device)

    monkeypatch.setattr(measure, "seconds", note)
    run_experiment("+exp=adaptgear", *FAST, "train.repeats=1")
    assert all(sorted(order[at : at + 2]) == ["baseline", "density_adaptive"] for at in (0, 2, 4))
    assert len(order) == 6


def test_break_even_and_never() -> None:
    class Fake:
        name, report = "x", {}

        def __init__(self, preprocess: float) -> None:
            self.preprocess_s = {"all": preprocess} if preprocess else {}

    def entry(step_s: float, preprocess: float) -> benchmark.Entry:
        agreement = Agreement(0, 0, 0, "")
        return benchmark.Entry(Fake(preprocess), agreement, None, [step_s] * 3, 1, [0.5], [[1.0]], [[1.0]])  # type: ignore[arg-type]

    base = entry(0.010, 0)
    assert benchmark._row("f", entry(0.008, 1.0), base)["break_even_epochs"] == pytest.approx(500)
    assert benchmark._row("s", entry(0.012, 1.0), base)["break_even_epochs"] is None
    assert benchmark._row("s", entry(0.012, 1.0), base)["speedup"] == pytest.approx(10 / 12)
    assert benchmark._row("b", base, base)["break_even_epochs"] == 0


@pytest.mark.slow
def test_gcn_on_real_cora_is_as_good_as_it_should_be(graphs_root: Path, run_experiment: Run) -> None:
    """The literature has 81.5 %; three seeds of a short run leave room for ±2."""
    record = run_experiment(
        "dataset=cora", f"dataset.root={graphs_root}", "model=gcn", "train.repeats=3", "train.epochs=100"
    )
    assert 0.79 < record["test_metric_mean"] < 0.835


def test_sparse_features_stay_sparse_up_to_the_model(graphs_root: Path, run_experiment: Run) -> None:
    record = run_experiment("dataset=citeseer", f"dataset.root={graphs_root}", "train.epochs=1")
    assert record["dataset"]["feature_format"] == "csr"
    assert record["dataset"]["feature_density"] < 0.01


def test_a_fresh_process_needs_no_dataset_option(run_experiment: Run) -> None:
    assert load(DatasetConfig()).num_nodes == 4000
    assert json.dumps(run_experiment(*FAST)["dataset"]["report"])


class BakesWeights(torch.nn.Module):
    """Reads its weights where no recorder sees it: right at the first weights, wrong at all others."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.layer = import_dgl().nn.GraphConv(num_features, num_classes, allow_zero_in_degree=True)

    def forward(self, graph: Any, features: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            level = self.layer.weight.detach().abs().mean()
        out: torch.Tensor = self.layer(graph, features) * level
        return out


class EvaluatesByPosition(BakesWeights):
    """Renumbering the nodes changes its answer, but only in evaluation."""

    def forward(self, graph: Any, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(graph, features)
        return out if self.training else out * torch.linspace(0, 1, len(out)).unsqueeze(1)


@pytest.mark.parametrize(
    ("cls", "words"),
    [(BakesWeights, "differs from baseline|is not the module"), (EvaluatesByPosition, "in evaluation mode")],
)
def test_verification_sees_other_weights_and_evaluation(
    run_experiment: Run, monkeypatch: pytest.MonkeyPatch, cls: type[torch.nn.Module], words: str
) -> None:
    monkeypatch.setenv("GEARSAIL_MODEL_PACKAGES", cls.__module__.split(".")[0])
    with pytest.raises(VerificationError, match=words):
        run_experiment(
            *SMALL,
            "train.epochs=1",
            "model=custom",
            f"model.target={cls.__module__}:{cls.__name__}",
            "kernel=density_adaptive",
        )


def test_validation_test_and_selection_are_of_their_own_parts(run_experiment: Run) -> None:
    record = run_experiment(*SMALL[:3], "train.epochs=6", "dataset.train_fraction=0.3", "dataset.val_fraction=0.1")
    (run,) = record["runs"]
    config = compose(*SMALL[:3], "dataset.train_fraction=0.3", "dataset.val_fraction=0.1")
    data = load(config.dataset)
    assert len(data.split.val) == 30
    assert round(run["val_metric"] * 30, 6) == round(run["val_metric"] * 30), "a share of 30 nodes"
    assert len(data.split.test) == 180
    assert round(run["test_metric"] * 180, 4) == pytest.approx(round(run["test_metric"] * 180), abs=1e-3), (
        "a share of 180 nodes"
    )


def test_each_fold_trains_and_tests_on_its_own_graphs() -> None:
    data = load(compose("dataset=planted_graphs").dataset)
    folds = train._folds(data, 4, seed=0)
    tests = [set(fold.test.tolist()) for fold in folds]
    assert sorted(graph for test in tests for graph in test) == list(range(120))
    for fold, test in zip(folds, tests, strict=True):
        assert set(fold.train.tolist()) == set(range(120)) - test
        share = data.labels[fold.test].float().mean()
        assert share == pytest.approx(float(data.labels.float().mean()), abs=0.05), "stratified"


def test_the_runs_of_a_cross_validation_use_their_folds(run_experiment: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, ...]] = []
    real = train.GraphBatches

    def note(module: Any, data: Any, split: Any, size: int, device: Any) -> Any:
        used.append(tuple(split.test.tolist()))
        return real(module, data, split, size, device)

    monkeypatch.setattr(train, "GraphBatches", note)
    run_experiment("dataset=planted_graphs", "model=gin", "train.folds=3", "train.epochs=1", "train.repeats=2")
    assert len(used) == 6
    assert len(set(used)) == 3
    assert used[:3] == used[3:]


@pytest.mark.parametrize("index", [0, 3])
def test_the_split_that_was_asked_for(graphs_root: Path, index: int) -> None:
    data = load(DatasetConfig(name="minesweeper", root=str(graphs_root), split_index=index))
    masks = np.load(graphs_root / "minesweeper.npz")
    assert data.split.train.tolist() == np.flatnonzero(masks["train_masks"][index]).tolist()


def test_progress_on_a_terminal_has_a_bar_a_rate_and_what_is_left(tmp_path: Path) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=140)
    experiment.run(compose(*SMALL[:3], "train.epochs=40"), tmp_path / "run", overrides=[], choices={}, console=terminal)
    text = screen.getvalue()
    assert "/40" in text
    assert "/s" in text
    assert "━" in text
    assert re.search(r"\d:\d\d", text), "time left"
    assert "test accuracy" in (tmp_path / "run" / "run.log").read_text()


def test_hash_of_a_set_sees_which_node_is_in_which_graph() -> None:
    data = load(compose("dataset=planted_graphs").dataset)
    assert data.graph_offsets is not None
    moved = data.graph_offsets.clone()
    moved[1] += 1
    assert dataclasses.replace(data, graph_offsets=moved).content_hash != data.content_hash


def test_a_resumed_run_takes_the_kernels_of_the_first(
    run_experiment: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kernel wins is measured; on resuming nothing is, so the curve is the first run's to the last bit."""
    options = (*SMALL, "kernel=density_adaptive", "train.epochs=6", "train.checkpoint_every=3", "train.repeats=2")
    options = (*options, "kernel.keep_choices=false")
    monkeypatch.setattr(plans, "choose", lambda candidates, *_: assemble(candidates, ["dense_blocks", "coo_torch"]))
    first = run_experiment(*options, folder="first")
    assert all(len(choice["kernels"]) == 2 for choice in first["strategy_report"]["choices"])

    def never(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(plans, "choose", never)
    stored = torch.load(tmp_path / "first" / "checkpoint.pt", weights_only=True)
    stored["done"] = stored["done"][:1]
    torch.save(stored, tmp_path / "first" / "checkpoint.pt")
    second = run_experiment(*options, f"train.resume={tmp_path / 'first'}", folder="second")
    assert second["runs"][1]["test_loss"] == first["runs"][1]["test_loss"]
    one, two = (read_metrics(tmp_path / folder) for folder in ("first", "second"))
    assert [entry["loss"] for entry in one] == [entry["loss"] for entry in two]


def test_sampled_training_evaluates_on_the_decomposition(
    run_experiment: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*SMALL, "train=sampled", "train.batch_size=64", "train.epochs=4")
    plain = run_experiment(*options, folder="plain")
    adaptive = run_experiment(*options, "kernel=density_adaptive", folder="adaptive")
    assert "density_adaptive evaluates on the full graph; it skips the sampled blocks" in capsys.readouterr().out
    assert (adaptive["strategy"], adaptive["evaluation_strategy"]) == ("baseline", "density_adaptive")
    for one, two in zip(plain["runs"], adaptive["runs"], strict=True):
        assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-5)


def test_batches_of_graphs_skip_the_strategy_and_say_so(
    run_experiment: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_experiment("dataset=planted_graphs", "model=gin", "kernel=density_adaptive", "train.epochs=2")
    assert "kernel=density_adaptive is skipped, baseline runs in its place: each batch" in capsys.readouterr().out
    assert record["strategy"] == "baseline"
    assert "preparing for one takes longer" in record["skipped"]


def test_auto_trains_on_what_it_kept(run_experiment: Run, tmp_path: Path) -> None:
    options = (*SMALL, "kernel=auto", "train.epochs=4", "train.checkpoint_every=2")
    record = run_experiment(*options, folder="first")
    candidates = {"baseline", "native", "density_adaptive", "fused", "fused + density_adaptive"}
    assert record["strategy"] in candidates
    assert set(record["strategy_report"]["step_s"]) == candidates
    again = run_experiment(*options, f"train.resume={tmp_path / 'first'}", folder="second")
    assert again["strategy"] == record["strategy"]
    assert again["strategy_report"]["step_s"] == {}, "the winner is kept, not measured again"
    options = [option for option in options if option != "kernel=auto"]
    by_hand = run_experiment(
        *options, "kernel=density_adaptive", f"train.resume={tmp_path / 'first'}", folder="by hand"
    )
    assert by_hand["strategy"] == "density_adaptive"
    attention = run_experiment(*SMALL, "kernel=auto", "model=gat", "train.epochs=2", folder="third")
    assert "computes on edges" in attention["strategy_report"]["refused"]["density_adaptive"]


def test_a_picture_of_the_decomposition_is_drawn(run_experiment: Run, tmp_path: Path) -> None:
    run_experiment(*SMALL, "kernel=density_adaptive", "train.epochs=1", folder="drawn")
    content = (tmp_path / "drawn" / "decomposition.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    run_experiment(*SMALL, "kernel=density_adaptive", "train.epochs=1", "kernel.picture=false", folder="bare")
    assert not (tmp_path / "bare" / "decomposition.png").exists()


@pytest.mark.gpu
def test_baseline_trains_on_a_gpu(run_experiment: Run) -> None:
    if not has_cuda():
        pytest.skip("no GPU that torch and DGL can both use")
    record = run_experiment(*SMALL[:3], "device=cuda", "train.epochs=3")
    assert record["device"] == "cuda"
    assert record["environment"]["gpus"]
