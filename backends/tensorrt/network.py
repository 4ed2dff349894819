"""Turns a graph into TensorRT's network, and makes the builder's configuration.

This uses Polygraphy's loaders, except where they do not suffice. They parse a graph from its file, but its caches must first
get a fixed capacity. They log the parser's errors instead of returning them with their nodes. They do not check whether a
timing cache was accepted. And they build in memory, instead of writing the plan as a stream.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.backends.tensorrt.job import BuildJob, Refused
from outrider.backends.tensorrt.package import RTX, Package
from outrider.engines.contract import INPUT_IDS

if TYPE_CHECKING:
    from polygraphy.backend.trt import Profile


def import_polygraphy(package: Package) -> None:
    """Import Polygraphy, which selects the package when it is first imported."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(package == RTX))
    import polygraphy.backend.trt  # noqa: F401


def create(trt: Any, log: Any) -> tuple[Any, Any]:
    """Return a builder and an empty, strongly typed network. From now on, Polygraphy logs to `log`."""
    from polygraphy.backend.trt import create_network, util
    from polygraphy.logger import G_LOGGER

    util.TRT_LOGGER = log
    G_LOGGER.module_severity = G_LOGGER.ERROR  # at lower levels it prints the configuration
    typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")  # TensorRT 11 has only this
    builder, network = create_network(strongly_typed=typed)
    return builder, network


def parse(trt: Any, job: BuildJob, network: Any, parser: Any) -> None:
    """Fill the network from the job's graph.

    Raises:
        Refused: the parser refuses the graph, or a cache is not updated in place.
    """
    import onnx

    model = onnx.load(job.graph, load_external_data=False)
    names = {name: each.sizes(job.capacity, job.recent) for each in job.cache for name in (each.past, each.present)}
    for value in (*model.graph.input, *model.graph.output):
        for at, size in enumerate(names.get(value.name, ()), 1):
            value.type.tensor_type.shape.dim[at].dim_value = size  # TensorRT only scatters into a fixed capacity
    if names:
        del model.graph.value_info[:]  # it also has the symbolic capacity
    if not parser.parse(model.SerializeToString(), job.graph):  # it looks for the weights beside this path
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        # For an unsupported operator, the parser's description is "false".
        reasons = [each.code().name.lower() if each.desc() == "false" else each.desc() for each in errors]
        nodes = [f"node {each.node_name()!r} ({each.node_operator()})" for each in errors]
        raise Refused("; ".join(f"{node}: {reason}" for node, reason in zip(nodes, reasons, strict=True)) or "no reason given")
    updates = _cache_updates(trt, network)
    for tensor in [each for each in job.cache if each.positional]:
        if (tensor.past, tensor.present) not in updates:
            raise Refused(f"{tensor.present} is not {tensor.past} updated in place")


def _cache_updates(trt: Any, network: Any) -> set[tuple[str, str]]:
    """Return the caches that are updated in place, past and present."""
    updates = set()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            layer.__class__ = trt.IKVCacheUpdateLayer
            updates.add((layer.get_input(0).name, layer.get_output(0).name))
    return updates


def configure(trt: Any, job: BuildJob, builder: Any, network: Any, monitor: Any) -> Any:
    """Return the builder's configuration: flags, options and optimization profiles.

    Raises:
        Refused: the package refuses an option or a profile.
    """
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
    from polygraphy.backend.trt import CreateConfig, set_decomposable_attentions
    from polygraphy.exception import PolygraphyException

    # This still uses a fused kernel if there is one. Without it, a shape without a fused kernel fails the build: all shapes in
    # fp32, and decoding with 3 query heads per key/value head in fp16.
    set_decomposable_attentions((builder, network))
    options = job.options
    limits = {} if options.workspace is None else {trt.MemoryPoolType.WORKSPACE: int(options.workspace * 2**30)}
    capabilities = [tuple(map(int, each.split("."))) for each in options.compute_capability]
    settings = {
        "profiles": [_profile(job, shapes, network) for shapes in job.profiles],
        "memory_pool_limits": limits,
        "builder_optimization_level": options.optimization_level,
        "hardware_compatibility_level": trt.HardwareCompatibilityLevel.AMPERE_PLUS if options.hardware_compatible else None,
        "version_compatible": options.version_compatible,
        "weight_streaming": job.stream_weights,
        "progress_monitor": monitor,
        "profiling_verbosity": trt.ProfilingVerbosity.LAYER_NAMES_ONLY,  # the package's default, but not Polygraphy's
    }
    create_config = partial(CreateConfigRTX, compute_capabilities=capabilities or None) if job.package == RTX else CreateConfig
    try:
        config = create_config(**settings)(builder, network)
    except PolygraphyException as error:
        raise Refused(str(error)) from error
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 serves as a reference, and TF32 keeps only 10 bits
    config.set_flag(trt.BuilderFlag.STRICT_NANS)  # the samplers check for NaN
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # a run that allocates memory cannot be recorded
    _load_timing_cache(options.timing_cache, config)
    return config


def _profile(job: BuildJob, shapes: dict[str, Any], network: Any) -> Profile:
    from polygraphy.backend.trt import Profile

    profile = Profile()
    names = {network.get_input(index).name for index in range(network.num_inputs)}
    for name in names & shapes.keys():
        profile.add(name, *shapes[name])
    for cache in job.cache:
        batches = [shape[0] for shape in shapes[INPUT_IDS]]
        profile.add(cache.past, *([batch, *cache.sizes(job.capacity, job.recent)] for batch in batches))
    return profile


def _load_timing_cache(file: str | None, config: Any) -> None:
    if file is not None:
        content = Path(file).read_bytes() if Path(file).exists() else b""
        if not config.set_timing_cache(config.create_timing_cache(content), ignore_mismatch=False):
            raise Refused(f"the timing cache {file} is damaged, or from another GPU or release")


def save_timing_cache(file: str | None, config: Any) -> None:
    """Write the timings of a finished build to their file, if there is one."""
    if file is not None:
        path = Path(file)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(config.get_timing_cache().serialize())
        partial.replace(path)
