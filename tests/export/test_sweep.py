"""Every architecture that transformers registers as a causal language model: tiny random models of it, of two configurations,
are exported, or refused with a reason. The last section of docs/models.md has the outcome.
"""

from __future__ import annotations

import importlib
import multiprocessing
import re
import shutil
import textwrap
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.backends.onnxruntime.package import first_line
from outrider.engines.precisions import PRECISIONS
from outrider.errors import OutriderError
from outrider.export.checkpoints.checkpoint import load_model, read_config
from outrider.export.checkpoints.source import Source
from outrider.export.graph.replaced import replaced
from outrider.export.graph.step_model import trace
from outrider.export.parity import CHUNKS, Exported, compare, reference
from outrider.tests.backends.staged import check_stages
from outrider.tests.export import models_page
from outrider.tests.export.tiny_configs import another, changed, resolved, shrunk
from outrider.tests.support import write_checkpoint

LIMIT = 480  # seconds for two models
EXPORTED, REFUSED, NOT_TRIED, FAILED = "exported", "refused", "not tried", "failed"
SECOND = "in a second configuration: "
CONTEXT = multiprocessing.get_context("forkserver")
MODEL_TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name != "gpt-sw3"]  # which is gpt2
MODULE = "outrider.tests.export.test_sweep"  # pytest gives it another name, which a new process cannot import
# What the page says of a refusal whose message has this part; of others, it has the message.
REASONS = {
    "encoder-decoder": "an encoder-decoder",
    "no key/value cache": "no key/value cache",
    "no layer with attention": "a recurrent state and no attention",
    "several convolutions": "several convolutions in one layer",
    "indexer": "sparse attention, whose indexer keeps keys of its own",
    "recurrent state of an unknown kind": "a recurrent state of an unknown kind",
    "its own attention code": "its own attention code, outside transformers' attention interface",
    "Attention mask should be of size": "its own attention code, outside transformers' attention interface",
    "without a causal mask": "attention without a causal mask",
    "store_compression_weights": "compressed attention, which keeps more than keys and values",
    "cache of its own": "a cache of its own",
    "data-dependent": "experts whose shapes depend on the data",
    "grouped_mm": "grouped products of experts, which ONNX lacks",
    "Cannot view a tensor": "a view of attention's output that needs another order in memory",
    "not in VR": "a prompt of its own before the text",
}


def write(config: Any, folder: Path) -> None:
    """Write a random checkpoint of this configuration; of an encoder-decoder, the configuration."""
    config.save_pretrained(folder)
    if not config.is_encoder_decoder:
        torch.manual_seed(0)
        made = hf.AutoModelForCausalLM.from_config(config)
        for weight in (parameter.data for parameter in made.parameters()):
            # Fresh norms, biases and AFMoE's routers are ones and zeros, and other weights are so small that tokens in another
            # order change the logits by less than the tolerance, which would hide mistakes.
            if weight.dim() == 1 or bool((weight == weight.flatten()[0]).all()):
                weight += 0.1 * torch.randn_like(weight)
            else:
                weight *= max(1.0, 0.1 / float(weight.std()))
        write_checkpoint(folder, made)
        config.save_pretrained(folder)  # a text model writes its own, which may not be registered


def attempt(kind: type[Any], folder: Path, connection: Connection) -> None:
    """Send how the exports of two tiny models go, and why; stages of their graphs must compute the same."""
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    differences = []
    for configuration, of in ((shrunk, ""), (another, SECOND)):
        checkpoint = folder / configuration.__name__
        try:
            write(configuration(kind), checkpoint)
        except Exception as error:  # tiny_configs.py needs an exception if it is a second one
            connection.send((FAILED if of else NOT_TRIED, of + " ".join(str(error).split())))
            return
        try:
            differences.append(export(Source.parse(str(checkpoint))))
            (checkpoint / "stages").mkdir()
            check_stages(checkpoint / "fp32.onnx", checkpoint / "stages")
        except OutriderError as error:
            connection.send((REFUSED, of + str(error)))
            return
        except Exception as error:
            traceback.print_exc()
            connection.send((FAILED, f"{of}{type(error).__name__}: {first_line(error)}"))
            return
    connection.send((EXPORTED, f"{max(differences):.0e}"))


