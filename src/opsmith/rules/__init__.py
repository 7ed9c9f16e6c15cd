"""Pages of the rules: each error class, each cause of a failure and each property that `check` tests."""

from __future__ import annotations

from opsmith.rules.rule import Rule, index, pages, rule, rules

__all__ = ["Rule", "index", "pages", "rule", "rules"]
