"""Built CUDA kernels of a package: which image a GPU gets, without NVRTC, by a driver on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import forget, on_cpu
from packaged_kernels import PACKAGE, build_into, edit_manifest, source_package

import opsmith
from opsmith import errors
from opsmith.build import manifest, packaged
from opsmith.core import missing_kernels
from opsmith.kernels.cuda import nvrtc
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.packaged import MAGIC, gpu_misfit, gpu_rank
from opsmith.kernels.runtime.driver import Driver, DriverError
from opsmith.shipping.builder import staged_build
from opsmith.shipping.targets import BuildTargets

X = torch.tensor([1.0, 2.0, 3.0])
EVERY = ("sm_80", "sm_90", "compute_90")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "_kernels"
    build_into(folder, cuda="sm_80,sm_90")
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "_kernels"
    shutil.copytree(built, copy)
    packaged._warned.clear()
    monkeypatch.setattr(missing_kernels, "_warned", False)
    forget(dry=False)
    return copy


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())


@pytest.fixture
def shifted() -> Iterator[Any]:
    source_package()
    operator = opsmith.find_operator("scaled_package::shifted")
    on_cpu(operator)
    yield operator
    operator.reload()


def kernel_of(operator: Any) -> CudaKernel:
    return on_cpu(operator)


def test_the_runtime_lies_beside_cuda_kernels(built: Path) -> None:
    languages = [each["language"] for each in json.loads((built / "manifest.json").read_text())["files"]]
    assert languages.count("runtime") == 1


def test_without_a_compiler_a_package_is_built_without_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    targets = BuildTargets.of("none", "sm_90")
    with staged_build(source_package(), targets, tmp_path / "_kernels") as made:
        assert {each.language for each in made.files} == {"CUDA"}
        (reason,) = made.left_out
    assert reason.startswith("there is no C++ compiler; ")


@pytest.mark.usefixtures("no_nvrtc")
def test_an_image_for_the_gpu_is_loaded_without_nvrtc(folder: Path, shifted: Any) -> None:
    with packaged.looking_in(PACKAGE, folder, EVERY):
        shifted.reload()
        assert torch.equal(shifted(X), X + 3)
    assert shifted.explain(X).origin == "built into the package for sm_90"
    (loaded,) = kernel_of(shifted).functions.loaded.values()
    assert (loaded.cubin.max_threads, loaded.cubin.resources.registers > 0) == (128, True)


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (EVERY, ["sm_90", "compute_90"]),
        (("sm_80", "compute_90"), ["compute_90"]),
        (("sm_80",), []),
    ],
    ids=["cubin first", "PTX", "an older GPU's"],
)
def test_which_files_fit_a_gpu(
    targets: tuple[str, ...], chosen: list[str], folder: Path, shifted: Any
) -> None:
    with packaged.looking_in(PACKAGE, folder, targets):
        shifted.reload()
        found = kernel_of(shifted).packaged("sm_90")
    assert list(found.targets) == chosen
    images = [image.cubin for _, image in found.images("shifted<float, (3)>")]
    assert [each.origin.rpartition(" ")[2] for each in images] == chosen
    for each in images:
        is_ptx = "compute" in each.origin
        assert each.image[:4] == (b"//\n/" if is_ptx else b"\x7fELF")
        assert each.image.endswith(b"\0") or not is_ptx


def test_rules_of_compatibility() -> None:
    def file(target: str) -> manifest.BuiltFile:
        return manifest.BuiltFile(operator="", language="CUDA", digest="", abi=1, target=target)

    fits = {
        gpu: [each for each in TARGETS if gpu_misfit(file(each), gpu) is None]
        for gpu in ("sm_80", "sm_86", "sm_90", "sm_103", "sm_120")
    }
    assert fits == {
        "sm_80": ["sm_80", "compute_80"],
        "sm_86": ["sm_80", "sm_86", "compute_80"],
        "sm_90": ["compute_80", "sm_90a", "compute_90"],
        "sm_103": ["compute_80", "compute_90", "sm_100f", "sm_100"],
        "sm_120": ["compute_80", "compute_90"],
    }
    assert [gpu_misfit(file(each), "") for each in TARGETS] == [None] * len(TARGETS)
    assert gpu_misfit(file("gfx90a"), "") == "built for gfx90a, but this GPU is of NVIDIA"
    assert gpu_misfit(file("gfx90a"), "sm_90") == "built for gfx90a, but this GPU is sm_90"
    ranked = sorted((file(each) for each in ("compute_80", "sm_80", "compute_90", "sm_86")), key=gpu_rank)
    assert [each.target for each in ranked] == ["sm_86", "sm_80", "compute_90", "compute_80"]


TARGETS = ("sm_80", "sm_86", "compute_80", "sm_90a", "compute_90", "sm_100f", "sm_100", "sm_100a")


def test_what_was_not_built_is_compiled(folder: Path, shifted: Any) -> None:
    longer = torch.ones(5)
    with packaged.looking_in(PACKAGE, folder, EVERY):
        shifted.reload()
        assert torch.equal(shifted(longer), longer + 5)
    assert shifted.explain(longer).origin in ("from the cache", "compiled now")


def test_explain_says_where_the_instances_of_a_call_came_from(folder: Path, shifted: Any) -> None:
    longer = torch.ones(5)
    with packaged.looking_in(PACKAGE, folder, EVERY):
        shifted.reload()
        assert shifted.explain(X).origin == "built into the package for sm_90"  # before it is loaded
        for x in (X, longer):
            assert torch.equal(shifted(x), x + len(x))
        assert shifted.explain(X).origin == "built into the package for sm_90"
        assert shifted.explain(longer).origin in ("from the cache", "compiled now")


def test_after_a_build_a_process_uses_built_kernels_again(folder: Path, shifted: Any, tmp_path: Path) -> None:
    with packaged.looking_in(PACKAGE, folder, EVERY):
        shifted.reload()
        build_into(tmp_path / "others", cuda="sm_90")
        assert kernel_of(shifted).packaged("sm_90").targets == ("sm_90", "compute_90")
        assert kernel_of(shifted).packaged().targets == ("sm_90", "sm_80", "compute_90")


@pytest.mark.usefixtures("no_nvrtc")
def test_without_nvrtc_what_was_not_built_is_the_reference_s(folder: Path, shifted: Any) -> None:
    longer = torch.ones(5)
    with packaged.looking_in(PACKAGE, folder, EVERY):
        shifted.reload()
        with pytest.warns(
            RuntimeWarning, match="no built kernels for float32, N=5; .*`opsmith doctor` shows"
        ):
            assert torch.equal(shifted(longer), longer + 5)
        assert torch.equal(shifted(X), X + 3)
        assert shifted.explain(X).origin == "built into the package for sm_90"


def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver refuse the first image, as one that is older than it."""
    load, refused = Driver.load, []

    def refuse_once(self: Driver, image: bytes, name: str) -> int:
        if refused:
            return load(self, image, name)
        refused.append(name)
        raise DriverError("cuModuleLoadData", 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(Driver, "load", refuse_once)  # an instance would keep what is undone


def test_an_image_that_the_driver_refuses_is_compiled_here(
    folder: Path, shifted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch)
    with packaged.looking_in(PACKAGE, folder, ("sm_90",)):
        shifted.reload()
        with pytest.warns(
            RuntimeWarning, match=r"sm_90.*images is not used: the driver does not load this file: cuMod"
        ):
            assert torch.equal(shifted(X), X + 3)
    assert shifted.explain(X).origin in ("from the cache", "compiled now")


@pytest.mark.usefixtures("no_nvrtc")
def test_without_nvrtc_the_reference_computes_in_its_place(
    folder: Path, shifted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch)
    with packaged.looking_in(PACKAGE, folder, ("sm_90",)):
        shifted.reload()
        with pytest.warns(RuntimeWarning) as warned:
            assert torch.equal(shifted(X), X + 3)
        assert shifted.explain(X).forward.startswith("reference")
        monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
        shifted.forget_calls()
        with pytest.raises(errors.KernelRefusedError, match=r"no NVRTC.*the driver does not load this file"):
            shifted(X)
    assert [str(each.message).count("the driver does not load this file") for each in warned] == [1, 1]
    assert "the reference runs in place of its kernel in CUDA" in str(warned[1].message)


@pytest.mark.usefixtures("no_nvrtc")
def test_images_that_are_truncated_are_named_where_the_reference_computes(
    folder: Path, shifted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in folder.glob("*.images"):
        path.write_bytes(b"")
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
    with packaged.looking_in(PACKAGE, folder, EVERY):
        shifted.reload()
        with pytest.warns(RuntimeWarning), pytest.raises(errors.KernelRefusedError) as caught:
            shifted(X)
    got = str(caught.value.got)
    assert got.index("is not used: it has 0 of ") < got.index("built for sm_80, but this GPU is sm_90")


def test_a_description_that_is_damaged_is_not_used(folder: Path, shifted: Any) -> None:
    def edit(held: dict[str, Any]) -> None:
        for each in held["files"]:
            for instance in each["instances"].values():
                instance["resources"] = {"registers": 1, "stars": 2}

    edit_manifest(folder, edit)
    with packaged.looking_in(PACKAGE, folder, ("sm_90",)):
        shifted.reload()
        with pytest.warns(RuntimeWarning, match="its manifest is damaged: .*stars"):
            assert torch.equal(shifted(X), X + 3)


def test_a_file_of_images_is_taken_for_no_library(folder: Path) -> None:
    assert all(path.read_bytes().startswith(MAGIC) for path in folder.glob("*.images"))
