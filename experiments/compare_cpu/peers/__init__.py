"""One module per compared program. It prepares the program's models, and runs the program.

A module has `NAME`, `version()`, which returns None if the program is not installed, and `load(job)`. A peer is any program
except Outrider. It also has `WEIGHTS`, a description of its weights; `SETTINGS`, the settings to try before the rounds; and
`prepare(folder, pair)`. In settings, k = 0 is plain decoding.
"""

from __future__ import annotations

from types import ModuleType

from outrider.experiments.compare_cpu.peers import genai, llama_cpp, openvino_genai, ours, transformers

PEERS: dict[str, ModuleType] = {peer.NAME: peer for peer in (genai, openvino_genai, llama_cpp, transformers)}
PROGRAMS: dict[str, ModuleType] = {ours.NAME: ours} | PEERS
