"""Private names of Lightning and jsonargparse that lightning_sm uses.

The tests name those that a new version lacks. The upper bounds in pyproject.toml are the versions in docs/tested.md:
run these tests with a new version before raising a bound.
"""

from __future__ import annotations

import ast
import dis
import inspect
import pkgutil
from pathlib import Path

import jsonargparse
import pytest

import lightning_sm
from lightning_sm._lightning import DISTRIBUTION

PACKAGE = Path(lightning_sm.__file__).parent
FABRIC = "lightning_fabric" if DISTRIBUTION == "pytorch_lightning" else "lightning.fabric"

_WANDB = ("_experiment", "_id", "_name", "_save_dir", "_wandb_init")
# (owner: a Lightning module, or module:class; its private names; the files that use them)
LIGHTNING = [
    (f"{FABRIC}.utilities.data", ["_replace_dunder_methods"], ["_lightning.py"]),
    (f"{FABRIC}.utilities.distributed", ["_InfiniteBarrier", "_destroy_dist_connection"], ["_lightning.py"]),
    (f"{FABRIC}.utilities.types", ["_PATH"], ["training/checkpoints/durable_io.py"]),
    (f"{DISTRIBUTION}.plugins.io.wrapper", ["_WrappingCheckpointIO"], ["_lightning.py"]),
    (f"{DISTRIBUTION}.strategies.launchers", ["_MultiProcessingLauncher"], ["_lightning.py"]),
    (f"{DISTRIBUTION}.trainer.connectors.data_connector", ["_InfiniteBarrier"], ["training/strategies/smddp.py"]),
    (f"{DISTRIBUTION}:Trainer", ["_logger_connector"], ["training/callbacks/mid_epoch.py"]),
    (
        f"{DISTRIBUTION}.trainer.connectors.logger_connector:_LoggerConnector",
        ["_callback_metrics"],
        ["training/callbacks/mid_epoch.py"],
    ),
    (
        f"{DISTRIBUTION}.plugins.io.wrapper:_WrappingCheckpointIO",
        ["_checkpoint_io"],
        ["training/checkpoints/durable_io.py"],
    ),
    (f"{DISTRIBUTION}:Trainer", ["_checkpoint_connector"], ["training/checkpoints/auto_resume.py"]),
    (
        f"{DISTRIBUTION}.trainer.connectors.checkpoint_connector:_CheckpointConnector",
        ["_ckpt_path", "_loaded_checkpoint"],
        ["training/checkpoints/auto_resume.py"],
    ),
    (f"{DISTRIBUTION}.trainer.call", ["_call_lightning_module_hook"], ["training/callbacks/mid_epoch.py"]),
    (f"{DISTRIBUTION}:LightningModule", ["_current_fx_name"], ["training/callbacks/mid_epoch.py"]),
    (f"{DISTRIBUTION}.callbacks:BatchSizeFinder", ["_batch_arg_name"], ["training/checkpoints/finder_results.py"]),
    (f"{DISTRIBUTION}.callbacks:LearningRateFinder", ["_attr_name"], ["training/checkpoints/finder_results.py"]),
    (f"{DISTRIBUTION}:Trainer", ["_signal_connector"], ["training/callbacks/spot_checkpoint.py"]),
    (
        f"{DISTRIBUTION}.trainer.connectors.signal_connector:_SignalConnector",
        ["_sigterm_notifier_fn"],
        ["training/callbacks/spot_checkpoint.py"],
    ),
    (
        f"{DISTRIBUTION}.loops.fit_loop:_FitLoop",
        ["_combined_loader", "_data_fetcher", "_last_train_dl_reload_epoch", "_load_combined_loader_states"],
        ["training/callbacks/local_position.py"],
    ),
    (
        f"{DISTRIBUTION}.loops.fit_loop:_FitLoop",
        ["_combined_loader", "_data_fetcher", "_restarting"],
        ["training/callbacks/spot_checkpoint.py"],
    ),
    (f"{DISTRIBUTION}.loops.fit_loop:_FitLoop", ["_should_accumulate"], ["training/strategies/pipeline/strategy.py"]),
    (
        f"{DISTRIBUTION}.loops.fit_loop:_FitLoop",
        ["_combined_loader"],
        ["data/trainer/remote_loader.py", "timing/step_times.py"],
    ),
    (
        f"{DISTRIBUTION}.loops.evaluation_loop:_EvaluationLoop",
        ["_combined_loader"],
        ["training/callbacks/spot_checkpoint.py"],
    ),
    (
        f"{DISTRIBUTION}.loops.training_epoch_loop:_TrainingEpochLoop",
        ["_batches_that_stepped"],
        ["data/trainer/reporter.py", "timing/step_times.py"],
    ),
    (
        f"{DISTRIBUTION}.loops.training_epoch_loop:_TrainingEpochLoop",
        ["_on_before_fetch", "_on_after_fetch"],
        ["timing/step_times.py"],
    ),
    (
        f"{DISTRIBUTION}.loops.training_epoch_loop:_TrainingEpochLoop",
        ["_broadcast_sigterm_tensor"],
        ["training/callbacks/spot_checkpoint.py"],
    ),
    (f"{DISTRIBUTION}.utilities:CombinedLoader", ["_iterator"], ["training/callbacks/local_position.py"]),
    (f"{DISTRIBUTION}.utilities:CombinedLoader", ["_mode"], ["training/callbacks/local_position.py"]),
    (f"{DISTRIBUTION}.utilities:CombinedLoader", ["_state_dicts"], ["training/callbacks/spot_checkpoint.py"]),
    (
        f"{DISTRIBUTION}:LightningModule",
        ["_compiler_ctx", "_on_before_batch_transfer"],
        ["training/strategies/pipeline/strategy.py"],
    ),
    (
        f"{DISTRIBUTION}.loops.fit_loop:_FitLoop",
        ["_should_accumulate"],
        ["training/strategies/pipeline/strategy.py"],
    ),
    (f"{DISTRIBUTION}.strategies:DDPStrategy", ["_timeout"], ["training/strategies/pipeline/strategy.py"]),
    (f"{DISTRIBUTION}.strategies:ParallelStrategy", ["_layer_sync"], ["training/strategies/pipeline/strategy.py"]),
    (f"{DISTRIBUTION}.core.optimizer:LightningOptimizer", ["_optimizer"], ["training/strategies/pipeline/strategy.py"]),
    (f"{DISTRIBUTION}.strategies:DDPStrategy", ["_configure_launcher"], ["training/strategies/smddp.py"]),
    (f"{DISTRIBUTION}.strategies:DDPStrategy", ["_timeout"], ["training/strategies/pipeline/strategy.py"]),
    (f"{DISTRIBUTION}.strategies:FSDPStrategy", ["_state_dict_type"], ["training/checkpoints/sharded.py"]),
    (f"{DISTRIBUTION}.loggers:TensorBoardLogger", ["_root_dir", "_version"], ["training/loggers.py"]),
    (f"{DISTRIBUTION}.loggers:TensorBoardLogger", ["_log_graph"], ["training/strategies/pipeline/strategy.py"]),
    (f"{DISTRIBUTION}.loggers:CSVLogger", ["_root_dir", "_save_dir"], ["training/loggers.py"]),
    (f"{DISTRIBUTION}.loggers:WandbLogger", _WANDB, ["training/loggers.py"]),
    (f"{DISTRIBUTION}.cli:LightningCLI", ["_get", "_parser", "_subcommand_parsers"], ["training/cli.py"]),
]
# The first two belong to argparse, whose parser jsonargparse extends.
JSONARGPARSE = {"_action_groups", "_actions", "_group_actions", "_links_group", "_skip_validation"}
# Private names of other packages in the same files.
OF_OTHERS = {
    "data/host/source.py": {"_auto_collation"},  # torch's DataLoader
    "data/host/source_builder.py": {
        "_DatasetKind",
        "_exit",
        "_generate_state",
        "_utils",
        "_worker_info",
    },  # torch's DataLoader; Python
    "data/host/main_process.py": {"_clear"},  # Python
    "data/host/rank_reads.py": {"_getframe"},  # Python
    "data/host/trainer_view.py": {"_getframe"},  # Python
    "data/host/world.py": {"_world"},  # torch
    "data/trainer/remote_iterator.py": {  # torch's DataLoader
        *("_BaseDataLoaderIter", "_DatasetKind", "_base_seed", "_dataset_kind", "_next_index", "_num_workers"),
        *("_num_yielded", "_pin_memory", "_pin_memory_device", "_utils"),
    },
    "data/trainer/remote_loader.py": {"_iterator"},  # torch's DataLoader
    "training/callbacks/local_position.py": {"_index_sampler"},  # torch's DataLoader, like its _iterator
    "training/checkpoints/kept_state.py": {"_local_tensor"},  # torch
    "training/rank_barrier.py": {"_get_default_store"},  # torch
    "training/strategies/pipeline/step_effects.py": {"_forward_cache"},  # torchmetrics
    "training/strategies/pipeline/layers.py": {
        *("_backward_hooks", "_compiled_call_impl", "_forward_hooks", "_orig_mod", "_post_accumulate_grad_hooks"),
        "_reset_parameters",
    },  # torch
}


