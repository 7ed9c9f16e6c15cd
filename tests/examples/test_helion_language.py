"""The example of a language in a package of its own, with Helion or a stand-in for it."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking.properties import PROPERTIES, USUAL
from opsmith.kernels import languages

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "helion_language"


class RefMode(enum.Enum):
    OFF = "off"
    EAGER = "eager"


@dataclasses.dataclass(frozen=True)
class Settings:
    ref_mode: RefMode = RefMode.OFF


class Kernel:
    """What the example uses of `helion.Kernel`; without a GPU it computes in reference mode alone."""

    def __init__(self, fn: Callable[..., Any], *, configs: Any = None, settings: Settings) -> None:
        self.fn, self.configs, self.settings = fn, configs, settings

    def __call__(self, *args: Any) -> Any:
        assert self.settings.ref_mode is RefMode.EAGER
        return self.fn(*args)


def stand_in() -> dict[str, types.ModuleType]:
    helion, language = types.ModuleType("helion"), types.ModuleType("helion.language")
    parts = {
        "Kernel": Kernel,
        "RefMode": RefMode,
        "kernel": lambda **_: lambda fn: Kernel(fn, settings=Settings()),
    }
    vars(helion).update(parts, language=language)
    vars(language).update(tile=lambda size: [slice(0, size)])
    return {"helion": helion, "helion.language": language}


MISSING = importlib.util.find_spec("helion") is None


@pytest.fixture(
    params=["stand-in", pytest.param("helion", marks=pytest.mark.skipif(MISSING, reason="no Helion"))]
)
def example(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    """The example's operator, with the package installed as its pyproject.toml says."""
    for name, module in (stand_in() if request.param == "stand-in" else {}).items():
        monkeypatch.setitem(sys.modules, name, module)
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    info = tmp_path / "opsmith_helion-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: opsmith-helion\nVersion: 0.1.0\n")
    points = project["entry-points"][languages.GROUP]
    (info / "entry_points.txt").write_text(
        f"[{languages.GROUP}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("rms_norm")
    for name in ("rms_norm", "opsmith_helion"):
        sys.modules.pop(name, None)
    languages._loaded.pop("helion", None)
    PROPERTIES.pop("helion", None)
    USUAL[:] = [name for name in USUAL if name != "helion"]


def test_it_passes_the_check(example: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    assert "run in Helion's reference mode, not on a GPU: " in capsys.readouterr().out


def test_a_kernel_without_its_eps_fails(example: types.ModuleType) -> None:
    helion = sys.modules["helion"]

    @helion.kernel(autotune_effort="none", static_shapes=False)
    def wrong(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(torch.mean(wide * wide, dim=-1))
        return (wide * scale[:, None] * weight.to(torch.float32)).to(x.dtype)

    @opsmith.operator("helion_example::wrong")
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 0.1) -> Tensor:
        return example.rms_norm.specification.reference(x, weight, eps)

    rms_norm.samples(lambda make: [(make(4, 8), make(8))])
    report = opsmith.check(rms_norm.kernel("cuda", helion=wrong), only=["helion"], effort="quick")
    assert [each.property for each in report.failures] == ["helion"]
    assert report.failures[0].where.startswith(f"{__file__}:")


def test_without_a_gpu_the_reference_computes_and_explain_says_so(example: types.ModuleType) -> None:
    explained = example.rms_norm.explain(torch.ones(2, 3), torch.ones(3))
    assert explained.forward.startswith("reference, ")
    assert len(explained.rejected) == 1


def refused(kernel: Any, **options: Any) -> errors.OpsmithError:
    @opsmith.operator("helion_example::refused")
    def refused(x: Tensor) -> Tensor:
        return x

    with pytest.raises(errors.OpsmithError) as caught:
        refused.kernel("cuda", helion=kernel, **options)
    assert caught.value.operator == "helion_example::refused"
    assert all((caught.value.argument, caught.value.expected, caught.value.got, caught.value.hint))
    return caught.value


def test_what_it_refuses(example: types.ModuleType) -> None:
    assert refused(len).problem == "`helion=` is given something that is not a kernel in Helion"
    other = refused(example.rms_norm_kernel)
    assert other.problem == "the parameters of the kernel in Helion are not the operator's arguments"
    assert other.got == "(x, weight, eps)"
    assert refused(example.rms_norm_kernel, grid=3).problem == "a kernel in Helion is given unknown options"


def test_it_is_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.iterdir() if path.is_file()) < 250
