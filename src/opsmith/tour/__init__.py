"""Tour: operators are declared, checked, trained with, exported and documented, on real input."""

from __future__ import annotations

from opsmith.tour.runner import STAGES, run_tour
from opsmith.tour.stage import StageResult, TourContext, TourStage

__all__ = ["STAGES", "StageResult", "TourContext", "TourStage", "run_tour"]
