"""Configure a build over a release of TensorRT's Python bindings with empty libraries: names are real, nothing is computed.

A program: the folder of `tensorrt_bindings` is on the path, and the names to look up are its arguments.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import tensorrt_bindings as trt  # type: ignore[import-not-found]

sys.modules["tensorrt"] = trt  # which the wheel of this name does

from outrider.backends.tensorrt.job import BuildJob, BuildOptions  # noqa: E402
from outrider.backends.tensorrt.network import configure, create, import_polygraphy  # noqa: E402
from outrider.backends.tensorrt.package import TENSORRT  # noqa: E402
from outrider.engines.contract import CAPACITY_DIM, CacheTensor  # noqa: E402


class Attention:
    """The only layer of the network, which Polygraphy casts to the type of its class."""

    type = trt.LayerType.ATTENTION_INPUT

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "__class__"
        assert value.attention is not None

    attention = property(lambda self: Named("IAttention"))


class Named:
    """An object of one of the release's classes that has its names, and does nothing."""

    def __init__(self, kind: str, **values: Any):
        """Stand for an object of a class, with what Polygraphy reads of it."""
        self.__dict__.update(kind=getattr(trt, kind), values=values)

    def __iter__(self) -> Any:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        getattr(self.kind, name)
        return self.values.get(name, lambda *_, **__: True)

    def __setattr__(self, name: str, value: object) -> None:
        getattr(self.kind, name)


def main(names: list[str]) -> None:
    """Look names up, then create and configure a network with every option, and print the release.

    Raises:
        AttributeError, Refused: the release lacks a name.
    """
    for name in names:
        operator.attrgetter(name)(trt)
    past = Named("ITensor", name="past", shape=(-1, 2, 8, 4), is_shape_tensor=False)
    network = Named("INetworkDefinition", num_inputs=1, get_input=lambda _: past, num_layers=1, get_layer=lambda _: Attention())
    config, profile = Named("IBuilderConfig"), Named("IOptimizationProfile")
    builder = Named(
        "Builder",
        create_network=lambda flags: network,
        create_builder_config=lambda: config,
        create_optimization_profile=lambda: profile,
    )
    trt.Builder = lambda log: builder
    import_polygraphy(TENSORRT)
    every = BuildOptions(workspace=1, optimization_level=3, version_compatible=True, hardware_compatible=True)
    cache = CacheTensor("past", "present", (2, CAPACITY_DIM, 4))
    job = BuildJob(
        TENSORRT, every, cache=[cache], capacity=8, profiles=[{"input_ids": ([1, 1], [1, 1], [1, 1])}], stream_weights=True
    )
    configure(trt, job, *create(trt, None), monitor=None)
    print(trt.__version__)


if __name__ == "__main__":
    main(sys.argv[1:])
