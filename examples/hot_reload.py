"""A kernel in C++ that is edited while the program runs: in the cell of a notebook, and in a file."""

import linecache
import tempfile
from pathlib import Path

import torch

CELL = '''
import opsmith
from torch import Tensor

@opsmith.operator("examples::softsign")
def softsign(x: Tensor) -> Tensor:
    return x / (1 + x.abs())

softsign.samples(lambda make: [(make(3, 5),)])
softsign.kernel("cpu", cpp="""
#include <cmath>
template <class T>
void softsign(Contiguous<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] / (1 + x[i]);
}
""")
'''
session = {"__name__": __name__}


def run(cell: str) -> None:
    """Run a cell as a notebook does: its names stay, and errors know its lines."""
    linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(True), "<cell 1>")
    exec(compile(cell, "<cell 1>", "exec"), session)


def main() -> None:
    x = torch.tensor([-3.0, 1.0])
    run(CELL)
    print("wrong:    ", session["softsign"](x).tolist())  # without the absolute value
    run(CELL.replace("(1 + x[i])", "(1 + std::fabs(x[i]))"))
    softsign = session["softsign"]
    print("fixed:   ", softsign(x).tolist())
    torch.testing.assert_close(softsign(x), softsign.reference(x))

    file = Path(tempfile.mkdtemp()) / "softsign.cpp"
    text = softsign.specification.kernels[0].function.source.text
    file.write_text(text.replace("std::fabs(x[i])", "2"))
    softsign.kernel("cpu", cpp_file=file)
    print("in a file:", softsign(x).tolist())
    file.write_text(text)
    print("reloaded: ", softsign.reload()(x).tolist())


if __name__ == "__main__":
    main()
