"""Misspelt, out of range or impossible configs: one line, the nearest right name, exit code 2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from conftest import ROOT, compose
from hydra.errors import HydraException

from runner import schema, validation
from runner.composition import explain
from runner.errors import ConfigError, UserError

Cli = Callable[..., CompletedProcess[str]]
CONF = ROOT / "conf"


def mistake(*overrides: str) -> str:
    """Return the line that a bad config gets."""
    with pytest.raises((UserError, HydraException)) as caught:
        compose(*overrides)
    line = str(caught.value if isinstance(caught.value, UserError) else explain(caught.value))
    assert "\n" not in line
    return line


@pytest.mark.parametrize("group", ["dataset", "model", "kernel", "cluster", "train", "logger", "task"])
def test_every_group_choice_composes(group: str) -> None:
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    assert choices
    # A custom module needs a target, a set of graphs a model with a readout; everything else stands on its own.
    needs = {"custom": ["model.target=a.b:C"], "mutag": [], "sampled": []}
    for choice in choices:
        config = compose(f"{group}={choice}", *needs.get(choice, []))
        assert isinstance(config, schema.Config)


@pytest.mark.parametrize("path", sorted((CONF / "exp").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes(path: Path) -> None:
    assert compose(f"+exp={path.stem}").name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model=gcnn"], "did you mean 'gcn'?"),
        (["kernel=density_adaptiv"], "did you mean 'density_adaptive'?"),
        (["modle=gcn"], "did you mean 'model'?"),
        (["model.hiden=3"], "unknown option 'hiden' in model: did you mean 'hidden'?"),
        (["+model.hiddn=3"], "did you mean 'hidden'?"),
        (["++train.epoch=3"], "unknown option 'epoch' in train: did you mean 'epochs'?"),
        (["+x=1"], "unknown option 'x'"),
        (["+trian.epochs=1"], "did you mean 'train'?"),
        (["+exp=adaptger"], "did you mean 'adaptgear'?"),
        (["train.optimizer=adan"], "did you mean 'adam'?"),
        (["task.compare=[baseline,fusd]"], "task.compare=fusd"),
        (["model.hidden=abc"], "model.hidden: Value 'abc'"),
        (["train.fanouts=[a]"], "train.fanouts[0]"),
        (["train.epochs=null"], "train.epochs"),
        (["model.hidden=0"], "model.hidden=0 is out of range: must be at least 1"),
        (["model.dropout=1"], "model.dropout=1.0 is out of range: must be below 1"),
        (["train.lr=nan"], "train.lr=nan: must be a finite number"),
        (["train.lr=0"], "must be above 0"),
        (["name=a/b"], "must be a folder name"),
        (["dataset.features=randon:3"], "did you mean 'random:COUNT'?"),
        (["dataset.features=random:0"], "dataset.features=random:0"),
        (["dataset.labels=degree:1"], "one class leaves nothing to learn"),
        (["dataset.train_fraction=0.9", "dataset.val_fraction=0.1"], "leave nothing to test on"),
        (["dataset.num_communities=9999"], "exceeds dataset.num_nodes"),
        (["dataset.num_graphs=3"], "does not go with dataset.task=node"),
        (["kernel=density_adaptive", "model=gat"], "weights every edge anew"),
        (["kernel=density_adaptive", "model=sage", "model.aggregator=pool"], "takes a maximum"),
        (["+exp=adaptgear_table", "task.models=[gnc:2x16]"], "task.models=gnc:2x16: did you mean 'gcn:2x16'"),
        (["+exp=adaptgear_table", "task.models=[gcn:two]"], "must be NAME:LAYERSxHIDDEN, such as gcn:2x16"),
        (["+exp=adaptgear_table", "task.models=[]"], "task.models is empty"),
        (["+exp=adaptgear_table", "task.datasets.cora.num_nodes=1"], "task.datasets.cora.num_nodes=1 is out of range"),
        (["+exp=adaptgear_table", "task.peers=[pig]"], "did you mean 'pyg'"),
        (
            ["+exp=adaptgear_table", "+dataset@task.datasets.some=planted_graphs"],
            "task.datasets.some is a set of graphs",
        ),
        (["task.resume=somewhere"], "task.resume is for task=adaptgear_table"),
        (["kernel=density_adaptive", "kernel.selector=analytical"], "did you mean 'analytic'"),
        (["train=sampled", "model=sgc"], "train.sampling=neighbor can't work with model=sgc"),
        (["train=sampled", "train.fanouts=[5]"], "one fanout a layer is needed"),
        (["train=sampled", "train.fanouts=[5,0]"], "a fanout is at least 1"),
        (["dataset=mutag", "model=gat"], "has no readout"),
        (["train.folds=10"], "is for dataset.task=graph"),
        (["dataset=mutag", "train.folds=1"], "needs at least 2 folds"),
        (["dataset=mutag", "train.folds=10", "train.patience=3"], "none may stop early"),
        (["dataset=mutag", "train.folds=10", "train.eval_every=3"], "every epoch must be evaluated"),
        (["model=gcn", "model.heads=2"], "model.heads=2 has no effect on model=gcn"),
        (["model=custom"], "needs model.target"),
        (["task=benchmark", "train.resume=x"], "train.resume is for task=train"),
        (["task=benchmark", "train=sampled"], "can't work with train.sampling=neighbor"),
        (["task=benchmark", "dataset=mutag"], "can't work with dataset.task=graph"),
        (["task=benchmark", "task.compare=[baseline,baseline]"], "names a strategy twice"),
        (["task=benchmark", "task.compare=[]"], "task.compare is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line(overrides: list[str], expected: str) -> None:
    assert expected in mistake(*overrides)


def test_every_option_has_words_and_a_default_that_is_allowed() -> None:
    validation.validate(schema.Config())
    for name, item, _ in schema.walk(schema.Config()):
        assert item.metadata["doc"], name


def test_every_choice_of_every_option_is_accepted_somewhere() -> None:
    """No choice may be refused for itself; combinations are another matter."""
    for name, item, _ in schema.walk(schema.Config()):
        for choice in item.metadata["choices"]:
            validation._check_value(name, item.metadata, choice)
            with pytest.raises(ConfigError):
                validation._check_value(name, item.metadata, f"{choice}x")


def test_defaults_in_yaml_match_their_group_name() -> None:
    for path in (CONF / "model").glob("*.yaml"):
        assert f"name: {path.stem}" in path.read_text()


def test_cli_exits_with_2_and_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    for arguments in (["+x=1"], ["model.hidden=-1"], ["model=gcnn"], ["name=a/b"]):
        done = cli(*arguments)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.rglob("result.json"))
        assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").iterdir())


def test_a_typo_in_an_experiment_file_is_named(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "exp"
    folder.mkdir(parents=True)
    (folder / "wrong.yaml").write_text("# @package _global_\ntrain:\n  epohcs: 3\n")
    done = cli("--config-dir", str(tmp_path / "mine"), "+exp=wrong")
    assert done.returncode == 2
    assert "did you mean 'epochs'?" in done.stderr
    assert "exp/wrong" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_names_groups_choices_and_examples(cli: Cli) -> None:
    text = cli("--help").stdout
    for word in ("dataset:", "model:", "kernel:", "exp:", "adaptgear", "density_adaptive", "== Examples =="):
        assert word in text
    assert text.count("python -m runner") >= 5


def test_config_can_be_printed(cli: Cli) -> None:
    done = cli("--cfg", "job")
    assert done.returncode == 0
    assert "dataset:" in done.stdout


def test_options_without_effect_are_refused_for_every_model() -> None:
    default = schema.ModelConfig()
    for option, models in validation.MODEL_OPTIONS.items():
        value = getattr(default, option)
        changed = {bool: not value, int: 5, float: 0.25}.get(
            type(value),
            {
                "aggregator": "pool",
                "norm": "layer",
                "readout": "mean",
                "activation": "elu",
                "target": "a:B",
                "kwargs": {"a": 1},
            }.get(option),
        )
        for model in set(schema.MODELS) - set(models) - {"custom"}:
            config = schema.Config(model=dataclasses.replace(default, name=model, **{option: changed}))
            with pytest.raises(ConfigError, match="has no effect"):
                validation.validate(config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dataset.root=/tmp"], "dataset.root has no effect with a dataset that is generated"),
        (["dataset=cora", "dataset.num_nodes=10"], "dataset.num_nodes has no effect with dataset.name=cora"),
        (["kernel.block_size=32"], "kernel.block_size has no effect with kernel=baseline"),
        (["train.momentum=0.5"], "train.momentum has no effect with train.optimizer=adam"),
        (["train.schedule_every=5"], "train.schedule_every has no effect with train.schedule=constant"),
        (["train.batch_size=5"], "train.batch_size has no effect with full-graph training"),
        (["task.num_steps=5"], "task.num_steps has no effect with task=train"),
        (["logger.mode=online"], "logger.mode has no effect with logger=files"),
        (["task=benchmark", "kernel=density_adaptive"], "kernel.name has no effect with task=benchmark"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_that_nothing_reads_is_noted(overrides: list[str], words: str) -> None:
    assert any(words in note for note in validation.unused(compose(*overrides)))


@pytest.mark.parametrize("path", sorted((CONF / "exp").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_experiment_file_sets_what_nothing_reads(path: Path) -> None:
    assert validation.unused(compose(f"+exp={path.stem}")) == []


def test_a_custom_modules_options_are_free() -> None:
    assert compose("model=custom", "model.target=a.b:C", "model.kwargs={width: 3, deep: {a: 1}}").model.kwargs == {
        "width": 3,
        "deep": {"a": 1},
    }
    assert compose("model=custom", "model.target=a.b:C", "+model.kwargs.width=3").model.kwargs == {"width": 3}


def test_a_misspelt_run_removes_nothing_of_the_users(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "train").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    for arguments in (
        ["train.epochs=0"],
        ["train.epochs=0", "hydra.run.dir=mine"],
        ["train.epochs=0", "hydra.run.dir=."],
        ["name=.."],
        ["name=a/b"],
    ):
        assert cli(*arguments).returncode == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "outputs", "train"]


def test_one_layer_reads_less() -> None:
    def notes(*overrides: str) -> str:
        return " ".join(
            validation.unused(compose("model.num_layers=1", "model.hidden=99", "model.dropout=0.1", *overrides))
        )

    assert "model.hidden" in notes("model=gcn")
    assert "model.hidden" not in notes("model=gin"), "GIN's MLP has it"
    assert "model.dropout" in notes("model=gin")
