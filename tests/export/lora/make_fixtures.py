"""Compute `fixtures.npz` with PEFT: adapters that it saves, and what its own merge makes of a model.

From the repository's root, with the tests' environment, and PEFT beside it:

    .venv/bin/pip install --target /tmp/peft --no-deps peft==0.21.2 accelerate==1.15.0
    PYTHONPATH=/tmp/peft .venv/bin/python -m outrider.tests.export.lora.make_fixtures

It takes seconds. Each case has the name of a model in `bases.py` as CASE/base, the files of each adapter as
CASE/ADAPTER/FILE, its weight as CASE/ADAPTER/weight, and of the merged model the logits of `TOKENS` as CASE/logits and a
corner of each changed parameter as CASE/merged/NAME, both float32.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.tests.export.lora.bases import BASES, CORNER, TOKENS

ADAPTERS: dict[str, tuple[str, dict[str, tuple[float, dict[str, Any]]]]] = {
    "patterns": (
        "llama",
        {
            "one": (
                1.0,
                {
                    "target_modules": ["q_proj", "down_proj"],
                    "rank_pattern": {"down_proj": 2},
                    "alpha_pattern": {"layers.0.self_attn.q_proj": 12},
                },
            )
        },
    ),
    "stabilized-table": ("llama", {"one": (1.0, {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True})}),
    "saved-modules": ("llama", {"one": (1.0, {"target_modules": ["v_proj"], "modules_to_save": ["norm"], "bias": "all"})}),
    "two": ("llama", {"one": (0.5, {"target_modules": ["q_proj"]}), "other": (-2.0, {"target_modules": ["q_proj", "k_proj"]})}),
    "transposed": ("gpt2", {"one": (1.0, {"target_modules": ["c_attn"], "fan_in_fan_out": True})}),
}


def main() -> None:
    peft: Any = importlib.import_module("peft")
    layers: Any = importlib.import_module("peft.tuners.lora")
    arrays: dict[str, Any] = {}
    for case, (base, adapters) in ADAPTERS.items():
        arrays[f"{case}/base"] = base
        plain = dict(BASES[base]().named_parameters())
        with tempfile.TemporaryDirectory() as folder:
            for at, (name, (weight, options)) in enumerate(adapters.items()):
                torch.manual_seed(at)
                made = peft.get_peft_model(
                    BASES[base](), peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)
                )
                for key, parameter in made.named_parameters():
                    if parameter.requires_grad and "lora_" not in key:
                        parameter.data += 0.25  # as if it had been trained
                path = Path(folder, name)
                made.save_pretrained(path)
                arrays[f"{case}/{name}/weight"] = weight
                for file in ("adapter_config.json", "adapter_model.safetensors"):
                    arrays[f"{case}/{name}/{file}"] = np.frombuffer((path / file).read_bytes(), np.uint8)
            first, *others = adapters
            model = peft.PeftModel.from_pretrained(BASES[base](), Path(folder, first), adapter_name=first)
            for name in others:
                model.load_adapter(Path(folder, name), adapter_name=name)
            for module in model.modules():
                if isinstance(module, layers.LoraLayer):
                    for name in module.scaling:
                        module.set_scale(name, adapters[name][0])
            merged = model.merge_and_unload(adapter_names=[*adapters])
            with torch.no_grad():
                arrays[f"{case}/logits"] = merged(TOKENS).logits.numpy()
            for key, parameter in merged.named_parameters():
                if not torch.equal(parameter, plain[key]):
                    arrays[f"{case}/merged/{key}"] = parameter.detach()[CORNER].numpy()
    np.savez_compressed(Path(__file__).parent / "fixtures.npz", **arrays)


if __name__ == "__main__":
    main()
