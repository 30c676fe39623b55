"""Measurements side by side in one run: speed and memory of every routing, and of what everyone writes."""

from torchcaps.bench.report import run_bench

__all__ = ["run_bench"]
