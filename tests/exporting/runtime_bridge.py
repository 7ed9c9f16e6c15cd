"""Any operator of torch as a custom operator of ONNX Runtime, for tests of files whose nodes have no bodies.

ONNX Runtime loads a library of three lines, which hands over to Python; the rest of its C interface is called
from here. What is used of it stands where `opsmith/kernels/runtime/onnx_api.h` has it too, and is written
anew: a mistake in the one does not repeat itself in the other.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor

from opsmith.build.toolchain import find_toolchain
from opsmith.exporting.dtypes import ONNX_TYPES

STUB = """
extern "C" {
__attribute__((visibility("default"))) void* (*bridge)(void*, const void*);
__attribute__((visibility("default"))) void* RegisterCustomOps(void* options, const void* base) {
  return bridge(options, base);
}
}
"""
VERSION, FAIL = 16, 1
DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}
PLACES = {
    "create_status": (0, c_int, c_char_p),
    "create_domain": (26, c_char_p, POINTER(c_void_p)),
    "add_operator": (27, c_void_p, c_void_p),
    "add_domain": (28, c_void_p, c_void_p),
    "data": (51, c_void_p, POINTER(c_void_p)),
    "element_type": (60, c_void_p, POINTER(c_int)),
    "dim": (61, c_void_p, POINTER(c_size_t)),
    "sizes": (62, c_void_p, POINTER(c_int64), c_size_t),
    "info": (65, c_void_p, POINTER(c_void_p)),
    "FLOAT": (85, c_void_p, c_char_p, POINTER(c_float)),
    "INT": (86, c_void_p, c_char_p, POINTER(c_int64)),
    "STRING": (87, c_void_p, c_char_p, c_void_p, POINTER(c_size_t)),
    "input_count": (88, c_void_p, POINTER(c_size_t)),
    "input": (90, c_void_p, c_size_t, POINTER(c_void_p)),
    "output": (91, c_void_p, c_size_t, POINTER(c_int64), c_size_t, POINTER(c_void_p)),
    "release_status": (93, c_void_p),
    "release_info": (99, c_void_p),
    "FLOATS": (162, c_void_p, c_char_p, POINTER(c_float), POINTER(c_size_t)),
    "INTS": (163, c_void_p, c_char_p, POINTER(c_int64), POINTER(c_size_t)),
}
MEMBERS = (
    ("create", c_void_p, c_void_p, c_void_p, c_void_p),
    ("name", c_void_p, c_void_p),
    ("provider", c_void_p, c_void_p),
    ("input_type", c_int, c_void_p, c_size_t),
    ("input_count", c_size_t, c_void_p),
    ("output_type", c_int, c_void_p, c_size_t),
    ("output_count", c_size_t, c_void_p),
    ("compute_unchecked", None, c_void_p, c_void_p),
    ("destroy", None, c_void_p),
    ("input_form", c_int, c_void_p, c_size_t),
    ("output_form", c_int, c_void_p, c_size_t),
    ("input_memory", c_int, c_void_p, c_size_t),
    *((f"variadic_{at}", c_int, c_void_p) for at in range(4)),
    ("create_kernel", c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p)),
    ("compute", c_void_p, c_void_p, c_void_p),
)


KEPT: list[Any] = []
"""What ONNX Runtime calls as long as a session lives; never let go of, not even as the interpreter ends."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(KEPT))


class CustomOp(ctypes.Structure):
    _fields_ = [("version", c_uint32), *((name, ctypes.CFUNCTYPE(*types)) for name, *types in MEMBERS)]


class Api:
    """Functions of ONNX Runtime, by the names in `PLACES`; what they say is wrong is raised."""

    def __init__(self, table: int) -> None:
        self._table = ctypes.cast(table, POINTER(c_void_p))

    def status(self, text: str) -> Any:
        return self._function("create_status")(FAIL, text.encode())

    def must(self, name: str, *args: Any) -> None:
        status = self._function(name)(*args)
        if status:
            self._function("release_status")(status)
            raise LookupError(name)

    def release(self, info: Any) -> None:
        self._function("release_info")(info)

    def _function(self, name: str) -> Any:
        place, *types = PLACES[name]
        return ctypes.CFUNCTYPE(c_void_p, *types)(self._table[place])


@dataclass
class Node:
    """A type of node with one choice of element types."""

    domain: str
    op_type: str
    operator: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    least: int  # outputs that every call has
    forms: dict[str, str] = field(default_factory=dict)


