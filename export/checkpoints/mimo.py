"""MiMo-7B (Xiaomi 2025, arXiv 2505.07608): Qwen2 with heads for multi-token prediction. transformers has no class for it."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):  # type: ignore[misc]  # transformers is untyped here
    """The configuration of Qwen2 under another name."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2 without the heads, which `export/heads/mtp.py` reads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012  # transformers' own form


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
