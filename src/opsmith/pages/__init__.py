"""Pages: all that is known about an operator, in one file that asks no network for anything."""

from __future__ import annotations

from opsmith.pages.paging import page

__all__ = ["page"]