class Bridge:
    """The nodes of a file, computed by torch's operators of their names.

    Args:
        path: The file; its nodes are operators of torch by their metadata, or else by their own names.
        folder: For the library.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.failed = path, list[BaseException]()
        self._nodes = list(nodes_of(onnx.load(path)))
        self._kernels: dict[int, tuple[Node, dict[str, Any]]] = {}
        library = folder / "bridge.so"
        (folder / "bridge.cpp").write_text(STUB)
        command = [*find_toolchain().command, "-shared", "-fPIC", "bridge.cpp", "-o", library.name]
        subprocess.run(command, cwd=folder, check=True)
        register = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p)(self._register)
        loaded = ctypes.CDLL(str(library))
        KEPT.extend((register, loaded))
        c_void_p.in_dll(loaded, "bridge").value = ctypes.cast(register, c_void_p).value
        self._library = library

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Results of ONNX Runtime, in a session that ends with the call."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(self._library))
        session = onnxruntime.InferenceSession(str(self.path), options)
        values = {
            each.name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                tensor.view(torch.uint16).numpy(), ONNX_TYPES[tensor.dtype]
            )
            if tensor.dtype is torch.bfloat16
            else onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())
            for each, tensor in zip(session.get_inputs(), inputs, strict=True)
        }
        return [torch.from_dlpack(each).clone() for each in session.run_with_ort_values(None, values)]

    def _register(self, options: int, base: int) -> Any:
        get_api = ctypes.CFUNCTYPE(c_void_p, c_uint32)(ctypes.cast(base, POINTER(c_void_p))[0])
        self._api = Api(get_api(VERSION))
        domains: dict[str, c_void_p] = {}
        for node in self._nodes:
            if node.domain not in domains:
                domains[node.domain] = c_void_p()
                self._api.must("create_domain", node.domain.encode(), byref(domains[node.domain]))
            self._api.must("add_operator", domains[node.domain], ctypes.addressof(self._custom_op(node)))
        for domain in domains.values():
            self._api.must("add_domain", options, domain)
        return None

    def _custom_op(self, node: Node) -> CustomOp:
        name = ctypes.create_string_buffer(node.op_type.encode())
        provider = ctypes.create_string_buffer(b"CPUExecutionProvider")
        functions: dict[str, Callable[..., Any]] = {
            "name": lambda op: ctypes.addressof(name),
            "provider": lambda op: ctypes.addressof(provider),
            "input_type": lambda op, at: node.inputs[at],
            "input_count": lambda op: len(node.inputs),
            "output_type": lambda op, at: node.outputs[at],
            "output_count": lambda op: len(node.outputs),
            "destroy": lambda kernel: None,
            "input_form": lambda op, at: 1,
            "output_form": lambda op, at: int(at >= node.least),
            "input_memory": lambda op, at: 0,
            "create_kernel": lambda op, api, info, kernel: self._guarded(self._create, node, info, kernel),
            "compute": lambda kernel, context: self._guarded(self._compute, kernel, context),
        }
        op = CustomOp(version=VERSION)
        for member, *types in MEMBERS:
            if member in functions:
                setattr(op, member, ctypes.CFUNCTYPE(*types)(functions[member]))
        KEPT.extend((op, name, provider))
        return op

    def _guarded(self, function: Callable[..., None], *args: Any) -> Any:
        try:
            function(*args)
        except Exception as error:  # becomes an error of ONNX Runtime's
            self.failed.append(error)
            return self._api.status(f"{type(error).__name__}: {error}")
        return None

    def _create(self, node: Node, info: int, kernel: Any) -> None:
        found = {}
        for name, form in node.forms.items():
            try:
                found[name] = self._attribute(info, name.encode(), form)
            except LookupError:  # this node has not got it
                continue
        number = len(self._kernels) + 1
        self._kernels[number] = node, found
        kernel[0] = number

    def _attribute(self, info: int, name: bytes, form: str) -> Any:
        if form in ("INT", "FLOAT"):
            one = c_int64() if form == "INT" else c_float()
            self._api.must(form, info, name, byref(one))
            return one.value
        count = c_size_t()
        self._api.must(form, info, name, None, byref(count))
        if form == "STRING":
            text = ctypes.create_string_buffer(count.value + 1)
            self._api.must(form, info, name, text, byref(count))
            return text.value.decode()
        several = ((c_int64 if form == "INTS" else c_float) * count.value)()
        if count.value:
            self._api.must(form, info, name, several, byref(count))
        return list(several)

    def _compute(self, kernel: int, context: int) -> None:
        node, found = self._kernels[kernel]
        count = c_size_t()
        self._api.must("input_count", context, byref(count))
        tensors = iter([self._input(context, at) for at in range(count.value)])
        args = list(arguments(node.operator, tensors, found))
        with torch.no_grad():
            returned = node.operator(*args)
        results = [each for each in flat(returned) if each is not None]
        assert node.least <= len(results) <= len(node.outputs)
        for at, result in enumerate(results):
            assert ONNX_TYPES[result.dtype] == node.outputs[at]
            value, data = c_void_p(), c_void_p()
            sizes = (c_int64 * result.dim())(*result.shape)
            self._api.must("output", context, at, sizes, result.dim(), byref(value))
            self._api.must("data", value, byref(data))
            lies = result.contiguous()
            if lies.numel():
                ctypes.memmove(data.value, lies.data_ptr(), lies.numel() * lies.element_size())

    def _input(self, context: int, at: int) -> Tensor | None:
        value, info, data = c_void_p(), c_void_p(), c_void_p()
        kind, dim = c_int(), c_size_t()
        self._api.must("input", context, at, byref(value))
        if not value.value:
            return None
        self._api.must("info", value, byref(info))
        self._api.must("element_type", info, byref(kind))
        self._api.must("dim", info, byref(dim))
        sizes = (c_int64 * dim.value)()
        self._api.must("sizes", info, sizes, dim.value)
        self._api.release(info)
        self._api.must("data", value, byref(data))
        tensor = torch.empty(tuple(sizes), dtype=DTYPES[kind.value])
        if tensor.numel():
            ctypes.memmove(tensor.data_ptr(), data.value, tensor.numel() * tensor.element_size())
        return tensor


def nodes_of(model: Any) -> Iterator[Node]:
    """The types of nodes of a file that are no ONNX's own."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    found: dict[tuple[str, str], list[tuple[Any, list[int | None], tuple[int, ...]]]] = {}
    for node in (each for each in model.graph.node if each.domain):
        inputs = [types[name] if name else None for name in node.input]
        called = {each.key: each.value for each in node.metadata_props}.get("opsmith.operator")
        namespace, _, name = (called or f"{node.domain}::{node.op_type}").partition("::")
        operator = getattr(getattr(torch.ops, namespace), name).default
        outputs = tuple(types[name] for name in node.output)
        found.setdefault((node.domain, node.op_type), []).append(((operator, node), inputs, outputs))
    for (domain, op_type), calls in found.items():
        count = max(len(inputs) for _, inputs, _ in calls)
        forms = {
            each.name: onnx.AttributeProto.AttributeType.Name(each.type)
            for (_, node), _, _ in calls
            for each in node.attribute
        }
        done = set()
        by_length = sorted((outputs for *_, outputs in calls), key=len)
        for (operator, _), inputs, outputs in calls:
            outputs += by_length[-1][len(outputs) :]
            known = next((each for each in inputs if each is not None), 1)
            filled = tuple((inputs[at] if at < len(inputs) else None) or known for at in range(count))
            if filled not in done:
                done.add(filled)
                yield Node(domain, op_type, operator, filled, outputs, len(by_length[0]), forms)


def arguments(operator: Any, tensors: Iterator[Tensor | None], found: dict[str, Any]) -> Iterator[Any]:
    """The arguments of a call, from a node's inputs and attributes."""
    for argument in operator._schema.arguments:
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            yield next(tensors, None)
        elif kind.startswith("List[Tensor"):
            count = found.get(f"{argument.name}_count")
            yield None if count is None else [next(tensors) for _ in range(count)]
        elif argument.name not in found:
            yield argument.default_value if argument.has_default_value() else None
        else:
            yield converted(kind, found[argument.name])


def converted(kind: str, value: Any) -> Any:
    """The value of an attribute as torch's operator takes it."""
    if kind == "ScalarType":
        return getattr(torch, value)
    if kind == "complex":
        return complex(*value)
    if kind == "bool":
        return bool(value)
    if kind.startswith("List[bool"):
        return [bool(each) for each in value]
    return value


def flat(value: Any) -> Sequence[Any]:
    """Tensors among results, lists of them spread out."""
    return [one for each in value for one in flat(each)] if isinstance(value, list | tuple) else [value]
