"""Diagnosis of wrong tensors: hypotheses about the cause, tested on fresh inputs."""

from __future__ import annotations

from opsmith.checking.diagnosis.diagnose import Diagnosis, diagnose, explain_difference
from opsmith.checking.diagnosis.observation import Observation, Observer

__all__ = ["Diagnosis", "Observation", "Observer", "diagnose", "explain_difference"]
