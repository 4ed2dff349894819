"""Measures how often the target accepts the tokens of a bundle's drafters, on prompts that ship with Outrider."""

from __future__ import annotations

from pathlib import Path

from outrider.backends.open import open_engines
from outrider.builder.workloads import SHIPPED, load
from outrider.bundle.manifest import CHAT_TEMPLATE, Build, Manifest
from outrider.progress import SILENT, Progress
from outrider.runtime.drafters.base import DeviceDrafter
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.text.text import Text

ANSWER_TOKENS = 32  # of each prompt


def measure_acceptance(folder: Path, manifest: Manifest, build: Build, progress: Progress = SILENT) -> dict[str, float]:
    """Return, for each drafter on the device, the share of the target's greedy tokens that it would have drafted.

    The answers to one shipped prompt per workload are measured, up to `ANSWER_TOKENS` each. A drafter is missing if too few
    prompts fit, or if the answers are too short.

    Raises:
        EngineError: an engine does not run here, or the logits contain NaN or infinity.
        UsageError: the chat template refuses a prompt.
    """
    with Outrider(open_engines(folder, manifest, build), Text.load(folder, manifest)) as outrider:
        drafters = {name: each for name, each in outrider.decoder.drafters.items() if isinstance(each, DeviceDrafter)}
        chat = CHAT_TEMPLATE in manifest.files
        prompts = [outrider.text.encode(prompt.prompt, chat=chat) for prompt in load(SHIPPED, each=1)] if drafters else []
        prompts = [ids for ids in prompts if len(ids) + ANSWER_TOKENS <= build.capacity]
        agreed: dict[str, list[bool]] = {name: [] for name in drafters}
        progress.stage("measuring acceptance", len(prompts))
        for ids in prompts:
            events = outrider.generate(ids, SamplingParams(max_new_tokens=ANSWER_TOKENS), k=0)
            tokens = [token for event in events for token in event.token_ids]
            for name, drafter in drafters.items():
                agreed[name] += drafter.agreement(ids, tokens)[0]
            progress.advance(1)
    return {name: round(sum(each) / len(each), 3) for name, each in agreed.items() if len(each) >= ANSWER_TOKENS}
