"""SageMakerCLI in a job passes channels to the arguments that match them, unless the user sets these."""

import logging

import pytest
import torch

from lightning_sm.errors import ChannelError
from lightning_sm.training.cli import SageMakerCLI
from tests.fakes.small_app import TWO_HOSTS, LinkedCLI, RootData, SmallData, SmallModel

ROOT_DATA = f"{RootData.__module__}.{RootData.__qualname__}"
FAST = ("--trainer.fast_dev_run=true", "--trainer.enable_model_summary=false")
# Three ways for a script to leave the choice of classes to the configuration.
ANY_DATA = {"data": SmallData, "subclass_mode_data": True}
NO_DATA = {"data": None}
ANY_MODEL_AND_DATA = {"model": None, "data": None}


def test_the_main_channel_and_the_channel_of_a_folder(host):
    """Channel training fills data_dir, and channel val fills val_dir."""
    data = host.configure(channels=["training", "val"]).make().datamodule
    assert [data.data_dir, data.val_dir] == [str(host.channel("training")), str(host.channel("val"))]
    assert data.batch_size == 4


@pytest.mark.parametrize("shape", [{"data": RootData}, ANY_DATA, NO_DATA, ANY_MODEL_AND_DATA])
def test_a_required_folder_is_filled_in_each_mode(host, shape):
    """A channel fills a required argument, whether the script or the user chose the class."""
    classes = [] if shape["data"] is RootData else ["--data=RootData", "--data.size=5"]
    if "model" in shape:
        classes += ["--model=SmallModel", "--model.num_classes=7"]
    cli = host.configure(channels=["digits"]).make(*classes, **shape)
    assert (cli.datamodule.root, cli.datamodule.size) == (str(host.channel("digits")), 5 if classes else 1)
    assert cli.model.layer.out_features == (7 if "model" in shape else 3)


def test_a_required_argument_that_no_channel_fills_is_named(host, capsys):
    """Without a channel, the parser's error names the required argument."""
    with pytest.raises(SystemExit, match="2"):
        host.make(data=RootData)
    assert "data.root" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [{"data": SmallData}, ANY_DATA])
@pytest.mark.parametrize("value", ["own", "nowhere"])
@pytest.mark.parametrize("source", ["line", "dotted", "file", "environment"])
def test_the_users_value_wins(host, monkeypatch, shape, value, source):
    """A value that the user sets is kept, wherever it is set, even if it equals the default."""
    host.configure(channels=["training"])
    chosen = ["--data=SmallData"] if "subclass_mode_data" in shape else []
    inside = ".init_args" if chosen and source == "dotted" else ""
    arguments = {"line": [f"--data.data_dir={value}"], "dotted": [f"--data{inside}.data_dir={value}"]}
    if source == "file":
        arguments["file"] = ["--config=own.yaml"]
        with open("own.yaml", "w", encoding="utf-8") as file:
            section = {"class_path": "SmallData", "init_args": {"data_dir": value}} if chosen else {"data_dir": value}
            file.write(f"data: {section}")
        chosen = []
    if source == "environment":
        name, text = ("PL_DATA", f"{{class_path: SmallData, init_args: {{data_dir: {value}}}}}")
        name, text = (name, text) if chosen else ("PL_DATA__DATA_DIR", value)
        monkeypatch.setenv(name, text)
        arguments["environment"], chosen = [], []
    cli = host.make(*chosen, *arguments[source], parser_kwargs={"default_env": True}, **shape)
    assert cli.datamodule.data_dir == value


def test_a_subcommands_variable_wins(host, monkeypatch):
    """An environment variable that is named after a subcommand wins over a channel."""
    monkeypatch.setenv("PL_FIT__DATA__DATA_DIR", "own")
    host.configure(channels=["training", "val"])
    data = host.start("fit", *FAST, parser_kwargs={"default_env": True}).datamodule
    assert (data.data_dir, data.val_dir) == ("own", str(host.channel("val")))


def test_the_command_line_wins_over_variables(host, monkeypatch):
    """The values that the job adds do not change the precedence of the user's sources."""
    monkeypatch.setenv("PL_DATA__BATCH_SIZE", "2")
    host.configure(channels=["training"])
    data = host.make("--data.batch_size=8", parser_kwargs={"default_env": True}).datamodule
    assert (data.batch_size, data.data_dir) == (8, str(host.channel("training")))


def test_other_arguments_of_a_chosen_class_stay(host):
    """Filling one argument of a class from the configuration does not reset the others."""
    (host.base_dir / "c.yaml").write_text(f"data: {{class_path: {ROOT_DATA}, init_args: {{size: 9}}}}")
    cli = host.configure(channels=["digits"]).start("fit", f"--config={host.base_dir / 'c.yaml'}", *FAST, **NO_DATA)
    assert (cli.datamodule.root, cli.datamodule.size) == (str(host.channel("digits")), 9)


