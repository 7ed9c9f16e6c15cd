"""What is wrong with a tensor that is not the right one: guesses, kept if fresh inputs bear them out."""

from __future__ import annotations

from opsmith.checking.diagnosis.diagnose import Diagnosis, diagnose, explain_difference
from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.diagnosis.observer import Observer

__all__ = ["Diagnosis", "Observation", "Observer", "diagnose", "explain_difference"]
