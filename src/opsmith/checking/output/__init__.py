"""Output of a report: text, terminal, HTML, JSON, and scripts that reproduce failures."""
