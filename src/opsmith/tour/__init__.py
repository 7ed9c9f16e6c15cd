"""The tour: operators declared, checked, trained with and written down, on real input, start to end."""

from __future__ import annotations

from opsmith.tour.running import run_tour
from opsmith.tour.stage import Context, Stage, StageResult
from opsmith.tour.stages import STAGES

__all__ = ["STAGES", "Context", "Stage", "StageResult", "run_tour"]
