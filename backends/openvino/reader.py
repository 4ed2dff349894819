"""Reads rewritten graphs into OpenVINO and compiles them for a device."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import Type, opset13
from openvino._offline_transformations import paged_attention_transformation
from openvino.frontend.onnx import ConversionExtension
from openvino.op import _PagedAttentionExtension
from openvino.op.util import Variable, VariableInfo

from outrider.backends.mapped import give_back, mapped, repeatedly
from outrider.backends.openvino.names import ATTENTION, BLOCK_WEIGHTS, DOMAIN, EMBEDDING, PAGING
from outrider.engines.contract import BOUNDARY, LOGITS
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.engines.threads import thread_count
from outrider.errors import DeviceError, EngineError

OTHER_BACKENDS = "build the export with --backend onnxruntime"
BEFORE_PAGING = 5  # inputs of PagedAttention before `PAGING`: query, key, value and the two caches
AFTER_PAGING = BEFORE_PAGING + len(PAGING) + 3  # scale, sliding window and slopes come before the last of `PAGING`
_reading = threading.Lock()  # so that new mappings belong to one model
CAPABILITIES = {"f32": "FP32", "f16": "FP16", "bf16": "BF16"}  # each type's name in `OPTIMIZATION_CAPABILITIES`


@contextmanager
def compiling(path: Path, device: str, precision: str, group: int = 0, threads: int | None = None) -> Iterator[Any]:
    """Yield the model at `path`, which `rewrite` wrote, compiled for a device.

    In the block, kernels copy the mapped weights into their own layout. Meanwhile a thread repeatedly releases the mapping's
    pages. The mapping stays, so pages that are still needed, such as rows of an embedding, are read again.

    Args:
        device: "cpu", "gpu" or "npu".
        precision: key of `PRECISIONS`.
        group: in products with quantized weights, activations per scale when they are rounded to int8; 0 does not round.
        threads: the most to use on a CPU; None is as many as the process may use.

    Raises:
        DeviceError: this machine does not have the device.
        EngineError: this OpenVINO refuses the model, or there is no memory for it.
    """
    with translated(f"cannot load {path}"):
        settings = _settings(device, precision, group, threads)
        with _reading:
            before = mapped(path)
            graph = _core().read_model(path)
            own = mapped(path) - before
        _leave_caches_open(graph)
    with repeatedly(partial(give_back, own)):
        with translated(f"cannot load {path}"):
            compiled = _core().compile_model(graph, device.upper(), settings)
        yield compiled
    del graph  # it kept the mapping; without it, other memory could take these addresses


@functools.cache
def _core() -> Any:
    """Return the object that reads and compiles models. There is one in a process, which keeps the libraries of its devices."""
    core = ov.Core()
    for name, convert in ((ATTENTION, _attention), (BLOCK_WEIGHTS, _weights), (EMBEDDING, _embedding)):
        core.add_extension(ConversionExtension(name, DOMAIN, convert))
    return core


@functools.cache
def _devices() -> list[str]:
    """Return the devices that OpenVINO finds on this machine, such as "CPU" and "GPU.0".

    A process of its own looks for them, since looking loads the libraries of all devices and unloads those without one. If
    libraries with thread-local storage are unloaded, glibc (2.36) may end the process when another thread starts.
    """
    code = "import openvino; print(*openvino.Core().available_devices)"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout.split()


def _settings(device: str, precision: str, group: int, threads: int | None) -> dict[str, Any]:
    """Return the settings to compile a model with.

    Raises:
        DeviceError: this machine does not have the device.
    """
    if device != "cpu" and device.upper() not in {each.split(".")[0] for each in _devices()}:
        raise DeviceError(
            f"OpenVINO finds no device {device.upper()!r} here, only {', '.join(_devices())}",
            "use --device cpu, or install the driver of that device",
        )
    own = DTYPES[PRECISIONS[precision].dtype].openvino
    has_own = CAPABILITIES[own] in _core().get_property(device.upper(), "OPTIMIZATION_CAPABILITIES")
    # On processors with AVX-512 FP16, OpenVINO 2026.4 computes paged attention wrongly in fp16: logits differ by up to 20.
    has_own &= (device, precision) != ("cpu", "fp16")
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        # By default, OpenVINO computes every model in bf16 on processors with AMX.
        "INFERENCE_PRECISION_HINT": own if has_own else "f32",
        # On a processor without fp16 arithmetic (only AVX2), results with an fp16 cache were not always the same.
        "KV_CACHE_PRECISION": own if has_own else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }
    if device == "cpu":
        settings["INFERENCE_NUM_THREADS"] = min(threads or thread_count(), thread_count())
    return settings


def shapes(compiled: Any) -> dict[str, object]:
    """Return what to compare with the manifest: (heads, width) of each cache, the width of the logits, if any, and the type and
    the sizes behind the rows of what a stage takes or gives."""
    found: dict[str, object] = {}
    for name, port in ((name, each) for each in (*compiled.inputs, *compiled.outputs) for name in each.names):
        sizes = [None if size.is_dynamic else size.get_length() for size in port.get_partial_shape()]
        if name.startswith(BOUNDARY):
            found[name] = port.get_element_type().to_string(), *sizes[2:]
        elif name == LOGITS:
            found[name] = (sizes[2],)
        elif name.startswith(("past_key_", "past_value_")):
            found[name] = sizes[1], sizes[3]
    return found


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn exceptions of OpenVINO in a block into an `EngineError` with the place."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:
        raise failed(error, where) from error


def failed(error: Exception, where: str) -> EngineError:
    """Return the `EngineError` for an exception of OpenVINO."""
    lines = [line.strip("- ") for line in str(error).splitlines() if line.strip()]
    # The first lines are places in its source code.
    said = [line for line in lines if not line.startswith(("Exception from", "Check ", "FrontEnd API failed"))]
    named = [line for line in said if line.startswith("No conversion rule")]
    message = (named or said or lines or [type(error).__name__])[0]
    if isinstance(error, MemoryError) or "alloc" in message.lower():
        return EngineError(f"OpenVINO {where}: {message}", "stop other programs that use memory, or use a smaller --batch")
    hint = f"pip install -U 'outrider[openvino]' (this is {ov.__version__.split('-')[0]}), or {OTHER_BACKENDS}"
    return EngineError(f"OpenVINO {where}: {message}", hint)


def _constant(value: Any, dtype: Any = np.int64) -> Any:
    return opset13.constant(np.array(value, dtype))


def _attention(node: Any) -> list[Any]:
    """Return our `PagedAttention` as OpenVINO's: from [T, H, 1, D] to [T, 1, H, Dv], over attention's own rows."""
    sizes = {name: node.get_attribute(name) for name in ("heads", "kv_heads", "key_width", "value_width")}
    query, key, value, past_key, past_value, taken, given, *paging = (node.get_input(i) for i in range(node.get_input_size()))
    widths = (
        sizes["heads"] * sizes["key_width"],
        sizes["kv_heads"] * sizes["key_width"],
        sizes["kv_heads"] * sizes["value_width"],
    )
    rows = [
        opset13.gather(opset13.reshape(each, _constant([-1, width]), False), taken, _constant(0)).output(0)
        for each, width in zip((query, key, value), widths, strict=True)
    ]
    scale = _constant(node.get_attribute("scale"), np.float32)
    if rows[0].get_element_type() != Type.f32:
        scale = opset13.convert(scale, rows[0].get_element_type())
    window, slopes = _constant(node.get_attribute("window"), np.int32), _constant([], np.float32)
    inputs = [*rows, past_key, past_value, *paging[:-1], *(each.output(0) for each in (scale, window, slopes)), paging[-1]]
    inputs += [opset13.constant(each).output(0) for each in _unused_inputs()]
    attended = opset13.gather(_PagedAttentionExtension(inputs).output(0), given, _constant(0))
    return [opset13.reshape(attended, _constant([-1, 1, sizes["heads"], sizes["value_width"]]), False).output(0)]


def _leave_caches_open(graph: Any) -> None:
    """Let the processor choose type and layout of the caches. It reads their sizes where OpenVINO's own pass puts them."""
    for attention in [node for node in graph.get_ops() if node.get_type_name() == "PagedAttentionExtension"]:
        info = attention.get_rt_info()
        for kind, index in (("k", 3), ("v", 4)):
            cache = attention.input(index).get_source_output().get_node()
            _, heads, _, width = cache.get_partial_shape()
            info[f"num_{kind}_heads"], info[f"{kind}_head_size"] = heads.get_length(), width.get_length()
            cache.set_element_type(Type.dynamic)
    graph.validate_nodes_and_infer_types()


