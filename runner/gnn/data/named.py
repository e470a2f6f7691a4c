"""DGL's named datasets, downloaded into DGL's own folder, as RawGraph.

DGL unpickles some of the files that it downloads from its own server; files of the user's own never come this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import DataError, suggestion
from runner.gnn.data.graph_data import RawGraph, Split
from runner.gnn.data.tu import load_tu
from runner.gnn.dgl_compat import import_dgl


@dataclass(frozen=True)
class Named:
    """A dataset of DGL's: the class in ``dgl.data`` and other names that its file may have."""

    dgl_class: str
    aliases: tuple[str, ...] = ()


NODE_SETS: dict[str, Named] = {
    "cora": Named("CoraGraphDataset"),
    "citeseer": Named("CiteseerGraphDataset"),
    "pubmed": Named("PubmedGraphDataset"),
    "photo": Named("AmazonCoBuyPhotoDataset", ("amazon_co_buy_photo",)),
    "computers": Named("AmazonCoBuyComputerDataset", ("amazon_co_buy_computer",)),
    "cs": Named("CoauthorCSDataset", ("coauthor_cs",)),
    "physics": Named("CoauthorPhysicsDataset", ("coauthor_physics",)),
    "corafull": Named("CoraFullDataset"),
    "reddit": Named("RedditDataset"),
    "flickr": Named("FlickrDataset"),
    "wikics": Named("WikiCSDataset"),
    "minesweeper": Named("MinesweeperDataset"),
    "roman_empire": Named("RomanEmpireDataset"),
    "amazon_ratings": Named("AmazonRatingsDataset"),
    "tolokers": Named("TolokersDataset"),
    "questions": Named("QuestionsDataset"),
}
GRAPH_SETS = (
    "MUTAG",
    "PROTEINS",
    "DD",
    "ENZYMES",
    "NCI1",
    "NCI109",
    "PTC_MR",
    "IMDB-BINARY",
    "IMDB-MULTI",
    "COLLAB",
    "REDDIT-BINARY",
    "REDDIT-MULTI-5K",
)
_TU_URL = "https://www.chrsmrrs.com/graphkerneldatasets/{}.zip"


def stems_of(name: str) -> tuple[str, ...]:
    """Return the file stems under which a dataset may lie in the user's folder."""
    named = NODE_SETS.get(name)
    return (name, *(named.aliases if named else ()))


def load_named(name: str, download: bool) -> RawGraph:
    """Load a dataset that DGL knows.

    Args:
        name: a key of ``NODE_SETS``, or one of ``GRAPH_SETS``.
        download: whether DGL may fetch what it does not have.

    Raises:
        DataError: for a name that DGL has not, and where the download fails or is not allowed.
    """
    if name not in NODE_SETS and name not in GRAPH_SETS:
        raise DataError(
            f"dataset.name={name}: {suggestion(name, ['planted', *NODE_SETS, *GRAPH_SETS])}; "
            "a file: dataset.path=FILE, or dataset.root=DIR for DIR/NAME.npz and the like"
        )
    return _load_graph_set(name, download) if name in GRAPH_SETS else _load_node_set(name, download)


def _advice(name: str) -> str:
    return f"put {stems_of(name)[-1]}.npz or another of the known formats into a folder and name it: dataset.root=DIR"


def _load_node_set(name: str, download: bool) -> RawGraph:
    data = import_dgl().data
    base = getattr(data, NODE_SETS[name].dgl_class, None)
    if base is None:
        raise DataError(f"dataset.name={name}: this DGL has no {NODE_SETS[name].dgl_class}; {_advice(name)}")

    def refuse(_: Any) -> None:
        raise DataError(f"dataset.name={name} is not in DGL's folder and dataset.download=false; {_advice(name)}")

    kind = base if download else type(base.__name__, (base,), {"download": refuse})
    try:
        dataset = kind(verbose=False)
    except DataError:
        raise
    except Exception as error:  # DGL lets through whatever requests, zipfile, pickle and scipy raise
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"dataset.name={name}: DGL could not download or read it ({reason}); {_advice(name)}"
        ) from error
    return _from_dgl(name, dataset)


def _from_dgl(name: str, dataset: Any) -> RawGraph:
    graph = dataset[0]
    src, dst = graph.edges(order="eid")
    masks = [graph.ndata.get(f"{part}_mask") for part in ("train", "val", "test")]
    splits: tuple[Split, ...] = ()
    if all(mask is not None for mask in masks):
        columns = [mask.reshape(graph.num_nodes(), -1).bool() for mask in masks]
        num_splits = max(column.shape[1] for column in columns)
        picked = [
            [column[:, min(index, column.shape[1] - 1)].nonzero().flatten() for column in columns]
            for index in range(num_splits)
        ]
        splits = tuple(Split(train=train, val=val, test=test) for train, val, test in picked)
    return RawGraph(
        name=name,
        src=src.long(),
        dst=dst.long(),
        num_nodes=graph.num_nodes(),
        features=graph.ndata["feat"].float(),
        labels=graph.ndata["label"].long(),
        splits=splits,
        notes=(f"DGL's {type(dataset).__name__}",),
    )


def _load_graph_set(name: str, download: bool) -> RawGraph:
    """DGL's own TU class fails on numpy 2.4, so its archive is read by our loader."""
    data = import_dgl().data
    path = Path(data.utils.get_download_dir()) / f"{name}.zip"
    if not path.is_file():
        if not download:
            raise DataError(f"dataset.name={name} is not in DGL's folder and dataset.download=false; {_advice(name)}")
        try:
            data.utils.download(_TU_URL.format(name), path=str(path), log=False)
        except Exception as error:
            path.unlink(missing_ok=True)
            reason = " ".join(str(error).split())[:160]
            raise DataError(f"dataset.name={name}: the download failed ({reason}); {_advice(name)}") from error
    return load_tu(path)
