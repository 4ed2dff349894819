"""Read the metadata of a GGUF file, and make transformers' configuration agree with it.

transformers reads the tensors and some of the metadata. For the rest it uses defaults of the architecture. Here, every key and
tensor of the file agrees with the configuration, is put into it, is known to have no effect, or is refused by name. The package
`gguf` defines the names of keys and tensors; llama.cpp's `llama-model.cpp` and `llama-vocab.cpp` define their meaning.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.gguf import is_gguf_arch_supported

from outrider.engines.arrays import Floats
from outrider.errors import OutriderError, SourceError, UnsupportedModelError
from outrider.export.checkpoints.gguf_reader import once_per_file, open_gguf
from outrider.export.checkpoints.gguf_tensors import GgufTensors
from outrider.export.checkpoints.source import MOST, Source, reason_of

# The entries of a configuration for each key of the file. The first entry that a configuration has counts.
SETTINGS: dict[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attention.value_length": ("v_head_dim", "head_dim"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "embedding_scale": ("embedding_multiplier",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "full_attention_interval": ("full_attention_interval",),
    "logit_scale": ("logit_scale",),
    "residual_scale": ("residual_multiplier",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "conv_kernel"),
    "ssm.group_count": ("linear_num_key_heads", "n_groups"),
    "ssm.state_size": ("linear_key_head_dim", "state_size"),
    "ssm.time_step_rank": ("linear_num_value_heads", "time_step_rank"),
    "use_parallel_residual": ("use_parallel_residual",),
    "vocab_size": ("vocab_size",),
}
SHAPES = {"vocab_size", "embedding_length"}  # sizes of tensors, which no configuration can change
# llama.cpp's defaults. A key with this value has no effect.
USUAL: dict[str, Any] = {
    "attention.causal": True,
    "expert_weights_scale": 1.0,
    "logit_scale": 1.0,
    "pooling_type": 0,
    "expert_count": 0,
}
# Keys that transformers reads when it builds the configuration, that `_rope` reads, or that only tools read.
ELSEWHERE = re.compile(
    r"block_count|nextn_predict_layers|rope\.(dimension_(count|sections)|freq_base|scal(e_linear|ing\.(type|factor|finetuned|"
    r"original_context_length|attn_factor|yarn_(ext_factor|attn_factor|beta_fast|beta_slow))))|ssm\.inner_size|tensor_data_layout"
)
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that always end an answer, as in llama.cpp, without the tokens for fill-in-the-middle.
ENDS = {
    "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
    "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>",
    "<|calls|>", "<|flush|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
HARMONY = {"<|return|>", "<|call|>"}  # if both exist, <|end|> only ends a message
FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies
AGAIN = "export the Hugging Face checkpoint that the file was made from"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata of a GGUF file, and the names and sizes of its tensors."""

    name: str
    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, int]
    frequencies: Floats | None

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read a file, unless it was read before and did not change: a vocabulary of 150,000 tokens takes seconds.

        Raises:
            UnsupportedModelError: the file is one part of several.
            SourceError: the file cannot be read.
        """
        return _read(path)

    def from_pretrained(self, location: str, *, config: Any, gguf_file: str, **options: Any) -> Any:
        """Load the model like `AutoModelForCausalLM.from_pretrained`, where possible one tensor at a time."""
        if is_gguf_arch_supported(self.architecture):
            return AutoModelForCausalLM.from_pretrained(location, config=config, gguf_file=gguf_file, **options)
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        tensors = GgufTensors(Path(location, gguf_file), self.architecture, outline).outlines()
        return type(outline).from_pretrained(None, config=config, state_dict=tensors, **options)

    def amend(self, config: Any) -> None:
        """Make the configuration that transformers read from the file agree with the file.

        Raises:
            UnsupportedModelError: the file has a value that the configuration cannot have.
            SourceError: a value has the wrong type or is impossible.
        """
        try:
            self._amend(config)
        except OutriderError:
            raise
        except Exception as error:
            raise SourceError(f"the metadata of {self.name} is impossible: {reason_of(error)}", AGAIN) from error

    def _amend(self, config: Any) -> None:
        text = config.get_text_config()
        for key, value in self._own().items():
            if not ELSEWHERE.fullmatch(key):
                self._apply(text, key, value)
        if self.architecture == "llama" and "attention.sliding_window" not in self._own():
            text.sliding_window = None  # for a file named Mistral, transformers uses another class, with a window
        self._rope(text)
        if getattr(text, "query_pre_attn_scalar", None) is not None:  # no key has it: `gemma2.cpp`, `gemma3.cpp`
            largest = text.num_hidden_layers == LAYERS_OF_27B.get(self.architecture)
            text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads if largest else text.head_dim
        ids = [self.metadata.get(f"tokenizer.ggml.{name}") for name in END_IDS]
        known = {token: at for at, token in enumerate(self.metadata.get("tokenizer.ggml.tokens", ())) if token in ENDS}
        ids += known.values()
        if known.keys() >= HARMONY:
            ids = [each for each in ids if each != known.get("<|end|>")]
        listed = text.eos_token_id if isinstance(text.eos_token_id, list) else []  # transformers knows Gemma-4's
        config.eos_token_id = text.eos_token_id = list(dict.fromkeys(int(each) for each in (*ids, *listed) if each is not None))

    def finish(self, model: PreTrainedModel) -> None:
        """Divide the rotary frequencies of a loaded model, which no configuration can describe.

        Raises:
            UnsupportedModelError: the file has tensors that the model does not have.
        """
        self._check_tensors(model)
        if self.frequencies is None:
            return
        rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]
        sizes = {tuple(module.inv_freq.shape) for module in rotary}
        if sizes != {self.frequencies.shape} or any(module.rope_type != "default" for module in rotary):
            raise self._unknown(FREQUENCIES, f"{self.frequencies.size} numbers")
        for module in rotary:
            module.inv_freq /= torch.from_numpy(self.frequencies)
            module.original_inv_freq = module.inv_freq.clone()

    def _own(self) -> dict[str, Any]:
        start = f"{self.architecture}."
        return {key.removeprefix(start): value for key, value in self.metadata.items() if key.startswith(start)}

    def _apply(self, text: Any, key: str, value: Any) -> None:
        """Put the value of one key into the configuration, if it differs."""
        name = next((each for each in SETTINGS.get(key, ()) if getattr(text, each, None) is not None), None)
        if isinstance(value, list):  # one per layer: if they differ, transformers has to know the architecture
            if len({*value}) > 1:
                if name is None or getattr(text, name) != max(value):
                    raise self._unknown(key, value)
                return
            value = value[0]
        if name is None:
            if key not in USUAL or value != USUAL[key]:
                raise self._unknown(key, value)
        elif not _same(getattr(text, name), value):
            if key in SHAPES or isinstance(getattr(text, name), list | dict):
                raise self._unknown(key, value)
            setattr(text, name, value)

    def _rope(self, text: Any) -> None:
        """Put the scaling of rotary embeddings into the configuration, as in llama.cpp's `load_hparams` and `rope_yarn`."""
        own = self._own()
        entry = getattr(text, "rope_parameters", None)
        if entry is not None and "full_attention" in entry:  # the layers with a window keep theirs
            entry = entry["full_attention"]
        if entry is not None and "rope.freq_base" in own:
            entry["rope_theta"] = own["rope.freq_base"]
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dimensions = own.get("rope.dimension_count")
        if dimensions and entry is not None and dimensions != int(head * entry.get("partial_rotary_factor", 1.0)):
            raise self._unknown("rope.dimension_count", dimensions)
        factor = float(own.get("rope.scaling.factor", own.get("rope.scale_linear", 0.0)) or 1.0)
        kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own or factor != 1 else "none")
        scaled = kind != "none" and (kind != "linear" or factor != 1)
        odd = ["rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"] if scaled else []
        odd += ["rope.scaling.attn_factor"] if kind != "yarn" else []  # the other kinds only scale frequencies
        for key in odd:
            if not _same(own.get(key, 1.0), 1.0):
                raise self._unknown(key, own[key])
        if not scaled:
            return
        if entry is None or kind not in ("linear", "yarn") or self.frequencies is not None:
            raise self._unknown("rope.scaling.type", kind)
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = own.get("rope.scaling.original_context_length", own.get("context_length"))
            magnitude = float(own.get("rope.scaling.attn_factor", 1.0)) * (1 + 0.1 * math.log(factor))
            scaling |= {"original_max_position_embeddings": original, "attention_factor": magnitude}
            scaling |= {
                name: float(own[f"rope.scaling.yarn_{name}"])
                for name in ("beta_fast", "beta_slow")
                if f"rope.scaling.yarn_{name}" in own
            }
        entry.update(scaling)

    def _check_tensors(self, model: PreTrainedModel) -> None:
        """Refuse a file with tensors that the model does not use: transformers ignores them silently."""
        own = self._own()
        layers = int(own.get("block_count", 0))  # including MTP layers, which are not part of the model
        decoding = layers - int(own.get("nextn_predict_layers", 0))
        left = {name: count for name, count in self.tensors.items() if name != FREQUENCIES and _layer(name) < decoding}
        beyond = [name for name in self.tensors if _layer(name) >= layers]
        if beyond or sum(left.values()) > sum(each.numel() for each in model.parameters()):
            archs = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture]
            known = {gguf.TENSOR_NAMES[each] for arch in archs for each in gguf.MODEL_TENSORS[arch]}
            strange = [*beyond, *(name for name in left if _pattern(name) not in known), *left]
            raise UnsupportedModelError(
                f"{self.name} has tensors that {type(model).__name__} does not have, such as {strange[0]}", AGAIN
            )

    def _unknown(self, key: str, value: object) -> UnsupportedModelError:
        full = key if key == FREQUENCIES else f"{self.architecture}.{key}"
        return UnsupportedModelError(f"{self.name} has {full} = {str(value)[:80]}, which outrider does not know there", AGAIN)