def _weights(node: Any) -> list[Any]:
    """Return weights [N, K / block, block] as a matrix [K, N], which fuses into the product.

    The node also has scales [N, K / block, 1], and zero points of this shape unless they are 0.
    """
    quantized, scale, *zero = (node.get_input(index) for index in range(node.get_input_size()))
    outputs, groups, block = quantized.get_shape()
    integers = opset13.convert(quantized, scale.get_element_type())
    for each in zero:
        integers = opset13.subtract(integers, opset13.convert(each, scale.get_element_type()))
    whole = opset13.multiply(integers, scale)
    matrix = opset13.reshape(whole, _constant([outputs, groups * block]), False)
    if scale.get_element_type() != Type.f32:
        matrix = opset13.convert(matrix, Type.f32)
    return [opset13.transpose(matrix, _constant([1, 0])).output(0)]


def _embedding(node: Any) -> list[Any]:
    """Return a lookup in an fp16 table that casts the rows."""
    table = opset13.convert(node.get_input(0), Type.f32)
    table.get_rt_info()["decompression"] = ""  # or compiling would cast the whole table
    return [opset13.gather(table, node.get_input(1), _constant(0)).output(0)]


@functools.cache
def _unused_inputs() -> tuple[Any, ...]:
    """Return values for the inputs of PagedAttention after `PAGING`, which we do not use.

    Their number grows with each release. OpenVINO's own transformation knows them, so this runs it on the smallest model that
    it accepts.
    """
    heads, width = 1, 8
    names = {"input_ids": Type.i64, "attention_mask": Type.i64, "position_ids": Type.i64, "beam_idx": Type.i32}
    inputs = {}
    for name, dtype in names.items():
        shape = ov.PartialShape([-1] if name == "beam_idx" else [-1, -1])
        inputs[name] = opset13.parameter(shape, dtype, name=name)
        inputs[name].output(0).get_tensor().set_names({name})
    table = opset13.constant(np.zeros((2, heads * width), np.float32))
    hidden = opset13.gather(table, inputs["input_ids"], _constant(0))
    matrix = opset13.constant(np.zeros((heads * width, heads * width), np.float32))

    def projected() -> Any:
        split = opset13.reshape(opset13.matmul(hidden, matrix, False, False), _constant([0, 0, heads, width]), True)
        return opset13.transpose(split, _constant([0, 2, 1, 3]))

    def cached(name: str) -> tuple[Any, Any]:
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, heads, -1, width]), Type.f32, name
        variable = Variable(info)
        batch = opset13.gather(opset13.shape_of(inputs["input_ids"]), _constant([0]), _constant(0))
        empty = opset13.broadcast(_constant(0, np.float32), opset13.concat([batch, _constant([heads, 0, width])], 0))
        past = opset13.gather(opset13.read_value(empty, variable), inputs["beam_idx"], _constant(0))
        present = opset13.concat([past, projected()], 2)
        return present, opset13.assign(present, variable)

    (keys, write_keys), (values, write_values) = cached("keys"), cached("values")
    mask = opset13.convert(opset13.unsqueeze(inputs["attention_mask"], _constant([1, 2])), Type.f32)
    attended = opset13.scaled_dot_product_attention(projected(), keys, values, mask, causal=False)
    model = ov.Model([opset13.result(attended)], [write_keys, write_values], list(inputs.values()), "smallest")
    paged_attention_transformation(model)
    attention = next(node for node in model.get_ops() if node.get_type_name() == "PagedAttentionExtension")
    constants = [
        attention.input(index).get_source_output().get_node() for index in range(AFTER_PAGING, attention.get_input_size())
    ]
    return tuple(each.data.copy() for each in constants)
