"""Surveying Function classes: which can be adopted as they are, which need a word, and which are wrong."""

from __future__ import annotations

from opsmith.surveying.finding import Finding
from opsmith.surveying.session import survey

__all__ = ["Finding", "survey"]
