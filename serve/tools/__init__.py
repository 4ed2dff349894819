"""How families of models call tools: the grammar of their answers, and the parser of their calls.

To add a family, write a file with a subclass of `Family` and add it to `FAMILIES`.
"""

from __future__ import annotations

import functools

from outrider.runtime.text.text import Text
from outrider.serve.tools.base import Family
from outrider.serve.tools.gpt_oss import GptOss
from outrider.serve.tools.hermes import Hermes
from outrider.serve.tools.llama import Llama
from outrider.serve.tools.mistral import Mistral
from outrider.serve.tools.qwen_xml import QwenXml

# The first one that recognizes a template is used.
FAMILIES: tuple[type[Family], ...] = (GptOss, QwenXml, Hermes, Mistral, Llama)


@functools.lru_cache(maxsize=4)
def family_of(text: Text) -> Family | None:
    """Return the family whose calls a bundle's chat template writes; None if it is unknown."""
    if text.template is None:
        return None
    template = text.template.source
    known = (family for family in FAMILIES if family.recognizes(template))
    return next((family(text.tokenizer, template) for family in known if family.has_tokens(text.tokenizer)), None)