def test_a_mapping_decides(host):
    """An explicit mapping decides which argument a channel fills, even one of the model."""
    mapping = {"a": "val_dir", "b": "model.weights"}
    cli = host.configure(channels=["a", "b", "train"]).make(channels=mapping)
    assert cli.datamodule.val_dir == str(host.channel("a"))
    assert cli.model.weights == str(host.channel("b"))
    assert cli.datamodule.data_dir == str(host.channel("train"))


def test_a_mapping_reaches_into_chosen_classes(host):
    """A mapping may name arguments of chosen classes with or without init_args."""
    host.configure(channels=["a", "b"])
    cli = host.make(
        "--model=SmallModel",
        "--data=SmallData",
        channels={"a": "model.weights", "b": "data.init_args.val_dir"},
        **ANY_MODEL_AND_DATA,
    )
    assert (cli.model.weights, cli.datamodule.val_dir) == (str(host.channel("a")), str(host.channel("b")))


def test_the_users_value_wins_over_a_mapping(host):
    """A value from the command line, which is the user's, wins over the script's mapping."""
    cli = host.configure(channels=["a"]).make("--model.weights=own", channels={"a": "model.weights"})
    assert cli.model.weights == "own"


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"b": "data_dir"}, r"maps the channels \['b'\], but the job has the channels \['a'\]"),
        ({"a": "folder"}, r"mapped to 'folder', but the DataModule has the parameters"),
        ({"a": "model.folder"}, r"Channel 'a' is mapped to 'model\.folder'"),
    ],
)
def test_a_wrong_mapping_is_an_error(host, mapping, text):
    """A mapping with an unknown channel or argument raises an error that names it."""
    with pytest.raises(ChannelError, match=text):
        host.configure(channels=["a"]).make(channels=mapping)


@pytest.mark.parametrize(("name", "count"), [("algo-1", 1), ("algo-2", 0)])
def test_a_channel_that_fits_nothing_is_logged_by_rank_0(host, caplog, name, count):
    """Only rank 0 logs, once, that a channel matches nothing."""
    caplog.set_level(logging.INFO, "lightning_sm")
    host.configure(TWO_HOSTS, name, channels=["training", "extra"]).make()
    lines = [record.getMessage() for record in caplog.records if "'extra' matches none of" in record.getMessage()]
    assert len(lines) == count
    assert sum("training" in record.getMessage() for record in caplog.records) == count


def test_links_see_the_channel(host):
    """An argument linked to a folder follows the channel, and links between instances are applied."""
    cli = host.configure(channels=["training"]).make(cli=LinkedCLI)
    assert cli.model.weights == str(host.channel("training"))
    assert cli.model.layer.out_features == 3


def test_links_see_a_required_folder(host):
    """A link works if only a channel fills its source."""

    class RootLinkedCLI(SageMakerCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.root", "model.weights")

    cli = host.configure(channels=["training"]).start("fit", *FAST, cli=RootLinkedCLI, data=RootData)
    assert cli.model.weights == str(host.channel("training"))


def test_links_may_compute(host):
    """The function of a link gets the values that channels filled, and is not called before."""

    class ComputedCLI(SageMakerCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments(("data.root", "data.size"), "model.weights", compute_fn=lambda a, b: a.upper() * b)

    cli = host.configure(channels=["training"]).make("--data.size=2", cli=ComputedCLI, data=RootData)
    assert cli.model.weights == str(host.channel("training")).upper() * 2


@pytest.mark.parametrize("stated", [[], ["--data.batch_size=6"]])
def test_links_between_chosen_classes(host, stated):
    """Links between init_args apply in a job, whether their source is set or a default."""

    class ChosenCLI(SageMakerCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.init_args.batch_size", "model.init_args.num_classes")

    host.configure(channels=["training"])
    cli = host.make("--data=SmallData", *stated, "--model=SmallModel", cli=ChosenCLI, **ANY_MODEL_AND_DATA)
    assert cli.model.layer.out_features == (6 if stated else 4)
    assert cli.datamodule.data_dir == str(host.channel("training"))


def test_links_of_optimizers(host):
    """An optimizer that is linked to an argument of the model is passed to the model."""

    class Optimized(SmallModel):
        def __init__(self, optimizer: dict | None = None) -> None:
            super().__init__()
            self.stated = optimizer

    class OptimizerCLI(SageMakerCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(torch.optim.Adam, link_to="model.optimizer")

    cli = host.make("--optimizer.lr=0.5", cli=OptimizerCLI, model=Optimized)
    assert cli.model.stated["init_args"]["lr"] == 0.5


def test_defaults_of_the_script_give_way(host):
    """A channel replaces a folder from the script's default_config_files, and other values are kept."""
    with open("laptop.yaml", "w", encoding="utf-8") as file:
        file.write("data: {data_dir: ./laptop, batch_size: 2}")
    host.configure(channels=["training"])
    settings = {"fit": {"default_config_files": ["laptop.yaml"]}}
    data = host.start("fit", *FAST, parser_kwargs=settings).datamodule
    assert (data.data_dir, data.batch_size) == (str(host.channel("training")), 2)
