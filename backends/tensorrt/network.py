"""One graph as TensorRT's network, and the configuration that it is built with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.backends.tensorrt.job import Job, Refused
from outrider.engines.contract import INPUT_IDS


def parse(trt: Any, job: Job, network: Any, parser: Any) -> None:
    """Fill the network from the job's graph.

    Raises:
        Refused: the parser does, or a cache is not updated in place.
    """
    import onnx

    model = onnx.load(job.graph, load_external_data=False)
    names = {name for tensor in job.cache for name in (tensor.past, tensor.present)}
    for value in (*model.graph.input, *model.graph.output):
        if value.name in names:
            value.type.tensor_type.shape.dim[2].dim_value = job.capacity  # TensorRT only scatters into a fixed capacity
    if names:
        del model.graph.value_info[:]  # it names the capacity, too
    if not parser.parse(model.SerializeToString(), job.graph):  # it looks for the weights beside this path
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        # For an operator that it does not support, the parser's description is "false".
        reasons = [each.code().name.lower() if each.desc() == "false" else each.desc() for each in errors]
        nodes = [f"node {each.node_name()!r} ({each.node_operator()})" for each in errors]
        raise Refused("; ".join(f"{node}: {reason}" for node, reason in zip(nodes, reasons, strict=True)) or "no reason given")
    updates = _cache_updates(trt, network)
    for tensor in job.cache:
        if (tensor.past, tensor.present) not in updates:
            raise Refused(f"{tensor.present} is not {tensor.past} updated in place")


def _cache_updates(trt: Any, network: Any) -> set[tuple[str, str]]:
    """Return the caches that are updated in place, past and present; and allow attention to be decomposed."""
    updates = set()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # A fused kernel is still used if there is one. Without this, a shape that has none fails the build: any shape
            # in fp32, and decoding with 3 query heads per key/value head in fp16.
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            layer.__class__ = trt.IKVCacheUpdateLayer
            updates.add((layer.get_input(0).name, layer.get_output(0).name))
    return updates


def configure(trt: Any, job: Job, builder: Any, network: Any) -> Any:
    """Return the builder's configuration: flags, options and optimization profiles.

    Raises:
        Refused: the package refuses an option or a profile.
    """
    options, config = job.options, builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 is there to compare with, and TF32 keeps 10 bits
    config.set_flag(trt.BuilderFlag.STRICT_NANS)  # the samplers look for NaN
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # a run that allocates memory cannot be recorded
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(options.workspace * 2**30))
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.compute_capability:
        config.num_compute_capabilities = len(options.compute_capability)
        for index, each in enumerate(options.compute_capability):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{each.replace('.', '')}"), index):
                raise Refused(f"compute capability {each} is refused")
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if job.stream_weights:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    _load_timing_cache(options.timing_cache, config)
    _add_profiles(job, builder, network, config)
    return config


def _add_profiles(job: Job, builder: Any, network: Any, config: Any) -> None:
    for shapes in job.profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            if tensor.name in shapes:
                set_shape = profile.set_shape_input if tensor.is_shape_tensor else profile.set_shape
                set_shape(tensor.name, *shapes[tensor.name])
        for cache in job.cache:
            batches = [shape[0] for shape in shapes[INPUT_IDS]]
            profile.set_shape(cache.past, *([batch, cache.heads, job.capacity, cache.width] for batch in batches))
        if config.add_optimization_profile(profile) < 0:
            raise Refused(f"the profile {shapes} is refused")


def _load_timing_cache(file: str | None, config: Any) -> None:
    if file is not None:
        content = Path(file).read_bytes() if Path(file).exists() else b""
        if not config.set_timing_cache(config.create_timing_cache(content), ignore_mismatch=False):
            raise Refused(f"the timing cache {file} is damaged, or of another GPU or release")


def save_timing_cache(file: str | None, config: Any) -> None:
    """Write the timings of a finished build back to their file, if there is one."""
    if file is not None:
        path = Path(file)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(config.get_timing_cache().serialize())
        partial.replace(path)
