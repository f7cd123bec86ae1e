"""How a LightningModule's network is divided into layers, and which networks are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.layers import Network, RemoteLayerPlaceholder, materialize


class Residual(nn.Module):
    """A network that is not an nn.Sequential and lists its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 2)

    def pipeline_layers(self) -> list[nn.Module]:
        """The layers in execution order."""
        return [self.stem, self.body["first"], self.body["second"], nn.Flatten(), self.head]


def module_of(**children: nn.Module) -> LightningModule:
    """A LightningModule with these children."""
    module = LightningModule()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def three_layers() -> nn.Sequential:
    """A network of three layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("network", "names"),
    [(three_layers(), ["0", "1", "2"]), (Residual(), ["stem", "body.first", "body.second", "Flatten", "head"])],
)
def test_the_network_is_found(network, names):
    """The only child that can be cut is the network, whether or not it is named."""
    module = module_of(loss=nn.CrossEntropyLoss(), network=network)
    for name in (None, "network"):
        found = Network(module, name)
        assert (found.name, found.names) == ("network", names)


def test_stages_compute_what_the_network_does_and_keep_its_names():
    """Stages run in sequence give the network's output, and names stay the same after other stages are removed."""
    network = Residual()
    module = module_of(network=network)
    names = list(module.state_dict())
    x = torch.randn(3, 4)
    expected = network.head(network.body["second"](network.body["first"](network.stem(x))))
    cut = Network(module, None)
    first, second = cut.stage(range(2)), cut.stage(range(2, 5))
    assert torch.equal(second(first(x)), expected)
    cut.keep(range(2, 5))
    assert list(module.state_dict()) == [name for name in names if "second" in name or "head" in name]
    assert isinstance(network.body["first"], RemoteLayerPlaceholder)
    with pytest.raises(StrategyError, match="Another rank has this layer"):
        network.stem(x)


def test_a_layer_that_works_in_place_can_begin_a_stage():
    """A stage works on copies of its inputs, as inputs that need gradients cannot be changed in place."""
    module = module_of(network=three_layers())
    stage = Network(module, None).stage(range(1, 3))
    x = torch.randn(3, 8, requires_grad=True)
    before = x.detach().clone()
    stage(x).sum().backward()
    assert torch.equal(x, before)
    assert x.grad is not None


def test_layers_exchange_tuples():
    """A tuple between layers is one argument, as in an nn.Sequential, even at a stage boundary."""

    class Split(nn.Module):
        def forward(self, x):
            return x[:, :2], x[:, 2:]

    class Join(nn.Module):
        def forward(self, halves):
            return halves[0] * halves[1]

    module = module_of(network=nn.Sequential(nn.Linear(4, 4), Split(), Join(), nn.Linear(2, 1)))
    x = torch.randn(3, 4)
    expected = module.network(x)
    cut = Network(module, None)
    for bound in (1, 2, 3):
        between = cut.stage(range(bound))(x)
        values = between if isinstance(between, tuple) else (between,)
        assert torch.equal(cut.stage(range(bound, 4))(*values), expected)


@pytest.mark.parametrize("value", [{"x": torch.zeros(1)}, None, 1.0, [torch.zeros(1)], (torch.zeros(1),), ()])
def test_other_values_between_stages_are_refused(value):
    """The error names the layer, what it returned and what stages can exchange."""

    class Odd(nn.Module):
        def forward(self, x):
            return value

    module = module_of(network=nn.Sequential(nn.Linear(1, 1), Odd()))
    stage = Network(module, None).stage(range(2))
    with pytest.raises(StrategyError, match=r"network\.1, the last layer .*tuple of at least two tensors"):
        stage(torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("children", "name", "message"),
    [
        ({"net": nn.Linear(1, 1)}, None, r"net \(Linear\).*, 0 can be cut.*pipeline_layers"),
        ({"a": three_layers(), "b": three_layers()}, None, r", 2 can be cut.*network=NAME"),
        ({"net": nn.Linear(1, 1)}, "net", r"net \(Linear\).*, 0 can be cut"),
    ],
)
def test_a_network_that_cannot_be_found_is_refused(children, name, message):
    """The error lists the module's children and how to make one of them a network."""
    with pytest.raises(StrategyError, match=message):
        Network(module_of(**children), name)


def _compiled_in_place() -> nn.Module:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network.compile()
    return network


