"""Pages: everything about an operator in one HTML file that needs no network."""

from __future__ import annotations

from opsmith.pages.writer import page

__all__ = ["page"]
