"""Task ``algebra``: what rewriting and fusion give, over graphs × models, in training and inference, against DGL and PyG.

Rows are kept as they are measured; a run that was stopped is taken up with ``task.resume``. Losses stay in the table.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from runner.tasks.algebra_report import show, summarize
from runner.tasks.algebra_rows import measure_rows_of
from runner.tasks.context import Context
from runner.tasks.table import Row, measure_rows

_OPTIONS = (
    "num_warmup",
    "num_steps",
    "step_seconds",
    "peers",
    "ablate",
    "exhaustive",
)  # of the task, that rows depend on


def run(context: Context) -> dict[str, Any]:
    """Run the task; returns its part of the result record."""
    rows = measure_rows(context, _OPTIONS, measure_rows_of, partial(_tell, context))
    summary = summarize(rows)
    show(context, rows, summary)
    return {"rows": rows, "summary": summary}


def _tell(context: Context, row: Row, is_known: bool) -> None:
    peer = row["best_peer"]
    ours, theirs = (row["step_ms"][name]["median"] for name in ("fused", peer))
    name = f"{row['dataset']}, {row['model']} {row['num_layers']}×{row['hidden']}, {row['mode']}"
    context.say(
        f"{name}: fused {ours:.2f} ms, {row['speedup_vs_best_peer']:.2f}× the best peer's speed ({peer}: {theirs:.2f} ms), peak memory "
        f"{row['peak_memory_ratio_vs_dgl']:.2f} of DGL's" + (" (measured in the run resumed)" if is_known else "")
    )
    told = (
        "dataset",
        "model",
        "hidden",
        "mode",
        "best_peer",
        "speedup_vs_best_peer",
        "peak_memory_ratio_vs_dgl",
        "max_error",
    )
    context.sinks.metrics({name: row[name] for name in told})
