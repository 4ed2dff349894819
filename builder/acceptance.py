"""Measures how often the target accepts the tokens of a bundle's drafters, on prompts that ship with Outrider."""

from __future__ import annotations

from outrider.builder.workloads import SHIPPED, load
from outrider.bundle.manifest import CHAT_TEMPLATE
from outrider.progress import SILENT, Progress
from outrider.runtime.drafters.base import DeviceDrafter
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams

ANSWER_TOKENS = 32  # of each prompt
FEW = ("chat", "code")  # workloads: drafts are rarely right in one, and often in the other


def measure_acceptance(loaded: Outrider, progress: Progress = SILENT, *, few: bool = False) -> dict[str, float]:
    """Return, for each drafter on the device, the share of the target's greedy tokens that it would have drafted.

    The answers to one shipped prompt per workload are measured, up to `ANSWER_TOKENS` each. A drafter is missing if no prompt
    fits, or if the answers together have fewer tokens than one may have.

    Args:
        few: whether to measure only the workloads in `FEW`, and half as many tokens of each answer.

    Raises:
        EngineError: an engine does not run here, or the logits contain NaN or infinity.
        UsageError: the chat template refuses a prompt.
    """
    drafters = {name: each for name, each in loaded.decoder.drafters.items() if isinstance(each, DeviceDrafter)}
    most = ANSWER_TOKENS // 2 if few else ANSWER_TOKENS
    chat = CHAT_TEMPLATE in loaded.manifest.files
    shipped = [each for each in load(SHIPPED, each=1) if each.workload in FEW or not few] if drafters else []
    prompts = [loaded.text.encode(each.prompt, chat=chat) for each in shipped]
    prompts = [ids for ids in prompts if len(ids) + most <= loaded.build.capacity]
    agreed: dict[str, list[bool]] = {name: [] for name in drafters}
    progress.stage("measuring acceptance", len(prompts))
    for ids in prompts:
        events = loaded.generate(ids, SamplingParams(max_new_tokens=most), k=0)
        tokens = [token for event in events for token in event.token_ids]
        for name, drafter in drafters.items():
            agreed[name] += drafter.agreement(ids, tokens)[0]
        progress.advance(1)
    return {name: round(sum(each) / len(each), 3) for name, each in agreed.items() if len(each) >= most}
