"""Models of transformers, cut where their own forward calls their parts; on a stand-in for the package."""

from __future__ import annotations

import copy
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.layers import Network
from tests.fakes.cut_model import through

PARTS = {"embedding": ["base.words", "base.places", "base.drop"], "blocks": "base.blocks"}
ROWS, LENGTH, TOKENS, WIDTH, BLOCKS = 4, 5, 11, 8, 4


class _PreTrainedModel(nn.Module):
    """What is used of transformers' class."""

    main_input_name = "input_ids"

    @property
    def base_model(self) -> nn.Module:
        base: Any = getattr(self, "base", self)
        return base


class Block(nn.Module):
    """A block that needs the positions and the mask, as attention does; ``how`` names what no pipeline can honour."""

    def __init__(self, how: str, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, hidden_states: Tensor, mask: Tensor, extra: Any = None, places: tuple[Tensor, ...] = ()) -> Any:
        mixed = (mask @ hidden_states + places[0]).tanh() * self.shared.scale
        if isinstance(extra, Tensor):
            mixed = mixed + extra
        hidden_states = hidden_states + self.layer(mixed)
        return (hidden_states, mask) if self.how == "tuple" else hidden_states


class Base(nn.Module):
    """Embedding, blocks and norm."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.rotary = nn.Module()  # of all blocks, without parameters
        self.rotary.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.blocks = nn.ModuleList(Block(how, self.rotary) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.how = how

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool | None = None) -> Any:
        assert use_cache is False or not hasattr(self, "is_staged")
        at = torch.arange(input_ids.shape[1])
        embedded = self.drop(self.words(input_ids) + self.places(at))
        mask = attention_mask[:, None, :] * torch.ones(LENGTH, LENGTH).tril()
        places = (at[:, None].to(embedded.dtype),)
        hidden = embedded
        for i, block in enumerate(self.blocks):
            if self.how == "layerdrop" and i == 2:
                continue
            extra = {"embedding for blocks": embedded, "shared list": []}.get(self.how)
            hidden = block(hidden, mask, extra, places=places)
            hidden = hidden[0] if self.how == "tuple" else hidden
        if self.how == "embedding for the head":
            hidden = hidden + embedded
        return SimpleNamespace(last_hidden_state=self.norm(hidden), hidden_states=None)


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of transformers' causal models; labels are shifted."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


causal_loss.__name__ = "ForCausalLMLoss"


class Model(_PreTrainedModel):
    """A causal language model with tied weights."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="unheard_of", use_cache=True, _output_attentions=False)
        self.base = Base(how)
        self.head_drop = nn.Dropout(0.5 if how == "dropout" else 0.0)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.base.words.weight
        self.loss_function = causal_loss

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> Any:
        outputs = self.base(input_ids, attention_mask=attention_mask, use_cache=use_cache)
        logits = self.head(self.head_drop(outputs.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, as the script has imported it."""
    package, modeling = ModuleType("transformers"), ModuleType("transformers.modeling_utils")
    package.__version__ = "0.0.1"  # type: ignore[attr-defined]
    modeling.PreTrainedModel = _PreTrainedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)


def network_of(model: nn.Module, parts: Any = PARTS) -> Network:
    """The model as the network of a LightningModule."""
    module = LightningModule()
    module.model = model
    if parts is not None:
        model.pipeline_parts = parts  # type: ignore[assignment]
    return Network(module, None)


def batch() -> dict[str, Tensor]:
    """Rows of different lengths, padded; padding has no labels."""
    tokens = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) < torch.tensor([[5], [4], [2], [3]])).float()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("cuts", [[1], [3], [5], [1, 2, 4, 5]], ids=str)
def test_stages_compute_what_the_model_does(cuts: list[int]):
    """The loss, the logits and all gradients are the same bits, wherever the model is cut."""
    torch.manual_seed(0)
    model = Model()
    whole = copy.deepcopy(model)
    expected = whole(**batch())
    expected.loss.backward()
    found = through(network_of(model), cuts, batch())
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_rank_with_one_stage_keeps_names_and_makes_what_calls_return():
    """Weights keep their names, those of other ranks are freed, and logits from elsewhere give the loss."""
    model = Model("dropout")
    expected = Model()(**batch()).logits.detach()
    names = list(model.state_dict())
    network = network_of(model)
    stage = network.stage(range(2, 4))
    removed = [weakref.ref(model.base.words.weight), weakref.ref(model.base.blocks[0].layer.weight)]
    network.remove([range(2), range(4, len(network.layers))], ["stage 0", "stage 2"])
    assert [one() for one in removed] == [None, None]
    assert list(model.state_dict()) == [name for name in names if "blocks.1" in name or "blocks.2" in name]
    call = network.calls.bind((), batch())
    network.calls.form = call.form
    hidden = torch.randn(ROWS, LENGTH, WIDTH)
    passed, *rest = stage(hidden, *call.tensors)
    assert passed.shape == hidden.shape
    assert [id(one) for one in rest] == [id(one) for one in call.tensors]
    random_state = torch.get_rng_state()
    made = network.calls.result(expected, call)
    assert torch.equal(torch.get_rng_state(), random_state)  # the dropout before the head does not run again
    assert torch.equal(made.loss, causal_loss(expected, batch()["labels"]))
    assert made.hidden_states is None


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("embedding for blocks", "more than the hidden states"),
        ("embedding for the head", "more than the hidden states"),
        ("shared list", "gives block 2 a list"),
        ("layerdrop", "calls its block 3 where 2 would follow"),
        ("tuple", "blocks that return a tuple"),
    ],
)
def test_a_model_whose_parts_exchange_more_is_refused(how: str, reason: str):
    """With the first values that pass, not by wrong numbers."""
    network = network_of(Model(how))
    first, second = network.stage(range(3)), network.stage(range(3, 6))
    call = network.calls.bind((), batch())
    network.calls.form = call.form
    hidden = (torch.randn(ROWS, LENGTH, WIDTH), *call.tensors)
    with pytest.raises(StrategyError, match=reason):
        second(*(first(*call.tensors) if how == "tuple" else hidden))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"inputs_embeds": torch.zeros(ROWS, LENGTH, WIDTH)}, "inputs_embeds: .* the embedding is a layer"),
        ({"past_key_values": ()}, "past_key_values: .* cannot generate text"),
        ({"use_cache": True}, "use_cache: .* cannot generate text"),
        ({"output_hidden_states": True}, "output_hidden_states: .* do not hand on"),
        ({"kind": object()}, "kind: .* this is a object"),
        ({"attention_mask": None, "position_ids": torch.ones(ROWS, LENGTH)}, "position_ids: .* packed sequences"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_calls_that_stages_cannot_honour_are_refused(arguments: dict[str, Any], reason: str):
    """The error names the argument, the model's class and the version of transformers."""
    network = network_of(Model())
    with pytest.raises(StrategyError, match=f"a Model of transformers 0.0.1, with {reason}"):
        network.calls.bind((), {**batch(), **arguments})


def test_outputs_that_the_configuration_asks_for_are_refused():
    """Also where the configuration keeps them behind properties."""
    model = Model()
    model.config._output_attentions = True
    with pytest.raises(StrategyError, match=r"config.output_attentions"):
        network_of(model).calls.bind((), batch())


LABELS = torch.tensor([[1, 2, 3], [-100, 2, -100], [-100, -100, -100], [1, -100, 3]])


@pytest.mark.parametrize(
    ("labels", "counts"),
    [
        ({"labels": LABELS}, [2, 1, 0, 1]),
        ({"labels": LABELS, "shift_labels": LABELS}, [3, 1, 0, 2]),
        ({"labels": torch.tensor([0, 1, -100, 2])}, [1, 1, 0, 1]),
        ({"labels": torch.zeros(ROWS)}, None),
        ({}, None),
    ],
)
def test_labels_say_how_much_a_row_counts(labels: dict[str, Tensor], counts: list[int] | None):
    """Ignored ones do not; a causal model's first token has none. Numbers that are no classes count as rows."""
    calls = network_of(Model()).calls
    found = calls.counts(calls.bind((), {"input_ids": torch.ones(ROWS, 3).long(), **labels}))
    assert (found if found is None else found.tolist()) == counts


def test_labels_do_not_pass_through_the_stages():
    """They are for the rank of the last stage, which has the batch."""
    call = network_of(Model()).calls.bind((), batch())
    assert call.form.names == ("input_ids", "attention_mask")


def test_a_family_that_is_not_known_is_told_what_to_write():
    """The error has the line, with the parts as they seem to be."""
    with pytest.raises(StrategyError) as error:
        network_of(Model(), None)
    line = 'self.model.pipeline_parts = {"embedding": ["base.words", "base.places"], "blocks": "base.blocks"}'
    assert line in str(error.value)
    assert "of the family 'unheard_of'" in str(error.value)


class _WithoutHead(_PreTrainedModel):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="unheard_of")
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])


