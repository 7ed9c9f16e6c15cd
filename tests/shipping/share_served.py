"""Program in which a library and the Python package compute the same operators.

Usage: share_served.py python|library LIBRARY: which of the two is first
"""

import importlib
import json
import sys

import torch

first, library = sys.argv[1:]
x = torch.arange(12.0).reshape(3, 4)


def message(call):  # type: ignore[no-untyped-def]
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if first == "library":
    torch.ops.load_library(library)
served = importlib.import_module("served_operators")
differing = importlib.import_module("differing_operator").declare(2)
if first == "python":
    served.moments(x)
    served.combined([x, x], [1.0, 1.0], [0, 1], [False, False])
    torch.ops.load_library(library)

found = {}
leaf = x.clone().requires_grad_()
torch.ops.served.scaled(leaf.T).sum().backward()
found["gradient"] = leaf.grad.tolist()
found["strides"] = [
    each(x.T).stride() for each in (torch.ops.served.scaled, served.scaled, torch.ops.served.scaled)
]
found["moments"] = [each.tolist() for each in torch.ops.served.moments(x)]
found["combined"] = served.combined([x, x], [1.0, 1.0], [0, 1], [False, False]).tolist()
y = x.clone()
found["returned"] = torch.ops.served.increase_(y, 2.0) is y
found["written"] = y.tolist() == (x + 2).tolist()
found["error"] = message(lambda: torch.ops.served.scaled(x, 1.0, torch.ones(3)))
found["served"] = message(lambda: torch.ops.served.differing(torch.ones(1)))
found["handle"] = message(lambda: differing(torch.ones(1)))
sys.stdout.write(json.dumps(found))
