"""What is wrong with a tensor: hypotheses, each kept only if fresh inputs bear it out."""

from __future__ import annotations

from opsmith.checking.diagnosis.diagnosing import Diagnosis, diagnose
from opsmith.checking.diagnosis.observation import Observation

__all__ = ["Diagnosis", "Observation", "diagnose"]
