"""Reading of the files that a kernel's text names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opsmith.build.source_text import SourceLanguage, find_function, includes_of
from opsmith.errors import KernelSourceError
from opsmith.kernels.cpp.source import CPP
from opsmith.kernels.cuda.source import CUDA

TEXT = """
template <class T, int N> struct Tile { T value[N]; };
template <typename U> U twice(U x) { return add(x, x); }
static void add(int x); inline void odd(int x) { add(x); }
template <class T>
inline  void add (View<T, 1> x, Result<T, 1> y) { odd(1); }
"""
KERNELS = """
__device__ int scaled(int x) { return other(x) + scaled_(x); }
template <class T, int BLOCK = 8>
static __global__ void __launch_bounds__(int{128}, (1 + 1)) scaled(T* x) { other(1); }
extern "C" void __global__ other(int* x) { if (x) { scaled_(2); } }
template <int N> __global__ __maxnreg__(32) void scaled_(int* x) {}
template <class T>
__launch_bounds__(Config<T>{}.threads) __global__ void bounded(T* x) {}
"""


def test_a_header_that_cannot_be_read_is_left_to_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "loop.h").symlink_to("loop.h")
    (tmp_path / "folder.h").mkdir()
    right = tmp_path / "right.h"
    right.write_text("// right\n")
    names = ["loop.h", "folder.h", "missing.h", f"{'long' * 100}.h", "right.h"]
    text = "".join(f'#include "{name}"\n' for name in names)
    assert includes_of(text, str(tmp_path)) == {right: "// right\n"}


@pytest.mark.parametrize(
    ("language", "text", "name"),
    [
        *((CPP, TEXT, name) for name in ("add", "odd", "twice", "Tile", "dd")),
        *((CUDA, KERNELS, name) for name in ("scaled", "scaled_", "other", "bounded", "missing", "ther")),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_function_is_the_first_that_its_pattern_matches(
    language: SourceLanguage, text: str, name: str
) -> None:
    without_strings = text.replace('"C"', "   ")
    whole = re.search(language.pattern.format(name=name), without_strings, re.VERBOSE)
    try:
        found = find_function(language, f"a::{name}", text=text, file=None, entry=None, declared=None)
    except KernelSourceError:
        assert whole is None
    else:
        assert whole is not None
        assert (found.match.span(), found.match["template"]) == (whole.span(), whole["template"])
