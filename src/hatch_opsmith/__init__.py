"""Build hook of hatchling: `pip wheel .` and `python -m build` put built kernels into the wheel.

hatchling imports this plugin in every build where opsmith is installed. So it imports nothing until the hook
builds; a module inside of the package `opsmith` would import torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

PURE = "OPSMITH_PURE_WHEEL"
"""Variable that makes a pure wheel, whose kernels are built where they are first needed."""
OF_HATCHLING = (
    "dependencies",
    "enable-by-default",
    "require-runtime-dependencies",
    "require-runtime-features",
)
OPTIONS = {"package": str, "cpu": str, "cuda": str, "verify": bool, "pure": bool}
"""Options of the table `[tool.hatch.build.targets.wheel.hooks.opsmith]`, and the type of each."""
BUILD_FOLDER = "_kernels"
BUILT = (
    *(f"**/{BUILD_FOLDER}/{name}" for name in ("manifest.json", f"*.{'[0-9a-f]' * 16}.*")),
    f"**/.{BUILD_FOLDER}-*/*",  # of a build that was killed
)
"""Patterns of what `opsmith build` writes into a package: a wheel holds what this build makes, or nothing."""


class OpsmithBuildHook(BuildHookInterface[Any]):
    """Hook that runs `opsmith build` for a wheel, and gives the wheel the tag of the systems that run it.

    Options, in `[tool.hatch.build.targets.wheel.hooks.opsmith]`:
        package: Name or folder of the package, by default that of the project.
        cpu, cuda: Targets, as of `opsmith build`.
        verify: False to leave out the comparison with the references.
        pure: True for a wheel without built kernels, as `OPSMITH_PURE_WHEEL=1`.
    """

    PLUGIN_NAME = "opsmith"
    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the kernels; an editable install and a pure wheel have none."""
        self._refuse_unknown_options()
        if version == "editable" or self.target_name != "wheel":
            return
        self._leave_out_earlier_builds()
        if self._pure() or self._has_no_targets():
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="opsmith-wheel-")  # until the wheel is written
        folder = Path(self._scratch.name) / BUILD_FOLDER
        made = self._run_build(folder)
        package = str(made["package"]).partition(".")[0]
        build_data["force_include"][str(folder)] = f"{package}/{BUILD_FOLDER}"
        libraries = {f"{package}/{BUILD_FOLDER}/{path.name}": path for path in sorted(folder.glob("*.so"))}
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{self._platform(libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what only the wheel needs."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def _refuse_unknown_options(self) -> None:
        for name, value in self.config.items():
            if name in OF_HATCHLING:
                continue
            if name not in OPTIONS:
                self._abort(f"there is no option `{name}`; there are {', '.join(OPTIONS)}")
            if type(value) is not OPTIONS[name]:
                kind = "true or false" if OPTIONS[name] is bool else "text between quotes"
                self._abort(f"the option `{name}` must be {kind}, and is {value!r}")

    def _pure(self) -> bool:
        variable = os.environ.get(PURE, "")
        if variable not in ("", "0", "1"):
            self._abort(f"the environment variable {PURE} must be 1 or 0, and is {variable!r}")
        return variable == "1" or (variable == "" and bool(self.config.get("pure", False)))

    def _leave_out_earlier_builds(self) -> None:
        """Exclude the built kernels that lie in the working tree, above the project's own patterns."""
        ours, project = self.build_config.target_config, self.build_config.build_config
        ours["exclude"] = [*ours.get("exclude", project.get("exclude", [])), *BUILT]
        artifacts = ours.get("artifacts", project.get("artifacts", []))
        if artifacts:
            ours["artifacts"] = [*artifacts, *(f"!{each}" for each in BUILT)]

    def _has_no_targets(self) -> bool:
        """Return whether libraries for this system cannot be built ahead; the wheel is pure then."""
        from opsmith.build import processor  # imports torch

        if processor.levels():
            return False
        self.app.display_warning(
            f"opsmith: kernels are not built ahead on {processor.machine()}: the wheel is pure, and they are "
            "built where they are first needed"
        )
        return True

    def _run_build(self, folder: Path) -> dict[str, Any]:
        """Run `opsmith build` in a process of its own; its progress and messages go to stderr."""
        command = [sys.executable, "-m", "opsmith", "build", "--json", "--output", str(folder)]
        command += [self.config["package"]] if "package" in self.config else []
        for option in ("cpu", "cuda"):
            command += [f"--{option}", self.config[option]] if option in self.config else []
        command += ["--verify"] if self.config.get("verify", True) else []
        done = subprocess.run(command, cwd=self.root, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            self.finalize("", {}, "")
            differences = _differences(done.stdout)
            for difference in differences:
                self.app.display_error(difference)
            pure = f"{PURE}=1 makes a wheel without built kernels"
            self._abort(
                f"the kernels cannot be built (exit status {done.returncode}; the message stands above). "
                + ("Mend the kernels that differ from their references" if differences else pure)
            )
        held: dict[str, Any] = json.loads(done.stdout)
        for text in held.get("left_out", []):
            self.app.display_warning(f"opsmith: left out: {text}")
        return held

    def _platform(self, libraries: dict[str, Path]) -> str:
        """Return the platform tag of the wheel that gets these libraries, by their paths in it."""
        from opsmith.build.platform_tag import platform_tag  # imports torch

        files = self.build_config.builder.recurse_included_files()
        wheel = {Path(each.distribution_path).as_posix(): Path(each.path) for each in files}
        found = platform_tag(libraries.values(), {**wheel, **libraries})
        if found.reason:
            self.app.display_warning(
                f"opsmith: the wheel is for this system alone ({found.tag}): {found.reason}; {found.hint}"
            )
        return found.tag

    def _abort(self, message: str) -> None:
        self.app.abort(f"opsmith: {message}")


def _differences(printed: str) -> list[str]:
    """Return what `opsmith build --verify --json` found to differ; empty if it printed none."""
    try:
        return list(map(str, json.loads(printed)["verification"]["differences"]))
    except (ValueError, KeyError, TypeError):
        return []


@hookimpl
def hatch_register_build_hook() -> type[BuildHookInterface[Any]]:
    """Register the hook with hatchling."""
    return OpsmithBuildHook
