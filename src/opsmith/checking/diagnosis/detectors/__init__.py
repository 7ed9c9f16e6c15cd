"""Detectors: each tests one family of hypotheses about a wrong tensor on fresh inputs."""
