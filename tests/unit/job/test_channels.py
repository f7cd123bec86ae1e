"""Rules for routing channels to arguments: their order and their errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.errors import ChannelError
from lightning_sm.job.channels import may_be_folder, route

PARAMETERS = ("data_dir", "val_dir", "batch_size")


@pytest.mark.parametrize(
    ("channels", "parameters", "expected"),
    [
        (["training"], PARAMETERS, {"data.data_dir": "training"}),
        (["train"], PARAMETERS, {"data.data_dir": "train"}),
        (["digits"], PARAMETERS, {"data.data_dir": "digits"}),
        (["training"], ["root"], {"data.root": "training"}),
        (["digits"], ["root"], {"data.root": "digits"}),
        (["digits"], ["root", "data_dir"], {"data.data_dir": "digits"}),
        (["train", "val"], PARAMETERS, {"data.data_dir": "train", "data.val_dir": "val"}),
        (["val"], PARAMETERS, {"data.val_dir": "val"}),
        (["training"], ["training_dir", "data_dir"], {"data.training_dir": "training"}),
        (["training", "data"], PARAMETERS, {"data.data_dir": "data"}),
        (["hold-out", "train"], ["hold_out_dir", "root"], {"data.hold_out_dir": "hold-out", "data.root": "train"}),
        (["hold.out", "train"], ["hold_out_dir"], {"data.hold_out_dir": "hold.out"}),
        (["validation", "train"], ["train_dir", "val_dir"], {"data.train_dir": "train", "data.val_dir": "validation"}),
        (["validation", "training"], ["root", "valid_dir"], {"data.root": "training", "data.valid_dir": "validation"}),
        (["training", "train"], ["train_dir", "root"], {"data.train_dir": "train", "data.root": "training"}),
        (["validation", "val"], ["val_dir"], {"data.val_dir": "val"}),
        (["valid"], ["validation_dir", "data_dir"], {"data.validation_dir": "valid"}),
        (
            ["training", "testing"],
            ["train_dir", "test_dir"],
            {"data.train_dir": "training", "data.test_dir": "testing"},
        ),
        (
            ["test", "train"],
            ["training_dir", "testing_dir"],
            {"data.training_dir": "train", "data.testing_dir": "test"},
        ),
        (["config", "digits"], PARAMETERS, {"data.data_dir": "digits"}),
        (["a", "b"], PARAMETERS, {}),
        (["training"], [], {}),
        ([], PARAMETERS, {}),
    ],
)
def test_a_channel_goes_to_the_argument_of_its_name_else_the_main_one_to_the_main_folder(
    channels, parameters, expected
):
    """Channel x goes to x_dir or to another name of its split; otherwise the main one goes to data_dir or root."""
    assert route(channels, parameters, {}).channel_of == expected


@pytest.mark.parametrize("channels", [["training", "train"], ["train", "training"]])
def test_one_argument_takes_one_channel(channels):
    """If there are two main channels, the first is used and the other is reported as unused."""
    routing = route(channels, PARAMETERS, {})
    assert routing.channel_of == {"data.data_dir": channels[0]}
    assert routing.unused == (channels[1],)


def test_what_fits_nothing_is_reported():
    """A channel without an argument is reported as unused; the config channel is not, because it holds no data."""
    assert route(["training", "extra", "config"], PARAMETERS, {}).unused == ("extra",)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"extra": "data_dir"}, {"data.data_dir": "extra"}),
        ({"extra": "data.data_dir"}, {"data.data_dir": "extra"}),
        ({"extra": "data.init_args.data_dir"}, {"data.data_dir": "extra"}),
        ({"extra": "model.weights"}, {"data.data_dir": "training", "model.weights": "extra"}),
        ({"training": "val_dir"}, {"data.val_dir": "training"}),
    ],
)
def test_a_mapping_comes_before_the_rules(mapping, expected):
    """An explicit mapping wins. It names a parameter or a dotted key, with or without init_args."""
    assert route(["training", "extra"], PARAMETERS, mapping).channel_of == expected


def test_the_config_channel_may_be_mapped():
    """The config channel is treated as data if the mapping names it."""
    assert route(["config"], PARAMETERS, {"config": "data_dir"}).channel_of == {"data.data_dir": "config"}


def test_a_mapping_of_an_unknown_channel_names_those_of_the_job():
    """Mapping an unknown channel raises an error that lists the job's channels."""
    with pytest.raises(ChannelError, match=r"channels \['trian'\], but the job has the channels \['training'\]"):
        route(["training"], PARAMETERS, {"trian": "data_dir"})


def test_another_group_may_have_the_mapped_channel():
    """In a heterogeneous job, the mapped channel may belong to another instance group."""
    assert route(["training"], ["root"], {"extra": "model.weights"}, all_channels_known=False).channel_of == {
        "data.root": "training"
    }


def test_a_mapping_to_an_unknown_parameter_names_those_of_the_data_module():
    """Mapping to an unknown parameter raises an error that lists the DataModule's parameters."""
    with pytest.raises(ChannelError, match=r"'dir', but the DataModule has the parameters \['batch_size', 'data_dir'"):
        route(["training"], PARAMETERS, {"training": "dir"})


def test_two_channels_mapped_to_one_argument_are_an_error():
    """Mapping two channels to one argument raises ChannelError, because one of them would be lost."""
    with pytest.raises(ChannelError, match=r"'a' and 'b' are both mapped to 'data\.data_dir'"):
        route(["a", "b"], PARAMETERS, {"a": "data_dir", "b": "data.data_dir"})


def test_folders_have_names():
    """A parameter may be a folder if it has a main folder's name or ends in _dir."""
    assert list(map(may_be_folder, ["data_dir", "root", "val_dir", "size"])) == [True, True, True, False]


names = st.sampled_from(["training", "train", "val", "validation", "valid", "test", "testing", "data", "a-b", "config"])
parameters = st.sampled_from(
    ["training_dir", "data_dir", "root", "val_dir", "validation_dir", "test_dir", "a_b_dir", "size"]
)


@given(st.lists(names, unique=True), st.lists(parameters, unique=True))
def test_every_channel_is_used_once_or_reported_once(channels, parameters):
    """Each channel is used or reported exactly once, and each argument exists in the DataModule."""
    routing = route(channels, parameters, {})
    used = list(routing.channel_of.values())
    assert sorted([*used, *routing.unused]) == sorted(name for name in channels if name != "config")
    assert {key.removeprefix("data.") for key in routing.channel_of} <= set(parameters)
