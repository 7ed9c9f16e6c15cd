"""Export a model with two operators of opsmith, for a program in C++ that runs it without Python.

Run `python examples/serving/export.py FOLDER`. It writes three files into the folder:

- `model.pt2`: the model, compiled by AOTInductor;
- `liboperators.so`: the kernels of its operators, for every torch from 2.11 on;
- `case.pt`: an input, and what PyTorch computes of it, to compare with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import opsmith
from opsmith.shipping import build_torch_library

CHANNELS, CLASSES = 16, 10


class Classifier(nn.Module):
    """A small classifier of images: involution, then a normalised mean of all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.involution = opsmith.ops.Involution2d(CHANNELS, kernel_size=3, channels_per_group=8)
        self.norm = opsmith.ops.RMSNorm(CHANNELS)
        self.classes = nn.Linear(CHANNELS, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [B, 10] of images [B, 3, H, W]."""
        pixels = self.involution(self.stem(images).relu())
        return self.classes(self.norm(pixels.mean((2, 3))))


def export(folder: Path) -> None:
    """Write the model, the library and a case into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Classifier().eval()
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        batch = torch.export.Dim("batch", min=2, max=64)
        program = torch.export.export(model, (images,), dynamic_shapes={"images": {0: batch}})
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        case = images[:3]
        torch.save([case, model(case)], folder / "case.pt")
    operators = [opsmith.ops.involution, opsmith.ops.rms_norm]
    library = build_torch_library(operators, folder / "liboperators.so")
    print(f"{library.path}: {', '.join(library.served)}")


if __name__ == "__main__":
    export(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