def _with(**attributes: Any) -> nn.Module:
    model = Model()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "parts", "reason"),
    [
        (_WithoutHead, PARTS, "has no head"),
        (lambda: _with(other=nn.Linear(2, 2)), PARTS, "2 modules with parameters besides base: head, other"),
        (lambda: _with(config=SimpleNamespace(is_encoder_decoder=True)), PARTS, "an encoder and a decoder"),
        (lambda: Model().to("meta"), PARTS, "on the meta device"),
        (Model, {"blocks": "base.blocks"}, "has pipeline_parts="),
        (Model, {"embedding": ["base.letters"], "blocks": "base.blocks"}, "has no base.letters"),
        (Model, {"embedding": ["base.words"], "blocks": "base.norm"}, "has no list of blocks in base.norm"),
    ],
)
def test_models_that_are_not_as_expected_are_refused(model: Any, parts: Any, reason: str):
    """The error says what is not as it should be."""
    with pytest.raises(StrategyError, match=reason):
        network_of(model(), parts)


def test_a_part_that_was_forgotten_is_missed_when_it_runs():
    """What is no part of the embedding belongs to the head, which the first rank does not have."""
    network = network_of(Model(), {"embedding": ["base.words"], "blocks": "base.blocks"})
    first = network.stage(range(3))
    network.remove([range(3, 6)], ["stage 1"])
    call = network.calls.bind((), batch())
    network.calls.form = call.form
    with pytest.raises(StrategyError, match="not on this rank"):
        first(*call.tensors)