@pytest.mark.parametrize(("owner", "name"), sorted({(owner, name) for owner, names, _ in LIGHTNING for name in names}))
def test_lightning_has_the_private_name(owner, name):
    """The installed Lightning has the name in the module or class, or a method sets it on the object."""
    found = pkgutil.resolve_name(owner)
    bases = inspect.getmro(found) if inspect.isclass(found) else ()
    methods = [inspect.unwrap(one) for base in bases for one in vars(base).values() if inspect.isfunction(one)]
    steps = (step for method in methods for step in dis.get_instructions(method))
    is_set = any(step.opname == "STORE_ATTR" and step.argval == name for step in steps)
    files = [file for one, names, files in LIGHTNING for file in files if one == owner and name in names]
    assert hasattr(found, name) or is_set, f"{owner} has no {name}, which is used in: {', '.join(files)}"


def test_jsonargparse_has_the_private_names():
    """A parser has its groups and argument links, and can parse without validation."""
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--a.x")
    parser.add_argument("--b.x")
    parser.link_arguments("a.x", "b.x")
    (link,) = parser._links_group._group_actions
    assert link.apply_on == "parse"
    for parse in (parser.parse_args, parser.parse_object):
        parse([] if parse == parser.parse_args else {}, _skip_validation=True)


def _private_names(tree):
    """Private names that a file uses but does not define."""
    defined, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (defined if of_self and isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_sm"):
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            used.update(one.value for one in node.args[1:2] if isinstance(one, ast.Constant))
    return {name for name in used - defined if name.startswith("_") and not name.startswith("__")}


def test_the_table_is_complete():
    """The table contains exactly the private names that training code uses and our files do not define.

    Names that the file also defines, such as overridden methods, are not detected: they are in the table by hand.
    """
    files = [
        PACKAGE / "_lightning.py",
        *(PACKAGE / "timing").rglob("*.py"),
        *(PACKAGE / "training").rglob("*.py"),
        *(PACKAGE / "data").rglob("trainer/*.py"),
    ]
    files += (PACKAGE / "data" / "host").glob("*.py")
    sources = {file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    # Attributes of Stage that PretrainedStage reads, and of FetchingDataModule that RemoteDataModule reads.
    ours = {"_is_first", "_names", "_service_connection"}
    listed = {(file, name) for _, names, of in LIGHTNING for file in of for name in names}
    listed |= {(file, name) for file, names in OF_OTHERS.items() for name in names}
    listed |= {("training/cli.py", name) for name in JSONARGPARSE}
    used = {(file, name) for file, tree in trees.items() for name in _private_names(tree) - ours}
    assert used - listed == set()
    assert {(file, name) for file, name in listed - used if name not in sources[file]} == set()
