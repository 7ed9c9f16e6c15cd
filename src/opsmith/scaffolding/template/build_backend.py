"""Build back end: hatchling, whose hook builds kernels only for a wheel.

An editable install has no built kernels. So its build needs neither opsmith nor torch.
"""

import os
from typing import Any

from hatchling import build


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    os.environ["HATCH_BUILD_NO_HOOKS"] = "true"
    return build.get_requires_for_build_editable(config_settings)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    os.environ["HATCH_BUILD_NO_HOOKS"] = "true"
    return build.build_editable(wheel_directory, config_settings, metadata_directory)


def __getattr__(name: str) -> Any:
    """Return a function of hatchling's back end, which builds wheels and source distributions."""
    return getattr(build, name)
