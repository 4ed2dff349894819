"""Compute `fixtures.npz` with speculators' own modules, so that our graphs are compared with what others compute.

From the repository's root, in an environment of its own, since speculators pins other releases than we do:

    python3 -m venv /tmp/speculators && /tmp/speculators/bin/pip install speculators==0.9.0
    mkdir /tmp/named && ln -s "$PWD" /tmp/named/outrider
    export PYTHONPATH=/tmp/named HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    /tmp/speculators/bin/python -m outrider.tests.export.block_head.make_fixtures

It takes seconds, and needs no GPU and no network. `versions` in the file is JSON: the releases that computed it.

`weights.py` has the cases. Each has, with V the draft's vocabulary and D the tokens that a block drafts, float32:

    NAME/logits      [ANCHORS, D, V]  of a block of masks behind each of `weights.ANCHORS`, whose features are the context
    NAME/biased      [ANCHORS, D, V]  the same with the Markov head's bias, given the tokens that follow
    NAME/confidence  [ANCHORS, D]     the confidence head's probability, given the same

The last two are there for cases with such a head. All of it comes from speculators' `_backbone_forward` and its heads, as its
trainer calls them. Its trainer draws the anchors; here as many are asked for as there are.

z-lab's arithmetic is that of speculators, which has a converter for it; DeepSpec's is, too, with `sample_from_anchor`. Sources
read:

    z-lab/dflash 44947fb            dflash/model.py
    deepseek-ai/DeepSpec afdfa7c    deepspec/modeling/dspark, deepspec/eval/dspark/draft_ops.py
    vllm-project/speculators c05b95b  src/speculators/models/{dflash,dspark}, src/speculators/convert/dflash
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators import SpeculatorModelConfig  # type: ignore[import-not-found]
from speculators.models.dflash.core import DFlashDraftModel  # type: ignore[import-not-found]
from speculators.models.dspark.core import DSparkDraftModel  # type: ignore[import-not-found]

from outrider.tests.export.block_head import weights

Arrays = dict[str, np.ndarray]


def built(name: str) -> Any:
    """Return speculators' module with a case's tensors, whichever format these have."""
    case = weights.CASES[name]
    config, tensors = weights.checkpoint(name)
    if case.format != "speculators":
        config = _translated(name, config)
    config = SpeculatorModelConfig.from_dict(config)
    config.transformer_layer_config._attn_implementation = "eager"
    model = (DSparkDraftModel if case.is_dspark else DFlashDraftModel)(config)
    lent, ids = weights.target(name), weights.target_ids(name)
    state = {key: torch.from_numpy(value) for key, value in tensors.items()}
    state.setdefault("embed_tokens.weight", torch.from_numpy(lent["model.embed_tokens.weight"]))
    state.setdefault("lm_head.weight", torch.from_numpy(lent["lm_head.weight"][ids]))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert all(key.startswith("verifier_") or key in ("t2d", "d2t") for key in missing), missing
    assert not unexpected, unexpected
    return model.eval()


def _translated(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Say in speculators' keys what the other formats mean."""
    from dataclasses import replace

    ours = replace(weights.CASES[name], format="speculators", inputs_of=tuple(weights.CASES[name].features))
    outer = {
        "architectures",
        "auto_map",
        "block_size",
        "dflash_config",
        "num_target_layers",
        "target_layer_ids",
        "mask_token_id",
    }
    outer |= {"num_anchors", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
    decoder = {key: value for key, value in config.items() if key not in outer}
    return weights.config(ours) | {"transformer_layer_config": decoder}


def computed(name: str, model: Any) -> Arrays:
    """Return a case's arrays."""
    case = weights.CASES[name]
    hidden, tokens = (torch.from_numpy(array)[None] for array in weights.inputs(name))
    loss_mask = torch.zeros(1, weights.ROWS)
    loss_mask[0, list(weights.ANCHORS)] = 1  # speculators draws among these, and is asked for all of them
    count = len(weights.ANCHORS)
    states, logits, _, _, indices = model._backbone_forward(
        hidden,
        tokens,
        loss_mask,
        torch.zeros(1, weights.ROWS, weights.HIDDEN),
        torch.zeros(1, weights.ROWS, dtype=torch.long),
        max_anchors=count,
    )
    assert indices.view(count, -1)[:, 0].tolist() == list(weights.ANCHORS)
    kept = slice(0 if case.from_anchor else 1, None)
    by_anchor = logits.view(count, case.block, -1)
    found = {"logits": by_anchor[:, kept]}
    block = tokens[0, indices].view(count, case.block)
    before = block if case.from_anchor else torch.cat([block[:, :1], block[:, :-1]], 1)
    states = states.view(count, case.block, -1)
    read = states
    if model_markov := getattr(model, "markov_head", None):
        embedded = model_markov.prev_embeddings(before)
        read = torch.cat([states, embedded], -1) if case.confidence == "with markov" else states
        bias = model_markov.block_bias(prev_token_ids=before, hidden_states=states, prev_emb=embedded)
        found["biased"] = (by_anchor + bias)[:, kept]
    if confidence := getattr(model, "confidence_head", None):
        found["confidence"] = confidence(read).sigmoid()[:, kept]
    return {key: value.numpy() for key, value in found.items()}


@torch.inference_mode()
def main() -> None:
    """Write the file beside this script."""
    torch.set_num_threads(1)
    arrays: Arrays = {}
    for name in weights.CASES:
        arrays |= {f"{name}/{key}": value for key, value in computed(name, built(name)).items()}
    versions = {package: version(package) for package in ("numpy", "speculators", "torch", "transformers")}
    arrays["versions"] = np.array(json.dumps(versions))
    np.savez_compressed(Path(__file__).with_name("fixtures.npz"), allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
