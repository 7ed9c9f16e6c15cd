"""Program that loads a library and calls its operators, in a process without opsmith.

Usage: call_served.py LIBRARY CASES OUTCOMES
"""

import copy
import sys

import torch

library, cases, outcomes = sys.argv[1:]
torch.ops.load_library(library)
found = []
for name, args, kwargs in torch.load(cases):
    args = copy.deepcopy(args)  # cases share tensors, and some write
    namespace, _, operator = name.partition("::")
    try:
        result = getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)
    except RuntimeError as error:
        found.append(str(error))
    else:
        results = list(result) if isinstance(result, tuple) else [] if result is None else [result]
        found.append((results, args))
assert not any(each.split(".")[0] == "opsmith" for each in sys.modules)
torch.save((str(torch.__version__), found), outcomes)