@pytest.mark.parametrize(
    "compiled",
    [lambda: torch.compile(nn.Sequential(nn.Linear(2, 2))), lambda: torch.compile(Residual()), _compiled_in_place],
    ids=["Sequential", "own class", "in place"],
)
def test_a_compiled_network_is_refused(compiled):
    """A network that is compiled as a whole cannot be cut; compiled layers, and compiled modules beside it, can."""
    with pytest.raises(StrategyError, match=r"LightningModule\.net is compiled as a whole.*layer\.compile\(\)"):
        Network(module_of(net=compiled()), None)
    beside = nn.Dropout()
    beside.compile()
    layers = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert len(Network(module_of(net=layers, beside=beside), None).layers) == 2


def test_parameters_outside_of_the_network_are_refused():
    """Parameters outside the network are an error that names them, because no stage would train them."""
    module = module_of(network=three_layers(), head=nn.Linear(2, 2))
    with pytest.raises(StrategyError, match=r"head\.weight, head\.bias .* belong to no layer of network"):
        Network(module, "network")


def test_a_parameter_of_the_network_outside_of_its_layers_is_refused():
    """A parameter that pipeline_layers() does not cover is refused."""
    network = Residual()
    network.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(StrategyError, match=r"network\.scale .* belong to no layer"):
        Network(module_of(network=network), None)


def test_a_layer_that_occurs_twice_is_refused():
    """A layer with parameters can occur only once, as only one stage can hold it; others can occur repeatedly."""
    twice, relu = nn.Linear(4, 4), nn.ReLU()
    with pytest.raises(StrategyError, match=r"network contains the same layer twice.*they may share parameters"):
        Network(module_of(network=nn.Sequential(twice, relu, twice, relu)), None)
    Network(module_of(network=nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)), None)


class Shifted(nn.Sequential):
    """A network with its own forward."""

    def forward(self, x):
        """Add the input."""
        return x + super().forward(x)


def test_a_network_with_its_own_forward_lists_its_layers():
    """A pipeline calls the layers, so a method must say that this is all that forward does."""
    network = Shifted(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(StrategyError, match=r"network has its own forward.*add a method pipeline_layers\(\)"):
        Network(module_of(network=network), None)
    network.pipeline_layers = network.children
    assert Network(module_of(network=network), "network").names == ["0", "1"]
    replaced = three_layers()
    replaced.forward = lambda x: x
    with pytest.raises(StrategyError, match="network has its own forward"):
        Network(module_of(network=replaced), None)


def test_hooks_of_layers_and_parameters_are_named(caplog):
    """They run per microbatch, each on the ranks of a stage; hooks of the whole network are no problem."""
    network = three_layers()
    network.register_forward_hook(lambda *_: None)
    Network(module_of(network=network), None)
    assert not caplog.records
    network[1].register_forward_hook(lambda *_: None)
    Network(module_of(network=network), None)
    network[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    network[2].bias.register_post_accumulate_grad_hook(lambda _: None)
    Network(module_of(network=network), None)
    assert "The hooks of network.1 run only on ranks with that layer, once per microbatch." in caplog.text
    assert "The hooks of network.1, network.0.weight, network.2.bias run only" in caplog.text


def test_layers_on_the_meta_device_are_made():
    """Inner modules are initialised before outer ones, which may overwrite them; an error names one that cannot be."""
    with torch.device("meta"):
        layers = [nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.BatchNorm1d(4)]
    materialize(layers, torch.device("cpu"))
    assert not layers[1].self_attn.out_proj.bias.any()
    assert torch.equal(layers[2].running_var, torch.ones(4))
    assert 0 < layers[0].weight.std() < 1

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, device="meta"))

    with pytest.raises(StrategyError, match=r"Scale has parameters.*reset_parameters\(\)"):
        Network(module_of(network=nn.Sequential(Scale(), nn.Linear(4, 4))), None)


def test_a_layer_of_another_rank_says_so():
    """Reading a weight from a placeholder raises AttributeError, as ``hasattr`` and copies expect."""
    placeholder = RemoteLayerPlaceholder()
    with pytest.raises(AttributeError, match=r"Another rank has.*'weight'.*lightning_module_state_dict.*strategy=ddp"):
        _ = placeholder.weight
    with pytest.raises(StrategyError, match="Another rank has this layer"):
        placeholder(torch.ones(1))
    assert not hasattr(placeholder, "bias")
    with pytest.raises(AttributeError, match="Another rank"):
        _ = pickle.loads(pickle.dumps(copy.deepcopy(placeholder))).weight  # noqa: S301


def test_a_network_that_was_cut_before_is_refused():
    """A network that another Trainer has cut is refused: a new one would cut the rest."""
    module = module_of(network=three_layers())
    Network(module, None).keep(range(1, 3))
    with pytest.raises(StrategyError, match="was cut by another Trainer's strategy"):
        Network(module, None)
