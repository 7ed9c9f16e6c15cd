"""The benchmark face: how fast is this operator, beside what, and how far from what the machine can do?"""

from __future__ import annotations

from opsmith.benchmarking.result import Benchmark
from opsmith.benchmarking.session import benchmark
from opsmith.benchmarking.verdict import Change, Verdict

__all__ = ["Benchmark", "Change", "Verdict", "benchmark"]
