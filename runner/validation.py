"""What is checked of a config before anything is loaded: choices, ranges, combinations that can't work, options that nothing reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from runner.errors import ConfigError, suggestion
from runner.schema import (
    GRAPH_MODELS,
    KERNEL_HEADS,
    SAMPLED_MODELS,
    TABLE_DATASET_OPTIONS,
    TABLE_TASKS,
    Config,
    ModelConfig,
    option_names,
    parse_model,
    parse_sized,
    used_strategies,
    walk,
)

# Options that only some models read: changing one for another model would do nothing, so it is an error.
MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "target": ("custom",),
    "kwargs": ("custom",),
    "heads": ("gat", "gatv2"),
    "out_heads": ("gat", "gatv2"),
    "attention_dropout": ("gat", "gatv2"),
    "aggregator": ("sage",),
    "num_hops": ("sgc", "appnp"),
    "alpha": ("appnp",),
    "learn_eps": ("gin",),
    "mlp_layers": ("gin",),
    "readout": ("gcn", "gin"),
    "edge_weight": ("gcn", "sage", "gin", "sgc", "appnp"),
    "num_kernels": ("monet",),
    "pseudo_dim": ("monet",),
    "num_layers": ("gcn", "sage", "gin", "gat", "gatv2", "appnp", "monet", "edgeconv"),
    "hidden": ("gcn", "sage", "gin", "gat", "gatv2", "appnp", "monet", "edgeconv"),
    "dropout": ("gcn", "sage", "gin", "gat", "gatv2", "appnp", "monet", "edgeconv"),
    "norm": ("gcn", "sage", "gin", "gat", "gatv2", "appnp", "monet", "edgeconv"),
    "residual": ("gcn", "sage", "gin", "gat", "gatv2", "edgeconv"),
    "activation": ("gcn", "sage", "gin", "gat", "gatv2", "appnp", "monet", "edgeconv"),
    "input_dropout": ("gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp", "monet", "edgeconv"),
    "bias": ("gcn", "sage", "gat", "gatv2", "sgc", "appnp", "monet"),
}


_FITTING_OPTIONS = (
    "epochs", "schedule", "patience", "metric", "select", "repeats", "eval_every",
)  # fmt: skip
_ADAPTIVE_OPTIONS = (
    "partition", "block_size", "min_intra_fraction", "num_trials", "selector", "picture", "matrix_units", "atomics",
)  # fmt: skip


def validate(config: Config) -> None:
    """Check choices, ranges and combinations.

    Raises:
        ConfigError: for the first value that is not allowed, or the first combination that can't work.
    """
    for name, item, value in walk(config):
        for entry in value if isinstance(value, list) else [value]:
            _check_value(name, item.metadata, entry)
    for check in (
        _check_names,
        _check_dataset,
        _check_model,
        _check_train,
        _check_strategies,
        _check_kernels,
        _check_table,
    ):
        check(config)


def _check_value(name: str, metadata: Any, value: Any) -> None:
    if value is None or isinstance(value, dict):
        return
    choices, low, high = metadata["choices"], metadata["low"], metadata["high"]
    if choices and value not in choices:
        raise ConfigError(f"{name}={value}: {suggestion(value, choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value}: must be a finite number")
    if low is not None and (value < low or (metadata["open_low"] and value == low)):
        raise ConfigError(
            f"{name}={value} is out of range: must be {'above' if metadata['open_low'] else 'at least'} {low:g}"
        )
    if high is not None and (value > high or (metadata["open_high"] and value == high)):
        raise ConfigError(
            f"{name}={value} is out of range: must be {'below' if metadata['open_high'] else 'at most'} {high:g}"
        )


def check_name(name: str) -> str:
    """Return a run's name, which is a folder's.

    Raises:
        ConfigError: where it can't be one.
    """
    bad = (
        not name
        or name.startswith(".")
        or len(name) > 80
        or any(sign in '/\\:"' or not sign.isprintable() for sign in name)
    )
    if bad:
        raise ConfigError(f"name={name!r}: must be a folder name of at most 80 characters")
    return name


def _check_names(config: Config) -> None:
    check_name(config.name)


def _check_dataset(config: Config) -> None:
    dataset = config.dataset
    parse_sized("dataset.features", dataset.features, ("given", "degree", "tags"), "random")
    _, num_classes = parse_sized("dataset.labels", dataset.labels, ("given",), "degree")
    if num_classes == 1:
        raise ConfigError("dataset.labels=degree:1: one class leaves nothing to learn; use at least degree:2")
    if dataset.train_fraction + dataset.val_fraction >= 1:
        raise ConfigError(
            f"dataset.train_fraction={dataset.train_fraction} and dataset.val_fraction={dataset.val_fraction} "
            "leave nothing to test on: their sum must be below 1"
        )
    if dataset.name == "planted" and dataset.path is not None:
        raise ConfigError(
            f"dataset.path={dataset.path} can't work with dataset=planted, which is generated; use dataset=file"
        )
    if dataset.name == "planted":
        if dataset.num_graphs == 1 and dataset.num_communities > dataset.num_nodes:
            raise ConfigError(
                f"dataset.num_communities={dataset.num_communities} exceeds dataset.num_nodes={dataset.num_nodes}"
            )
        if (dataset.num_graphs > 1) != (dataset.task == "graph"):
            raise ConfigError(
                f"dataset.num_graphs={dataset.num_graphs} does not go with dataset.task={dataset.task}: "
                "several graphs are for dataset.task=graph, one graph is for dataset.task=node"
            )
        if dataset.num_graphs * 2 > dataset.num_nodes:
            raise ConfigError(
                f"dataset.num_graphs={dataset.num_graphs} needs at least two nodes a graph, "
                f"dataset.num_nodes={dataset.num_nodes} has fewer"
            )


def _check_model(config: Config) -> None:
    model, default = config.model, ModelConfig()
    for name, readers in MODEL_OPTIONS.items():
        value = getattr(model, name)
        if model.name not in readers and value != getattr(default, name):
            raise ConfigError(
                f"model.{name}={value} has no effect on model={model.name}: it is for {', '.join(readers)}"
            )
    if model.name == "custom" and not model.target:
        raise ConfigError("model=custom needs model.target=my_pkg.nets:MyNet")
    if model.edge_weight and model.name == "sage" and model.aggregator != "mean":
        raise ConfigError(
            f"model.edge_weight=true can't work with model.aggregator={model.aggregator}: a maximum over neighbours "
            "takes no weights; use model.aggregator=mean"
        )
    if config.dataset.task == "graph" and model.name not in GRAPH_MODELS:
        raise ConfigError(
            f"model={model.name} can't classify graphs (dataset.task=graph): it has no readout; "
            f"use one of {', '.join(GRAPH_MODELS)}"
        )
    if config.dataset.task == "graph" and model.edge_weight:
        raise ConfigError("model.edge_weight=true can't work with dataset.task=graph: TU archives hold no edge weights")


def _check_train(config: Config) -> None:
    train, dataset, model = config.train, config.dataset, config.model
    if train.sampling == "neighbor":
        if dataset.task == "graph":
            raise ConfigError(
                "train.sampling=neighbor is for dataset.task=node; graphs are batched as wholes: use train.sampling=full"
            )
        if model.name not in SAMPLED_MODELS:
            raise ConfigError(
                f"train.sampling=neighbor can't work with model={model.name}: DGL's layer propagates over one whole "
                f"graph, a sampled block has different nodes on its two sides; use one of {', '.join(SAMPLED_MODELS)}"
            )
        if model.name != "custom" and len(train.fanouts) != model.num_layers:
            raise ConfigError(
                f"train.fanouts={train.fanouts} has {len(train.fanouts)} entries for model.num_layers={model.num_layers}: "
                "one fanout a layer is needed"
            )
        if any(fanout == 0 for fanout in train.fanouts):
            raise ConfigError(f"train.fanouts={train.fanouts}: a fanout is at least 1, or -1 for all neighbours")
    batched = train.sampling == "neighbor" or dataset.task == "graph"
    if batched and train.batch_size == 1 and model.norm == "batch":
        raise ConfigError(
            "train.batch_size=1 can't work with model.norm=batch: there is nothing to take a variance over"
        )
    if train.folds == 1:
        raise ConfigError("train.folds=1: cross-validation needs at least 2 folds; 0 uses one split")
    if train.folds and train.patience:
        raise ConfigError(
            f"train.folds={train.folds} with train.patience={train.patience}: the protocol compares all folds at the same epoch, so "
            "none may stop early; use train.patience=0"
        )
    if train.folds and dataset.task != "graph":
        raise ConfigError(f"train.folds={train.folds} is for dataset.task=graph, this is dataset.task={dataset.task}")
    if train.folds and train.eval_every != 1:
        raise ConfigError(
            f"train.folds={train.folds} with train.eval_every={train.eval_every}: the protocol picks one epoch over "
            "all folds, so every epoch must be evaluated: use train.eval_every=1"
        )
    if train.patience and train.patience < train.eval_every:
        raise ConfigError(
            f"train.patience={train.patience} is below train.eval_every={train.eval_every}: training would stop before anything "
            "is evaluated again"
        )
    if train.resume and config.task.name != "train":
        raise ConfigError(f"train.resume is for task=train, this is task={config.task.name}")


def _check_strategies(config: Config) -> None:
    used = used_strategies(config)
    if config.task.name == "benchmark" and len(set(used)) != len(used):
        raise ConfigError(f"task.compare={used} names a strategy twice")
    if config.task.name == "benchmark" and not used:
        raise ConfigError("task.compare is empty: name at least one strategy")
    if config.task.name == "benchmark" and (config.train.folds or config.dataset.task == "graph"):
        raise ConfigError(
            "task=benchmark compares strategies on one whole graph: it can't work with dataset.task=graph yet; "
            "use task=train"
        )
    if config.task.name == "benchmark" and config.train.sampling != "full":
        raise ConfigError(
            "task=benchmark times full-graph steps: it can't work with train.sampling=neighbor; use task=train"
        )
    if "density_adaptive" in used and not config.kernel.fallback:
        _check_density_adaptive(config)


def _check_kernels(config: Config) -> None:
    if config.task.name != "kernels":
        return
    if not config.task.num_features or not config.task.dtypes:
        raise ConfigError("task.num_features and task.dtypes need at least one entry each")
    for width in config.task.num_features:
        if width % KERNEL_HEADS:
            raise ConfigError(
                f"task.num_features={width}: ops with heads have {KERNEL_HEADS} of them, so widths are multiples of {KERNEL_HEADS}"
            )


def _check_table(config: Config) -> None:
    if config.task.name not in TABLE_TASKS:
        if config.task.resume is not None:
            raise ConfigError(f"task.resume is for task={' and '.join(TABLE_TASKS)}, this is task={config.task.name}")
        return
    if not config.task.models:
        raise ConfigError("task.models is empty: name at least one, such as gcn:2x16")
    for model in config.task.models:
        parse_model(model, config.task.name)
    for name, dataset in config.task.datasets.items():
        if dataset.task != "node":
            raise ConfigError(
                f"task.datasets.{name} is a set of graphs; the table compares strategies on one whole graph"
            )
        _check_dataset(dataclasses.replace(config, dataset=dataset))
        for option, item, value in walk(dataset, f"task.datasets.{name}."):
            _check_value(option, item.metadata, value)


def _check_density_adaptive(config: Config) -> None:
    model, reason = config.model, None
    if model.name in ("gat", "gatv2", "monet"):
        reason = f"model={model.name} weights every edge anew at each step"
    elif model.name == "edgeconv":
        reason = "model=edgeconv takes a maximum"
    elif model.name == "sage" and model.aggregator != "mean":
        reason = f"model.aggregator={model.aggregator} takes a maximum"
    if reason:
        raise ConfigError(
            f"kernel=density_adaptive can't work here: {reason} (it is for sums and means with fixed scalar weights "
            "over one graph); use kernel=baseline, or kernel.fallback=true"
        )


def unused(config: Config) -> list[str]:
    """Return the options that were changed and that nothing reads in this combination, as notes for the user.

    They are no errors, since a sweep crosses values that not all of its jobs read. (A model's are: see ``MODEL_OPTIONS``.)
    """
    default = Config()
    changed = {
        name for (name, _, value), (_, _, normal) in zip(walk(config), walk(default), strict=True) if value != normal
    }
    return [
        f"{name} has no effect with {why}"
        for names, holds, why in _readers(config)
        for name in names
        if not holds and name in changed
    ]


def _readers(config: Config) -> Iterator[tuple[list[str], bool, str]]:
    """Yield (options, whether something reads them here, what does not)."""
    dataset, train, task = config.dataset, config.train, config.task.name
    is_planted, is_file = dataset.name == "planted", dataset.path is not None

    def of(group: str, *names: str) -> list[str]:
        return [f"{group}.{name}" for name in names]

    yield of("dataset", "num_nodes", "num_classes", "num_features", "mean_degree", "degree_exponent", "feature_signal",
             "num_graphs"), is_planted, f"dataset.name={dataset.name}, which is not generated"  # fmt: skip
    yield of("dataset", "num_communities", "intra_fraction"), is_planted and dataset.task == "node", "this dataset"
    yield of("dataset", "feature_signal"), dataset.features == "given", f"dataset.features={dataset.features}"
    yield of("model", "readout"), dataset.task == "graph", "dataset.task=node"
    is_deep = (
        config.model.num_layers > 1 or config.model.name in ("sgc", "edgeconv", "custom") or dataset.task == "graph"
    )
    has_mlp = config.model.name == "gin" and config.model.mlp_layers > 1
    yield of("model", "dropout", "residual", "heads"), is_deep, "model.num_layers=1"
    yield of("model", "hidden", "norm", "activation"), is_deep or has_mlp, "model.num_layers=1"
    yield of("dataset", "train_fraction", "val_fraction", "split"), not train.folds, "train.folds"
    yield of("dataset", "seed"), is_planted or dataset.features.startswith("random"), "features that the dataset has"
    yield (
        of("dataset", "root"),
        not (is_planted or is_file) or task in ("kernels", *TABLE_TASKS),
        "a dataset that is generated, or named by dataset.path",
    )
    yield (
        of("dataset", "download"),
        not (is_planted or is_file) or task in TABLE_TASKS,
        "a dataset that is generated, or named by dataset.path",
    )
    yield of("dataset", "ids"), not is_planted or task == "kernels", "a generated dataset"
    yield of("dataset", "split_index"), dataset.split != "random" and not is_planted, "a random split"
    yield (
        of("kernel", *_ADAPTIVE_OPTIONS),
        bool({"density_adaptive", "auto"} & set(used_strategies(config))),
        f"kernel={config.kernel.name}",
    )
    used = set(used_strategies(config))
    yield (
        of("kernel", "num_plans", "trial_seconds", "without"),
        bool({"fused", "auto"} & used),
        f"kernel={config.kernel.name}",
    )
    chooses = bool({"density_adaptive", "fused", "auto"} & used)
    yield of("kernel", "min_gain", "keep_choices"), chooses, f"kernel={config.kernel.name}"
    yield of("kernel", "fallback"), used_strategies(config) != ["baseline"], "kernel=baseline"
    yield of("kernel", "name"), task != "benchmark", "task=benchmark, which runs the strategies of task.compare"
    yield of("train", "momentum"), train.optimizer == "sgd", f"train.optimizer={train.optimizer}"
    yield of("train", "schedule_every", "schedule_factor"), train.schedule == "step", f"train.schedule={train.schedule}"
    yield of("train", "fanouts"), train.sampling == "neighbor", "train.sampling=full"
    yield of("train", "batch_size"), train.sampling == "neighbor" or dataset.task == "graph", "full-graph training"
    yield of("train", "checkpoint_every"), task == "train", f"task={task}"
    yield of("task", "compare"), task == "benchmark", f"task={task}"
    yield of("task", "num_warmup", "num_steps"), task in ("benchmark", *TABLE_TASKS), f"task={task}"
    yield of("task", "graphs"), task in ("kernels", *TABLE_TASKS), f"task={task}"
    yield of("task", "case_seconds"), task in ("kernels", "adaptgear_table"), f"task={task}"
    yield of("task", "ablate", "exhaustive"), task == "algebra", f"task={task}"
    yield of("task", "ops", "num_features", "dtypes", "num_rounds"), task == "kernels", f"task={task}"
    yield of("task", "datasets", "models", "peers", "step_seconds"), task in TABLE_TASKS, f"task={task}"
    for group in ("dataset", "model", "kernel", "train"):
        read = ("dataset.name", "dataset.root", "dataset.ids") if group == "dataset" else ()
        names = [name for name in option_names(group) if name not in read]
        yield (
            names,
            task != "kernels",
            "task=kernels, which times ops on graphs of its own and on the files of dataset.root",
        )
    is_table = task in TABLE_TASKS
    shared = [f"dataset.{name}" for name in ("name", *TABLE_DATASET_OPTIONS)]
    own = [name for name in option_names("dataset") if name not in shared]
    yield own, not is_table, f"task={task}, whose graphs are task.datasets"
    yield (
        of("model", "name", "hidden", "num_layers"),
        not is_table,
        f"task={task}, whose models are task.models",
    )
    yield of("kernel", "name", "fallback", "picture"), not is_table, f"task={task}"
    yield of("train", *_FITTING_OPTIONS), not is_table, f"task={task}, which times single steps"
    yield of("logger", "mode", "project", "entity", "group", "job_type", "tags", "timeout_s"), (
        config.logger.name == "wandb"
    ), f"logger={config.logger.name}"  # fmt: skip
