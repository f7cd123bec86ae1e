"""The parts of a model of Hugging Face's transformers that a pipeline cuts: embedding, blocks and head."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_sm.errors import StrategyError

ATTRIBUTE = "pipeline_parts"


@dataclass(frozen=True)
class _Family:
    """Where the base model of a family (``PreTrainedModel.base_model``) has its parts.

    Args:
        embedding: The modules that run before the first block and have parameters or draw random numbers.
        blocks: The list of blocks.
    """

    embedding: tuple[str, ...]
    blocks: str


_LIKE_BERT = _Family(("embeddings",), "encoder.layer")
_LIKE_LLAMA = _Family(("embed_tokens",), "layers")
# By the configuration's model_type. The tests compare each, cut and uncut (tests/integration/training/strategies).
FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("bert", "dinov2", "roberta", "xlm-roberta"), _LIKE_BERT),
    **dict.fromkeys(("cohere", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral"), _LIKE_LLAMA),
    **dict.fromkeys(("mixtral", "olmo2", "phi3", "qwen2", "qwen3"), _LIKE_LLAMA),
    "gpt2": _Family(("wte", "wpe", "drop"), "h"),
    "gpt_neox": _Family(("embed_in", "emb_dropout"), "layers"),
    "opt": _Family(("decoder.embed_tokens", "decoder.embed_positions"), "decoder.layers"),
    "vit": _Family(("embeddings",), "layers"),
}


@dataclass(frozen=True)
class PretrainedParts:
    """The parts of a model; names are paths in it.

    Args:
        model: The model, a base model with a head, such as a ``GPT2LMHeadModel``.
        base: Name of the base model.
        embedding: The modules that run before the blocks.
        blocks: The list of blocks, which run one after the other.
        closing: The modules with parameters that run after the blocks; the last one is the head.
    """

    model: nn.Module
    base: str
    embedding: tuple[str, ...]
    blocks: str
    closing: tuple[str, ...]

    @property
    def head(self) -> str:
        """Name of the head."""
        return self.closing[-1]

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """The paths of the modules of each layer: the embedding, each block, and what follows them."""
        blocks: Any = self.model.get_submodule(self.blocks)
        return [self.embedding, *((f"{self.blocks}.{i}",) for i in range(len(blocks))), self.closing]


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, which is not imported for that.

    Args:
        module: The module.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def described(model: nn.Module) -> str:
    """Return a model's class and the version of transformers, for messages.

    Args:
        model: The model.
    """
    return f"{type(model).__name__} of transformers {sys.modules['transformers'].__version__}"


def find_parts(model: nn.Module, owner: str, name: str) -> PretrainedParts:
    """Return the parts of a model.

    Families that are not known need an attribute ``pipeline_parts`` of the model with the paths of its parts:
    ``{"embedding": [...], "blocks": "..."}``.

    Args:
        model: The model.
        owner: Class of the LightningModule, for messages.
        name: The model's name in it.

    Raises:
        StrategyError: The family is not known, or the model is not built as this family is known to be.
    """
    hub: Any = model
    where = f"{owner}.{name}, a {described(model)},"
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise StrategyError(
            f"{where} is on the meta device, where its stages could not get the initial values that transformers "
            'gives them. Build it outside of torch.device("meta").'
        )
    if getattr(hub.config, "is_encoder_decoder", False):
        raise StrategyError(
            f"{where} has an encoder and a decoder, which are two lists of blocks. A pipeline cuts models with one: "
            "use strategy=fsdp."
        )
    bases = [child for child, module in model.named_children() if module is hub.base_model]
    if not bases:
        raise StrategyError(
            f"{where} has no head. A pipeline cuts models with one, such as AutoModelForCausalLM or "
            "AutoModelForSequenceClassification make."
        )
    heads = [
        child
        for child, module in model.named_children()
        if child not in bases and next(module.parameters(), None) is not None
    ]
    if len(heads) != 1:
        raise StrategyError(
            f"{where} has {len(heads)} modules with parameters besides {bases[0]}"
            f"{': ' if heads else ''}{', '.join(heads)}. A pipeline cuts models with one head."
        )
    embedding, blocks = _declared(model, where, name) or _known(model, bases[0], where, name)
    _check_paths(model, embedding, blocks, where, name)
    taken = [model.get_submodule(path) for path in (*embedding, blocks)]
    closing = tuple(path for path in _rest(model, {id(module) for module in taken}) if path != heads[0])
    return PretrainedParts(model, bases[0], embedding, blocks, (*closing, heads[0]))


def _declared(model: nn.Module, where: str, name: str) -> tuple[tuple[str, ...], str] | None:
    parts: Any = getattr(model, ATTRIBUTE, None)
    if parts is None:
        return None
    if not isinstance(parts, Mapping) or parts.keys() != {"embedding", "blocks"} or isinstance(parts["embedding"], str):
        raise StrategyError(f"{where} has {ATTRIBUTE}={parts!r}. Write it as {_line(model, name)}")
    return tuple(parts["embedding"]), parts["blocks"]


def _known(model: nn.Module, base: str, where: str, name: str) -> tuple[tuple[str, ...], str]:
    hub: Any = model
    kind = hub.config.model_type
    family = FAMILIES.get(kind)
    if family is None:
        raise StrategyError(
            f"{where} is of the family {kind!r}, whose parts are not known here, unlike those of "
            f"{', '.join(sorted(FAMILIES))}. If it embeds its inputs, passes them through one list of blocks, and then "
            f"to the head, say where they are, when {name} is made:\n    {_line(model, name)}\n"
            "Blocks must need nothing of each other but the hidden states; the first batch is checked for that. "
            "Otherwise, use strategy=fsdp."
        )
    return tuple(f"{base}.{path}" for path in family.embedding), f"{base}.{family.blocks}"


def _check_paths(model: nn.Module, embedding: tuple[str, ...], blocks: str, where: str, name: str) -> None:
    modules = dict(model.named_modules())
    missing = [path for path in (*embedding, blocks) if path not in modules]
    wrong = None
    if missing:
        wrong = f"has no {', '.join(missing)}"
    elif not isinstance(modules[blocks], nn.ModuleList) or not len(modules[blocks]):
        wrong = f"has no list of blocks in {blocks}, but a {type(modules[blocks]).__name__}"
    if wrong is not None:
        raise StrategyError(
            f"{where} {wrong}, where its parts were expected. Say where they are, when {name} is made:\n    "
            f"{_line(model, name)}"
        )


def _rest(module: nn.Module, taken: set[int], path: str = "") -> Iterator[str]:
    """Yield the paths of the largest modules with parameters that neither are nor have one that is taken."""
    for name, child in module.named_children():
        if id(child) in taken:
            continue
        if any(id(inner) in taken for inner in child.modules()):
            yield from _rest(child, taken, f"{path}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{path}{name}"


def _line(model: nn.Module, name: str) -> str:
    """Return the line that names a model's parts, with what they seem to be."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return f'self.{name}.{ATTRIBUTE} = {{"embedding": ["base.embeddings"], "blocks": "base.layers"}}'
    blocks = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))[0]
    embedding: list[str] = []
    parent, path = model, ""
    for part in blocks.split("."):
        for child, module in parent.named_children():
            if child == part:
                break
            if next(module.parameters(), None) is not None:
                embedding.append(f"{path}{child}")
        parent, path = parent.get_submodule(part), f"{path}{part}."
    shown = ", ".join(f'"{path}"' for path in embedding)
    return f'self.{name}.{ATTRIBUTE} = {{"embedding": [{shown}], "blocks": "{blocks}"}}'
