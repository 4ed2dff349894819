"""One module per program that is compared: how to prepare its models, and how to run it.

A module has `NAME`, `version()`, which is None where the program is not installed, and `load(job)`. A peer, which is any
program but Outrider, also has `WEIGHTS`, a description of its weights; `SETTINGS`, the settings to try before the rounds; and
`prepare(folder, pair)`. In settings, k = 0 is plain decoding.
"""

from __future__ import annotations

from types import ModuleType

from outrider.experiments.compare_cpu.peers import genai, llama_cpp, openvino_genai, ours, transformers

PEERS: dict[str, ModuleType] = {peer.NAME: peer for peer in (genai, openvino_genai, llama_cpp, transformers)}
PROGRAMS: dict[str, ModuleType] = {ours.NAME: ours} | PEERS
