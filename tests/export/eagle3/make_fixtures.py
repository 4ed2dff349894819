"""Compute `fixtures.npz` with speculators' own modules, so that our graphs are compared with what others compute.

From the repository's root, in an environment of its own, since speculators pins other releases than we do:

    python3 -m venv /tmp/eagle3 && /tmp/eagle3/bin/pip install speculators==0.9.0
    mkdir /tmp/named && ln -s "$PWD" /tmp/named/outrider
    PYTHONPATH=/tmp/named OMP_NUM_THREADS=1 /tmp/eagle3/bin/python -m outrider.tests.export.eagle3.make_fixtures

It takes seconds, and needs no GPU and no network. `versions` in the file is JSON: the releases that computed it.

`cases.py` has the cases. Each has, with V the draft's vocabulary, float32 unless said otherwise:

    NAME/logits        [ROWS, V]                    row i: feature i and the embedding of token i + 1, at position i
    NAME/hidden        [ROWS, HIDDEN]               what a draft step after this row takes for its feature, without `fc`
    NAME/chain_tokens  [PREFIXES, STEPS] int64      the token that each step took: the target's id of its predecessor's best
    NAME/chain_logits  [PREFIXES, STEPS, V]
    NAME/chain_hidden  [PREFIXES, STEPS, HIDDEN]

A chain of prefix m has the rows 0 to m - 1 before it; its steps are at positions m, m + 1 and so on. The tokens' best logits
lead by more than `MARGIN`, so rounding cannot change them. Each name of `cases.OTHER_READINGS` has the same arrays. Each of
`cases.PARALLEL` has

    NAME/parallel        [PREFIXES, STEPS, V]          of the last row of each prefix, and of the masks behind it

SafeAILab's, SpecForge's and ModelOpt's arithmetic is that of speculators without norm_before_residual and norm_before_fc;
`built` renames their tensors, and `OTHER` has where their trainers differ from what servers compute. Sources read:

    SafeAILab/EAGLE cb7e084         eagle/model/cnets.py, eagle/traineagle3/cnets.py
    sgl-project/SpecForge a6b6b02   specforge/modeling/draft/llama3_eagle.py, specforge/algorithms/eagle3/model.py,
                                    specforge/export
    NVIDIA/Model-Optimizer a2fbac7  modelopt/torch/speculative/plugins/{modeling_eagle,hf_eagle}.py,
                                    modelopt/torch/export/plugins/hf_spec_{export,configs}.py
                           5a4242f  modelopt/torch/speculative/plugins/transformers.py, which wrote `midlayer`
    vllm-project/vllm 00bd149       vllm/model_executor/models/llama_eagle3.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators import SpeculatorModelConfig  # type: ignore[import-not-found]
from speculators.models.eagle3.core import Eagle3DraftModel  # type: ignore[import-not-found]
from speculators.models.peagle.core import PEagleDraftModel  # type: ignore[import-not-found]

from outrider.tests.export.eagle3 import cases, weights

MARGIN = 1e-3
TOLERANCE = 2e-5
Arrays = dict[str, np.ndarray]


def built(name: str) -> Any:
    """Return speculators' module with a case's tensors, whichever format these have."""
    case = cases.ALL[name]
    config, tensors = weights.checkpoint(name)
    if not case.format.startswith("speculators"):
        config = _translated(case, config)
    config = SpeculatorModelConfig.from_dict(config)
    config.transformer_layer_config._attn_implementation = "eager"
    model = (Eagle3DraftModel if case.mask is None else PEagleDraftModel)(config)
    wide = case.features * case.target_hidden
    if case.target_hidden != cases.HIDDEN:
        # The trainer refuses a target of another width; the converter, vLLM and the other trainers know it.
        if case.norm_before_fc or case.fc_norm:
            raise NotImplementedError("norms of features of another width")
        model.fc = torch.nn.Linear(wide, cases.HIDDEN, bias=False)
    lent = weights.target(name)
    ids = weights.target_ids(name)
    state = {key.replace("midlayer.", "layers.0."): torch.from_numpy(value) for key, value in tensors.items()}
    state.setdefault("embed_tokens.weight", torch.from_numpy(lent["model.embed_tokens.weight"]))
    # As DraftVocabMixin._load_verifier_weights does.
    state.setdefault("lm_head.weight", torch.from_numpy(lent["lm_head.weight"][ids]))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert {key for key in missing if not key.startswith("verifier_")} <= {"t2d"}, missing
    assert set(unexpected) <= ({"d2t", "t2d"} if case.draft_vocab == cases.VOCAB else set()), unexpected
    return model.eval()


def _translated(case: cases.Case, config: dict[str, Any]) -> dict[str, Any]:
    """Say in speculators' keys what the other formats mean."""
    ours = cases.Case(
        inputs_of=case.inputs_of, draft_vocab=case.draft_vocab, fc_norm=case.fc_norm, norm_output=case.norm_output
    )
    outer = {"architectures", "draft_vocab_size", "eagle_config", "fc_norm", "norm_output", "target_hidden_size"}
    decoder = {key: value for key, value in config.items() if key not in outer}
    return weights.speculators_config(ours) | {"transformer_layer_config": decoder}


