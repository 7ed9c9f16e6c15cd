"""Wheels that several modules of tests need, built once in a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from shipped_wheels import built_wheel, new_project, opsmith_project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def platform_wheel(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of that project, with built kernels."""
    return built_wheel(project, tmp_path_factory.mktemp("wheeled"))


@pytest.fixture(scope="session")
def opsmith_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of opsmith itself, with built kernels."""
    folder = tmp_path_factory.mktemp("opsmith")
    return built_wheel(opsmith_project(folder), folder, HATCH_BUILD_HOOKS_ENABLE="1")
