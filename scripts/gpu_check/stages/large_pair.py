"""A pair of random weights in the shape of Qwen2.5 7B and 0.5B. Takes 60 GB of memory to build, and 60 GB of disk."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from outrider import Outrider
from outrider.backends.tensorrt.package import RTX
from outrider.engines.cuda import Cuda
from outrider.scripts.gpu_check.hardware import bandwidth
from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import PAIR, PRECISION, Folders, build, outrider
from outrider.scripts.gpu_check.timing import ForcedAcceptance, time_bundle

ACCEPTANCE = 0.8  # of this pair, which would never agree by itself
SHAPES = {
    "target": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "draft": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


def check(report: Report, folders: Folders) -> None:
    """Time the pair, with the backend that is fastest on this GPU; acceptance is forced, since it would never agree."""
    source, backend = folders.exports / "large", RTX.backend
    if RTX.unsupported(Cuda().compute_capability) is not None:
        backend = "onnxruntime"
    if not source.exists():
        report.run("random weights", partial(write_large_pair, folders.work / "large-pair", PAIR / "target"))
        report.run("export", partial(_export, folders.work / "large-pair", source))
    bundle = folders.work / f"large-{backend}"
    if report.run("build", partial(build, source, bundle, backend)) is None:
        return
    rate = report.run("copy bandwidth, GB/s", bandwidth)
    report.run("timing", partial(_time, report, backend, bundle, rate))


def _export(pair: Path, folder: Path) -> str:
    outrider("export", "--target", pair / "target", "--draft", pair / "draft", "--precision", PRECISION, "-o", folder)
    return "exported"


def _time(report: Report, backend: str, bundle: Path, rate: float | None) -> str:
    loaded = Outrider.load(bundle).observed(ForcedAcceptance(ACCEPTANCE))
    return time_bundle(report, f"{backend}, acceptance forced to {ACCEPTANCE}", loaded, "the quick brown fox", rate)


def write_large_pair(folder: Path, tokenizer: Path) -> str:
    """Write the checkpoints `target` and `draft` in fp16, with the tokenizer of the checkpoint `tokenizer`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    default = torch.get_default_dtype()
    for role, shape in SHAPES.items():
        config = Qwen2Config(
            vocab_size=152064,
            max_position_embeddings=4096,
            tie_word_embeddings=role == "draft",
            bos_token_id=None,
            eos_token_id=None,
            **shape,
        )
        torch.set_default_dtype(torch.float16)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
        torch.set_default_dtype(default)
        model.cpu().save_pretrained(folder / role)
        del model
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / name, folder / role / name)
    return "written"
