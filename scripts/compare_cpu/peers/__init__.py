"""One module per program that is compared: how to prepare its models, and how to run it.

A module has `NAME`, `PACKAGE` and `load(job)`. A peer, which is any program but Outrider, also has `WEIGHTS`, a description of
its weights; `SETTINGS`, the settings to try before the rounds; `DEFAULTS`, its default settings; and `prepare(folder, pair)`.
In settings, k = 0 is plain decoding and k = None is the peer's own default.
"""

from __future__ import annotations

from types import ModuleType

from outrider.scripts.compare_cpu.peers import genai, llama_cpp, ours, transformers

PEERS: dict[str, ModuleType] = {peer.NAME: peer for peer in (genai, llama_cpp, transformers)}
PROGRAMS: dict[str, ModuleType] = {ours.NAME: ours} | PEERS
