"""A second device for tests, `standin:0`: memory of the host under the rules of a GPU; see standin.cpp.

It is a plugin of pytest, `-p standin`, which comes before each conftest.py: autograd knows the devices alone
that were there at the first backward of the process.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import torch

from opsmith.config import cache_directory

SOURCE = Path(__file__).with_name("standin.cpp")
TORCH = Path(torch.__file__).parent


def built() -> Path:
    """The library of the device, compiled in half a minute unless the cache of the tests has it."""
    key = sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = cache_directory() / f"standin-{key}" / "standin.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
        scratch = library.with_suffix(".new")
        command = ["c++", "-O0", "-std=c++20", "-shared", "-fPIC", *include, str(SOURCE), "-o", str(scratch)]
        subprocess.run([*command, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"], check=True)
        scratch.rename(library)
    return library


def device_module() -> ModuleType:
    """What torch calls as `torch.standin`."""
    module = ModuleType("torch.standin")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "device": lambda index: nullcontext(),
        "_is_in_bad_fork": lambda: False,
        "manual_seed": torch.ops.standin.seed,
        "manual_seed_all": torch.ops.standin.seed,
        "get_rng_state": lambda device=0: torch.ops.standin.get_state(),
        "set_rng_state": lambda state, device=0: torch.ops.standin.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def standin() -> torch.device:
    """The device, which the process has from here on."""
    torch.ops.load_library(str(built()))
    torch.utils.rename_privateuse1_backend("standin")
    sys.modules["torch.standin"] = module = device_module()
    torch._register_device_module("standin", module)
    return torch.device("standin:0")


DEVICE = standin()
