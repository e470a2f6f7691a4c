"""Classification metrics: accuracy, macro F1, ROC-AUC (two classes).

Legend: n items, K classes.
"""

from __future__ import annotations

import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor

from runner.errors import ConfigError


def check_metric(name: str, num_classes: int) -> None:
    """Raise a ConfigError where the metric is not defined for so many classes."""
    if name == "roc_auc" and num_classes != 2:
        raise ConfigError(
            f"train.metric=roc_auc is for two classes, this graph has {num_classes}: use accuracy or macro_f1"
        )


def evaluate(name: str, logits: Tensor, labels: Tensor) -> float:
    """Return a metric as a share of 1.

    Args:
        name: ``accuracy``, ``macro_f1`` or ``roc_auc``.
        logits: float [n, K].
        labels: int64 [n], in 0 … K-1.

    Returns:
        The metric; NaN for no items, and for a ROC-AUC where only one class is present.
    """
    if not labels.numel():
        return float("nan")
    if name == "accuracy":
        return float((logits.argmax(1) == labels).float().mean())
    truth = labels.cpu().numpy()
    if name == "macro_f1":
        return float(f1_score(truth, logits.argmax(1).cpu().numpy(), average="macro", zero_division=0))
    if len(set(truth.tolist())) < 2:
        return float("nan")
    return float(roc_auc_score(truth, torch.softmax(logits.float(), 1)[:, 1].cpu().numpy()))
