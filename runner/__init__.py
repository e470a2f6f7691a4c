"""Gearsail: a declarative runner for GNN systems experiments."""

__version__ = "0.1.0"