def run(model: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all rows, and the hidden states that go on to the next draft step."""
    positions = torch.arange(len(tokens))
    x = torch.cat([model.embed_tokens(tokens), hidden], dim=-1)[None]
    rotary = model.rotary_emb(x, positions[None])
    for index, layer in enumerate(model.layers):
        seen = positions[None, :] <= positions[:, None]
        if index in model.sliding_window_indices:
            # A window of n: a row sees itself and the n - 1 rows before it (speculators' create_combined_mask_mod).
            seen &= positions[None, :] > positions[:, None] - model.sliding_window
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        x = layer(x, attention_mask=mask, position_ids=positions[None], position_embeddings=rotary)
    normed = model.norm(x)
    return model.lm_head(normed)[0], (normed if model.config.norm_output else x)[0]


def projected(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Return what the first layer gets for the target's features."""
    if model.input_norm is not None:
        features = model.input_norm(features)
    if model.fc_norm is not None:
        parts = zip(model.fc_norm, features.chunk(len(model.fc_norm), dim=-1), strict=True)
        features = torch.cat([norm(part) for norm, part in parts], dim=-1)
    projection: torch.Tensor = model.fc(features)
    return projection


def computed(name: str, model: Any) -> Arrays:
    """Return a case's arrays: the rows of the text, and the chains."""
    features, tokens = (torch.from_numpy(array) for array in weights.inputs(name))
    ids = torch.from_numpy(weights.target_ids(name))
    fused = projected(model, features)
    logits, hidden = run(model, fused, tokens[1:])
    chains: dict[str, list[torch.Tensor]] = {"chain_tokens": [], "chain_logits": [], "chain_hidden": []}
    for prefix in cases.PREFIXES:
        rows, drafted = fused[:prefix], tokens[1 : prefix + 1]
        for _ in range(cases.STEPS):
            step_logits, step_hidden = run(model, rows, drafted)
            best = step_logits[-1].topk(2)
            assert best.values[0] - best.values[1] > MARGIN, (
                f"{name}: two tokens are about as likely; give it another of cases.SEEDS"
            )
            rows, drafted = torch.cat([rows, step_hidden[-1:]]), torch.cat([drafted, ids[best.indices[:1]]])
        step_logits, step_hidden = run(model, rows, drafted)
        chains["chain_tokens"].append(drafted[prefix:])
        chains["chain_logits"].append(step_logits[prefix:])
        chains["chain_hidden"].append(step_hidden[prefix:])
    return {
        "logits": logits.numpy(),
        "hidden": hidden.numpy(),
        **{key: torch.stack(value).numpy() for key, value in chains.items()},
    }


def computed_in_parallel(name: str, model: Any) -> Arrays:
    """Return the arrays of a head that drafts several tokens in one pass."""
    features, tokens = (torch.from_numpy(array) for array in weights.inputs(name))
    masks = cases.STEPS - 1
    rows = []
    for prefix in cases.PREFIXES:
        read = torch.cat([features[:prefix], model.mask_hidden[0].expand(masks, -1)])
        text = torch.cat([tokens[1 : prefix + 1], torch.full((masks,), model.mask_token_id)])
        logits, _ = run(model, projected(model, read), text)
        rows.append(logits[-cases.STEPS :])
    return {"parallel": torch.stack(rows).numpy()}


def check(name: str, model: Any, arrays: Arrays) -> None:
    """Compare with speculators' whole forward pass, which unrolls the steps from each row with the tokens that it is given."""
    features, tokens = (torch.from_numpy(array) for array in weights.inputs(name))
    heard: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = model.norm.register_forward_hook(lambda _, entering, out: heard.append((entering[0][0], out[0])))
    for prefix, drafted in zip(cases.PREFIXES, arrays["chain_tokens"], strict=True):
        text = torch.cat([tokens[1 : prefix + 1], torch.from_numpy(drafted)])
        rows = torch.cat([features[:prefix], torch.zeros(cases.STEPS, features.shape[1])])
        heard.clear()
        model(rows[None], text[None], document_ids=torch.zeros(1, len(text), dtype=torch.long), ttt_steps=1 + cases.STEPS)
        at = cases.PREFIXES.index(prefix)
        expected_logits = [arrays["logits"][:prefix], *arrays["chain_logits"][at][:, None]]
        expected_hidden = [arrays["hidden"][:prefix], *arrays["chain_hidden"][at][:, None]]
        for step, (before, after) in enumerate(heard):
            if step and model.sliding_window_indices and model.sliding_window < len(text):
                break  # in training, a window counts the confirmed rows alone: later steps see more than a server's do
            shown = slice(0, prefix) if step == 0 else slice(prefix - 1, prefix)
            hidden = after if model.config.norm_output else before
            torch.testing.assert_close(
                model.lm_head(after)[shown], torch.from_numpy(expected_logits[step]), atol=TOLERANCE, rtol=0
            )
            torch.testing.assert_close(hidden[shown], torch.from_numpy(expected_hidden[step]), atol=TOLERANCE, rtol=0)
    hook.remove()


def _normed_twice(model: Any) -> None:
    # ModelOpt since 2025-12-18 (#689, plugins/modeling_eagle.py): input_layernorm, which norms the embedding, is also what
    # transformers' layer applies before its attention, so that the hidden state passes it on its way to hidden_norm.
    first = model.layers[0]
    first.hidden_norm = torch.nn.Sequential(first.input_layernorm, first.hidden_norm)


def _not_fed_back(model: Any) -> None:
    # SpecForge before #879 (2026-09-15): `norm_output` meant the norm before lm_head; what is passed on is never normed.
    model.config.norm_output = False


def _not_normed(model: Any) -> None:
    # The same: without it, nothing is normed before lm_head.
    model.norm = torch.nn.Identity()


OTHER: dict[str, Callable[[Any], None]] = {
    "modelopt-default-rope/normed-twice": _normed_twice,
    "specforge-3.1/before-879": _not_fed_back,
    "specforge-norm-output-false/before-879": _not_normed,
}


@torch.inference_mode()
def main() -> None:
    """Write the file beside this script."""
    torch.set_num_threads(1)
    arrays: Arrays = {}
    for name in cases.CASES:
        model = built(name)
        found = computed(name, model)
        check(name, model, found)
        arrays |= {f"{name}/{key}": value for key, value in found.items()}
    for name in cases.PARALLEL:
        arrays |= {f"{name}/{key}": value for key, value in computed_in_parallel(name, built(name)).items()}
    for reading, name in cases.OTHER_READINGS.items():
        model = built(name)
        OTHER[reading](model)
        arrays |= {f"{reading}/{key}": value for key, value in computed(name, model).items()}
    versions = {package: version(package) for package in ("numpy", "speculators", "torch", "transformers")}
    arrays["versions"] = np.array(json.dumps(versions))
    np.savez_compressed(Path(__file__).with_name("fixtures.npz"), allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
