"""Task ``kernels``: every op of ours against other libraries, on generated graphs and on the files of ``dataset.root``.

Each case is computed once by everyone and compared, then timed in turns in this one process. A slower kernel is shown as slower.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from runner.errors import ConfigError, DataError, VerificationError, suggestion
from runner.gnn.data import files, planted
from runner.gnn.data.graph_data import RawGraph
from runner.gnn.kernel_peers import has_pyg
from runner.kernels.adjacency import Adjacency
from runner.kernels.formats import seconds
from runner.kernels.ops import spmm
from runner.kernels.ops.backend import has_kernels, seconds_compiling
from runner.kernels.verify import relative_difference
from runner.progress import Bar
from runner.results import fingerprint, spread
from runner.schema import KERNEL_HEADS, KERNEL_OPS, DatasetConfig
from runner.tasks.context import Context
from runner.tasks.kernel_cases import Case, GraphCases
from runner.tasks.measure import copy_bandwidth, in_turns, peak_memory
from runner.units import format_seconds

PLANTED = {
    "planted_small": DatasetConfig(num_nodes=4000, num_communities=100, mean_degree=12, num_features=1),
    "planted_large": DatasetConfig(num_nodes=50_000, num_communities=800, mean_degree=16, num_features=1),
}
_FP64_TOLERANCE, _BF16_TOLERANCE = 1e-9, 5e-2


def run(context: Context) -> dict[str, Any]:
    """Run the task; returns its part of the result record."""
    config = context.config
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and device.type != "cuda":
        raise ConfigError("device=cuda: torch sees no GPU; use device=cpu or device=auto")
    backend = device.type if has_kernels(device) else "torch"
    bandwidth = copy_bandwidth(device)
    context.folder.update(fingerprint=fingerprint(config, ""), device=str(device))
    pyg = "a peer" if has_pyg() else "not installed (extra bench)"
    context.say(f"{backend} kernels on {device}; a copy moves {bandwidth / 1e9:.1f} GB/s; PyG is {pyg}")
    alternating = alternate(device)
    context.say(
        f"1000 small products, each after a torch op: median {format_seconds(alternating['median_s'])}, 99 of 100 within "
        f"{format_seconds(alternating['p99_s'])}, slowest {format_seconds(alternating['max_s'])}"
    )
    records = list(_records(context, device, backend, bandwidth))
    summary = _summary(records)
    _report(context, records, summary)
    return {
        "cases": records,
        "summary": summary,
        "copy_bytes_per_s": bandwidth,
        "alternating_calls": alternating,
        "compile_s": seconds_compiling(device),
    }


def alternate(device: torch.device, num_calls: int = 1000) -> dict[str, float]:
    """Time small calls of ours with torch's parallel ops between them: two thread pools that spin against each other would stall."""
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, 1000, (2, 16_000), generator=generator)
    graph = Adjacency.from_edges(src, dst, 1000, 1000).to(device)
    x, weight = torch.randn(1000, 64, device=device), torch.randn(64, 64, device=device)

    def both() -> Tensor:
        return spmm(graph, torch.relu(x @ weight))

    for _ in range(20):
        both()
    times = sorted(seconds(both, device) for _ in range(num_calls))
    return {
        "median_s": times[num_calls // 2],
        "p99_s": times[num_calls * 99 // 100],
        "max_s": times[-1],
        "num_calls": num_calls,
    }


def _records(context: Context, device: torch.device, backend: str, bandwidth: float) -> Iterator[dict[str, Any]]:
    task = context.config.task
    ops = list(task.ops or KERNEL_OPS)
    names = _graph_names(context.config.dataset, list(task.graphs))
    with Bar(context.console, "kernels", len(names) * len(ops) * len(task.dtypes)) as bar:
        for name in names:
            raw = _load(name, context.config.dataset)
            for dtype in task.dtypes:
                cases = GraphCases(raw, device, getattr(torch, dtype))
                for op in ops:
                    for case in cases.of(op, list(task.num_features)):
                        record = _measure(context, case, name, dtype, device, backend, bandwidth)
                        context.sinks.metrics({key: record[key] for key in _LOGGED})
                        yield record
                        gc.collect()
                    bar.step(f"{name} {op}")


_LOGGED = (
    "op",
    "graph",
    "num_features",
    "dtype",
    "backend",
    "best_peer",
    "median_s",
    "ratio_vs_best_peer",
    "roofline_share",
)


def _graph_names(dataset: DatasetConfig, wanted: list[str]) -> list[str]:
    """The graphs asked for, or all: generated ones, and every graph file of ``dataset.root``."""
    root = Path(dataset.root) if dataset.root else None
    if root is not None and not root.is_dir():
        raise DataError(f"dataset.root={root}: no such folder")
    known = [*PLANTED, *(files.stems(root) if root is not None else [])]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"task.graphs={name}: {suggestion(name, known)}")
    return wanted or known


def _load(name: str, dataset: DatasetConfig) -> RawGraph:
    if name in PLANTED:
        return planted.generate(PLANTED[name])
    assert dataset.root is not None
    found = files.find(Path(dataset.root), (name,))
    assert found is not None
    return files.load_file(found, dataset.ids)


def _measure(
    context: Context, case: Case, graph: str, dtype: str, device: torch.device, backend: str, bandwidth: float
) -> dict[str, Any]:
    """Compare a case's results, time them in turns, and return its record."""
    works = {"ours": case.ours, **case.peers}
    differences = _differences(case)
    limit = {"float64": _FP64_TOLERANCE, "bfloat16": _BF16_TOLERANCE}.get(dtype, case.tolerance)
    # some round every step to bf16 and are far off themselves: there, one that agrees will do
    suspects = [peer for peer, difference in differences.items() if difference > limit]
    if suspects and (dtype != "bfloat16" or len(suspects) == len(differences)):
        what = f"{case.op} on {graph}, width {case.num_features}, {dtype}"
        peer = suspects[0]
        raise VerificationError(f"{what}: ours and {peer}'s differ by {differences[peer]:.1e} of the largest entry")
    peaks = {name: peak_memory(work, device) for name, work in works.items()}
    task = context.config.task
    times = {
        name: spread(samples) for name, samples in in_turns(works, task.num_rounds, device, task.case_seconds).items()
    }
    best = min(case.peers, key=lambda peer: times[peer]["median"], default=None)
    ours = times["ours"]
    return {
        "op": case.op,
        "graph": graph,
        "num_features": case.num_features,
        "num_heads": KERNEL_HEADS if any(word in case.op for word in ("head", "softmax", "attention", "sddmm")) else 1,
        "direction": case.direction,
        "dtype": dtype,
        "backend": backend,
        "best_peer": best,
        "median_s": ours["median"],
        "q1_s": ours["q1"],
        "q3_s": ours["q3"],
        "num_rounds": ours["n"],
        "ratio_vs_best_peer": times[best]["median"] / ours["median"] if best else None,
        "roofline_share": case.floor_bytes / bandwidth / ours["median"],
        "floor_bytes": case.floor_bytes,
        "bytes_per_s": case.floor_bytes / ours["median"],
        "peak_memory_bytes": peaks["ours"],
        "peers": {
            peer: {f"{key}_s": times[peer][key] for key in ("median", "q1", "q3")}
            | {"peak_memory_bytes": peaks[peer], "difference": differences[peer]}
            for peer in case.peers
        },
    }


def _differences(case: Case) -> dict[str, float]:
    """Return each library's largest difference from ours; a maximum over no edges is an infinity to some, and 0 to us."""
    expected = _tensors(case.ours())
    found = {
        peer: [part.masked_fill(part.isinf(), 0) for part in _tensors(work())] for peer, work in case.peers.items()
    }
    return {peer: max(map(relative_difference, expected, parts), default=0.0) for peer, parts in found.items()}


def _tensors(result: Any) -> list[Tensor]:
    return [part.detach() for part in (result if isinstance(result, tuple) else (result,))]


def _summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and worst case of each op and dtype, against the best peer of each case and against every peer."""
    rows = []
    for op, dtype in dict.fromkeys((record["op"], record["dtype"]) for record in records):
        chosen = [
            record for record in records if (record["op"], record["dtype"]) == (op, dtype) and record["best_peer"]
        ]
        if not chosen:
            continue
        worst = min(chosen, key=lambda record: record["ratio_vs_best_peer"])
        by_peer: dict[str, list[float]] = {}
        for record in chosen:
            for peer, times in record["peers"].items():
                by_peer.setdefault(peer, []).append(times["median_s"] / record["median_s"])
        rows.append(
            {
                "op": op,
                "dtype": dtype,
                "num_cases": len(chosen),
                "geomean_vs_best_peer": _geomean([record["ratio_vs_best_peer"] for record in chosen]),
                "worst_vs_best_peer": worst["ratio_vs_best_peer"],
                "worst_case": f"{worst['graph']}, {worst['num_features']}",
                "geomean_vs_peer": {peer: _geomean(ratios) for peer, ratios in by_peer.items()},
                "geomean_roofline_share": _geomean([record["roofline_share"] for record in chosen]),
            }
        )
    return rows


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _report(context: Context, records: list[dict[str, Any]], summary: list[dict[str, Any]]) -> None:
    columns = ["op", "graph", "F", "dtype", "ours", "quartiles", "best peer", "its time", "ratio", "roofline"]
    cells = [
        [
            record["op"],
            record["graph"],
            str(record["num_features"]),
            record["dtype"],
            format_seconds(record["median_s"]),
            f"{format_seconds(record['q1_s'])} – {format_seconds(record['q3_s'])}",
            record["best_peer"] or "none",
            format_seconds(record["peers"][record["best_peer"]]["median_s"]) if record["best_peer"] else "",
            f"{record['ratio_vs_best_peer']:.2f}×" if record["best_peer"] else "",
            f"{record['roofline_share']:.0%}",
        ]
        for record in records
    ]
    context.show(_table("cases", columns, cells))
    heads = ["op", "dtype", "cases", "geomean vs best peer", "worst", "worst case", "geomean by peer", "roofline"]
    rows = [
        [
            row["op"],
            row["dtype"],
            str(row["num_cases"]),
            f"{row['geomean_vs_best_peer']:.2f}×",
            f"{row['worst_vs_best_peer']:.2f}×",
            row["worst_case"],
            ", ".join(f"{peer} {ratio:.2f}×" for peer, ratio in row["geomean_vs_peer"].items()),
            f"{row['geomean_roofline_share']:.0%}",
        ]
        for row in summary
    ]
    context.show(_table("ours against the best peer of each case", heads, rows))
    context.sinks.table("cases", columns, cells)
    context.sinks.table("kernels", heads, rows)
    context.sinks.summary(
        {f"{row['op']}/{row['dtype']}/geomean_vs_best_peer": row["geomean_vs_best_peer"] for row in summary}
    )


def _table(title: str, columns: list[str], cells: list[list[str]]) -> Table:
    table = Table(*columns, title=title)
    for cell in cells:
        table.add_row(*cell)
    return table
