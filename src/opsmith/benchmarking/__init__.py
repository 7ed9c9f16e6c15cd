"""Benchmarks: times of an operator, its reference and baselines, compared with the machine's ceilings."""

from __future__ import annotations

from opsmith.benchmarking.benchmarker import benchmark
from opsmith.benchmarking.result import Benchmark
from opsmith.benchmarking.verdict import TimeChange, Verdict

__all__ = ["Benchmark", "TimeChange", "Verdict", "benchmark"]
