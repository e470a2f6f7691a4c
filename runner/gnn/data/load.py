"""A dataset config → the graph: planted, a file, or one of DGL's named sets, in that order."""

from __future__ import annotations

from pathlib import Path

from runner.errors import DataError, suggestion
from runner.gnn.data import files, named, planted
from runner.gnn.data.graph_data import GraphData, RawGraph
from runner.gnn.data.prepare import prepare
from runner.schema import DatasetConfig


def load(config: DatasetConfig) -> GraphData:
    """Load and prepare the graph that ``config`` names.

    Raises:
        DataError: for a name or file that is not there, or a file that is bad.
    """
    try:
        return prepare(_find(config), config)
    except PermissionError as error:
        raise DataError(f"{error.filename}: can't be read: {error.strerror}") from error


def _find(config: DatasetConfig) -> RawGraph:
    if config.path is not None:
        return files.load_file(Path(config.path), config.ids)
    if config.name == "planted":
        return planted.generate(config)
    if config.root is not None:
        found = files.find(Path(config.root), named.stems_of(config.name))
        if found is not None:
            return files.load_file(found, config.ids)
    if config.name == "file":
        raise DataError("dataset=file needs dataset.path=FILE, or dataset.root=DIR and dataset.name=STEM")
    if config.root is not None and config.name not in named.NODE_SETS and config.name not in named.GRAPH_SETS:
        raise DataError(
            f"dataset.name={config.name}: no such file in {config.root}; {suggestion(config.name, files.stems(Path(config.root)))}"
        )
    return named.load_named(config.name, config.download)
