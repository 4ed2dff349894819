"""The engines of a bundle of OpenVINO: its models here, the samplers in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

from outrider.backends.base import Engines, check_tensors, engine_tensors
from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine, create_pool
from outrider.backends.openvino.reader import compiling, shapes
from outrider.backends.openvino.session import PagedSession
from outrider.bundle.manifest import Build, Manifest, model_file, sampler_file
from outrider.engines.contract import LOGITS, cache_tensors
from outrider.engines.device import Cpu, Engine
from outrider.engines.session import Session


class OpenVinoEngines(Engines):
    """A bundle's models, compiled for a processor of this machine. Everything is bound to memory of the host."""

    def __init__(self, folder: Path, manifest: Manifest, build: Build, processor: str, rounds: bool = True):
        """Prepare to load.

        Args:
            processor: "cpu", "gpu" or "npu".
            rounds: whether products with quantized weights may round activations, which makes them fast.
        """
        super().__init__(folder, manifest, build, Cpu())
        # A second spinning pool would slow OpenVINO's down by two fifths; one thread costs the samplers a quarter of a
        # millisecond at a vocabulary of 151,936.
        create_pool(threads=1)
        self._processor, self._rounds = processor, rounds

    def unrounded(self) -> Engines:
        return OpenVinoEngines(self.folder, self.manifest, self.build, self._processor, rounds=False)

    def session(self, role: str, batch: int) -> Session:
        model = self.manifest.models[role]
        group = model.quantization.block if model.quantization is not None and self._rounds else 0
        path = self.folder / model_file(role)
        with compiling(path, self._processor, model.precision, group) as compiled:
            expected = {each.past: (each.shape[0], each.shape[-1]) for each in cache_tensors(model.layers)}
            check_tensors(path, shapes(compiled), expected | {LOGITS: (model.vocab_rows,)})
            session = PagedSession(compiled, self.sizes(role, batch))
            session.pack()
        return session

    def sampler(self, name: str) -> Engine:
        """Return a sampler in ONNX Runtime, whose TopK and ArgMax take a quarter of OpenVINO's time."""
        inputs, outputs = engine_tensors(self.manifest, name)
        return OnnxRuntimeEngine(self.folder / sampler_file(name), [*inputs, *outputs], self.device)