def export(source: Source) -> float:
    """Export a checkpoint and compare the logits as `outrider export` does; return the difference."""
    read_config(source)
    model = load_model(source, "fp32")
    tokens = torch.randint(2, 320, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    want, layout, _ = reference(model, tokens)
    graph = Path(source.location) / "fp32.onnx"
    trace(model, layout).save(graph, external_data=True)
    return compare(want, Exported(graph, layout, "fp32").logits(tokens), "fp32").max_abs_diff


def outcome(kind: type[Any], folder: Path) -> tuple[str, str]:
    """Return how an export goes in a process of its own, which may crash or hang."""
    if kind.model_type.endswith("assistant"):
        return NOT_TRIED, "a draft, which reads its target's cache"
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=importlib.import_module(MODULE).attempt, args=(kind, folder, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LIMIT) else (NOT_TRIED, f"it takes more than {LIMIT} seconds")
    except EOFError:
        process.join()
        return NOT_TRIED, f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[str, str]]]:
    """What becomes of each model type. After a run over all of them, the page may be written."""
    CONTEXT.set_forkserver_preload([MODULE])
    found: dict[str, tuple[str, str]] = {}
    yield found
    if request.config.getoption("--models-page"):
        models_page.write("sweep", section({name: found[name] for name in MODEL_TYPES}))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_causal_language_model_is_exported_or_refused_with_a_reason(
    name: str, results: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    """What the page lists as exported stays so. A machine may be too slow for others, or a transformers know more."""
    text = resolved(CONFIG_MAPPING[name])
    if text.model_type not in results:
        results[text.model_type] = outcome(text, tmp_path)
        shutil.rmtree(tmp_path)
    status, reason = results[name] = results[text.model_type]
    assert status != FAILED, reason  # no refusal, but a traceback
    listed = re.search(r"^Exported: (.*)\.$", models_page.parts()["sweep"], re.MULTILINE)
    assert listed is not None
    assert status == EXPORTED or name not in listed[1].split(", "), reason


OF_GEMMA_3N: dict[str, Any] = {
    **{"num_hidden_layers": 2, "altup_num_inputs": 2, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1},
    **{"activation_sparsity_pattern": [0.5, 0.0], "intermediate_size": [96] * 2},
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v2", {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
        pytest.param("gemma3n_text", OF_GEMMA_3N, marks=pytest.mark.slow),
        ("roberta", {"num_hidden_layers": 1}),
    ],
    ids=["deepseek_v2", "gemma3n_text", "roberta"],
)
def test_what_stands_in_for_functions_that_onnx_lacks(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Rotary embeddings in complex numbers, with latent attention and shared experts; a quantile of the normal
    distribution, and keys shared by layers; positions from 2 on."""
    write(changed(name, changes), tmp_path)
    export(Source.parse(str(tmp_path)))


def test_of_experts_with_equal_scores_a_graph_and_its_reference_choose_the_same(tmp_path: Path) -> None:
    """A fresh router of AFMoE gives every expert the same score."""
    config = changed("afmoe", {"num_hidden_layers": 1, "num_dense_layers": 0, "layer_types": ["full_attention"]})
    torch.manual_seed(0)
    write_checkpoint(tmp_path, hf.AutoModelForCausalLM.from_config(config))
    export(Source.parse(str(tmp_path)))


def test_what_stands_in_for_a_quantile_computes_it() -> None:
    """Without the trace, which takes most of the time of the test above."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(changed("gemma3n_text", OF_GEMMA_3N)).eval()
    tokens = torch.randint(1, 64, (1, 20))
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits
        with replaced(model):
            got = model(tokens, use_cache=False).logits
        model.model.layers[0].mlp.activation_sparsity = 0.3
        other = model(tokens, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(other, want, atol=1e-3)


def section(results: dict[str, tuple[str, str]]) -> str:
    """The last section of docs/models.md, below its heading."""
    exported = sorted(name for name, (status, _) in results.items() if status == EXPORTED)
    chunks, tolerance = ", ".join(map(str, CHUNKS)), PRECISIONS["fp32"].parity
    lines = [
        f"transformers {hf.__version__} registers {len(results)} model types as causal language models.",
        "`make models-page` (`tests/export/test_sweep.py`) makes two tiny random models of each, and exports them in fp32. The",
        "first has a layer of each kind in its default configuration. The second has four layers or more, and differs in",
        "what it has of these: widths of heads, key/value heads, dense and sparse layers, numbers of experts and of their",
        "groups, sliding windows, biases, tied embeddings. For a multimodal model type, it exports the text model if that is",
        "registered separately. Encoders run as decoders (`is_decoder`). Each is also cut into stages wherever that is",
        "possible, which compute the same.",
        "",
        f"**{len(exported)} of {len(results)} are exported** in both configurations: run on ONNX Runtime in chunks of {chunks}",
        f"tokens, their logits differ from eager transformers' by at most {tolerance:.0e}, or, if any is",
        "above 1, by that times the largest. Model types outside the first table are tested no further.",
        "",
        f"Exported: {', '.join(exported)}.",
        "",
        "| model type | reason |",
        "|---|---|",
    ]
    for name, (status, reason) in sorted(results.items()):
        if status != EXPORTED:
            lines.append(f"| {name} | {'not tried: ' if status == NOT_TRIED else ''}{short(reason)} |")
    return "\n".join(lines)


def short(reason: str) -> str:
    """Return a reason for a cell of the table."""
    known = next((words for part, words in REASONS.items() if part in reason), None)
    if known and reason.startswith(SECOND):
        return SECOND + known
    return known or textwrap.shorten(reason.split(" graph: ")[-1], 160, placeholder=" ...").replace("|", "\\|")