@once_per_file
def _read(path: Path) -> GgufFile:
    try:
        reader = open_gguf(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {each.name: each for each in reader.tensors}
        found = np.array(tensors[FREQUENCIES].data, dtype=np.float32) if FREQUENCIES in tensors else None
        counts = {name: int(each.n_elements) for name, each in tensors.items()}
        for key in ("block_count", "nextn_predict_layers"):
            if not 0 <= (count := index(metadata.get(f"{metadata['general.architecture']}.{key}", 0))) <= MOST:
                raise ValueError(f"{key} is {count:,}")
        parts = int(metadata.get(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 1))
        file = GgufFile(path.name, str(metadata["general.architecture"]), metadata, counts, found)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file raises errors of any type
        raise SourceError(f"cannot read the metadata of {path.name}: {reason_of(error)}", "download it again") from error
    if parts > 1:
        raise UnsupportedModelError(
            f"{path.name} is one of {parts} files of a model", "merge them with llama.cpp's llama-gguf-split --merge"
        )
    return file


def _layer(tensor: str) -> int:
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match else -1


def _pattern(tensor: str) -> str:
    return re.sub(r"^blk\.\d+\.", "blk.{bid}.", tensor).rsplit(".", 1)[0]


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-6)  # the file has fp32 numbers
    return ours == theirs


def gguf_file_of(source: Source) -> GgufFile | None:
    """Return the GGUF file of a source, or None if it is another checkpoint."""
    return None if source.gguf is None else GgufFile.read(source.gguf)
