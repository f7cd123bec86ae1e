"""Data hosts check each other: what differs between them ends the training or is warned of; nothing else changes."""

import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_sm.errors import DataHostMismatchError
from tests.integration.data.cluster import Host, remote, running, until_up
from tests.integration.data.datasets import HOST_VARIABLE, Augmented, Sharded, reference, stream_hash
from tests.integration.emulators import until

pytestmark = pytest.mark.processes

LENGTH, BATCH_SIZE = 120, 4


def host_name():
    """The name of the data host that runs this."""
    return os.environ[HOST_VARIABLE]


class Labeled(Dataset):
    """Samples of which a function makes the label from the index.

    Args:
        label: The function.
        length: Number of samples.
    """

    def __init__(self, label, length=LENGTH):
        self.label, self.length = label, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": torch.rand(3), "label": self.label(index)}


class Listed(Labeled):
    """Labels are the positions of classes in a listing that each host has in its own order, as file systems do."""

    def __init__(self):
        classes = [f"class {number}" for number in range(10)]
        listing = classes if host_name() == "b" else classes[::-1]
        super().__init__({index: listing.index(classes[index % 10]) for index in range(LENGTH)}.__getitem__)


class SetOrder(Labeled):
    """Labels are the positions of classes in a set."""

    def __init__(self):
        super().__init__(dict(enumerate(list({f"class {number}" for number in range(LENGTH)}))).__getitem__)


class Stream(IterableDataset):
    """Numbers, split over the workers; host b has others."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id + 1000 * (host_name() == "b"), 640, info.num_workers))


def unseedable(_index):
    """A number that is another one each time."""
    return int.from_bytes(os.urandom(6), "little") / 2**48


def by_host(index):
    """A label that is other on host b."""
    return index + (host_name() == "b")


def by_worker(index):
    """A label that is another one in each worker."""
    return index + 1000 * get_worker_info().id


def text_by_host(index):
    """Text that is other on host b, for one sample of each batch."""
    return f"{index} on b" if host_name() == "b" and index % BATCH_SIZE == 1 else str(index)


class LosesFiles(Labeled):
    """Labels that host b cannot read once a file is there.

    Args:
        flag: The file.
    """

    def __init__(self, flag):
        super().__init__(self.read)
        self.flag = flag

    def read(self, index):
        """Return a label."""
        if host_name() == "b" and self.flag.exists():
            raise FileNotFoundError(f"no file for sample {index}")
        return index


def loader(dataset):
    """Return what makes a loader over a dataset, from what makes the dataset."""
    return lambda: DataLoader(dataset(), batch_size=BATCH_SIZE)


def labeled(label):
    """Return what makes a loader whose labels a function makes."""
    return loader(lambda: Labeled(label))


def passes(hosts, *, num=3, **settings):
    """Take passes over a loader, and return the batches that each has."""
    with remote(hosts, **settings) as module:
        batches = [list(module.train_dataloader())]
        until_up(module)
        return batches + [list(module.train_dataloader()) for _ in range(num - 1)]


def snapshot(module):
    """What the feeder says of the data hosts."""
    return module._hosts.connection.feeder.snapshot().hosts


HOST = r"data host 127\.0\.0\.1:\d+"


@pytest.mark.parametrize(
    ("make", "share", "difference"),
    [
        (
            loader(Listed),
            0,
            rf'batch\["label"\]\[0\] is \d on {HOST}, but \d on {HOST} \(batch \d+ of .*, samples with',
        ),
        (
            labeled(text_by_host),
            1,
            r'batch\["label"\]\[1\] is .*\(batch \d+ of train_dataloader\(\), sample with index \d+\)',
        ),
        (loader(Stream), 0, rf"batch.* on {HOST}, but .* on {HOST} \(first batch of shard \d+ of train_dataloader"),
    ],
    ids=["listing", "text of one sample", "stream"],
)
def test_hosts_with_different_data_end_the_training(pool, make, share, difference):
    """The error names what differs, the samples, both hosts with their values, the usual causes, and what to do."""
    with pytest.raises(DataHostMismatchError, match=rf"^Data hosts build different batches: {difference}") as caught:
        passes(pool.serve(make)[:2], num=9, verify_share=share)
    assert "os.listdir()" in str(caught.value)
    assert "data_service.verify=warn" in str(caught.value)


def test_workers_of_one_host_check_each_other(pool):
    """With one data host, two of its workers are compared."""
    difference = (
        r'batch\["label"\]\[0\] is \d+ on worker [01], but \d+ on worker [01] \(batch \d+ of .*4 of 4 elements differ'
    )
    with pytest.raises(DataHostMismatchError, match=rf"^Workers of {HOST} build different batches: {difference}"):
        passes(pool.serve(labeled(by_worker))[1:2])


def test_a_single_worker_is_compared_with_itself(pool):
    """With one worker in all, it builds the batch again, and what is never the same twice is found."""
    drawn = labeled(lambda _: int.from_bytes(os.urandom(6), "little"))
    with pytest.raises(DataHostMismatchError, match=r"on worker 0, but \d+ on worker 0 when it was built again"):
        passes(pool.serve(drawn)[:1])


@pytest.mark.parametrize("hosts", [slice(1, 2), slice(0, 3)], ids=["one host", "three hosts"])
def test_floats_that_differ_are_warned_of_once(pool, capfd, hosts):
    """Training goes on with every batch, and one warning says that batches are not reproducible, and why."""
    taken = passes(pool.serve(labeled(unseedable))[hosts], verify_share=1.0)
    assert [len(batches) for batches in taken] == [LENGTH // BATCH_SIZE] * 3
    text = capfd.readouterr().err
    assert text.count('Batches of train_dataloader() are not reproducible: batch["label"][0] is 0.') == 1
    assert text.count("os.urandom") == 1


def test_warn_only_warns(pool, capfd):
    """With verify=warn, labels that differ are warned of once, and training goes on."""
    taken = passes(pool.serve(labeled(by_host))[:2], verify="warn", verify_share=1.0)
    assert [len(batches) for batches in taken] == [LENGTH // BATCH_SIZE] * 3
    assert capfd.readouterr().err.count("Data hosts build different batches") == 1


def test_off_checks_nothing(pool, capfd):
    """With verify=off, no batch is built twice, and no difference is found."""
    hosts = pool.serve(labeled(by_host))[:2]
    with remote(hosts, verify="off", verify_share=1.0, hedge_factor=0.0) as module:
        before = sum(host.num_built for host in snapshot(module))
        batches = list(module.train_dataloader())
        until(lambda: sum(host.num_built for host in snapshot(module)) > before, "a heartbeat with the number", 60.0)
    assert len(batches) == LENGTH // BATCH_SIZE
    assert "different" not in capfd.readouterr().err


def test_user_code_that_fails_on_one_host_only_is_warned_of(pool, capfd, tmp_path):
    """A second build that raises, where the first did not, ends nothing, as the batch is there."""
    flag = tmp_path / "flag"
    with remote(pool.serve(loader(lambda: LosesFiles(flag)))[:2], verify_share=1.0) as module:
        batches = module.train_dataloader()

        def are_used():
            list(batches)
            return all(host.num_received for host in snapshot(module))

        until(are_used, "both hosts make batches", 60.0)
        flag.touch()
        taken = list(batches)
    assert sorted(torch.cat([batch["label"] for batch in taken]).tolist()) == list(range(LENGTH))
    assert capfd.readouterr().err.count("could not be built again by data host") == 1


@pytest.mark.parametrize("settings", [{}, {"compression": "zstd"}], ids=["plain", "compressed"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Augmented(LENGTH), batch_size=BATCH_SIZE, shuffle=True),
        lambda: DataLoader(Sharded(), batch_size=BATCH_SIZE),
        loader(SetOrder),
    ],
    ids=["augmented", "stream", "order of a set"],
)
def test_equal_hosts_agree(pool, capfd, make, settings):
    """Every batch that is built twice is the same: with random augmentation, of shards, and in the order of a set."""
    taken = passes(pool.serve(make), verify_share=1.0, **settings)
    assert len(taken[0]) >= LENGTH // BATCH_SIZE
    text = capfd.readouterr().err
    assert "different" not in text
    assert "not reproducible" not in text


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_lost_while_it_checks_has_no_effect(number):
    """The training gets every batch once, and the right one, when the host that builds some again dies or freezes."""
    make = lambda: DataLoader(Augmented(LENGTH, 0.005), batch_size=BATCH_SIZE, shuffle=True)  # noqa: E731
    hosts = [Host(name, make) for name in "ab"]
    with running(*hosts), remote(hosts, verify_share=1.0) as module:
        until_up(module)
        batches = []
        for batch in module.train_dataloader():
            batches.append({name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()})
            if len(batches) == 8:
                hosts[1].signal(number)
    expected = reference(Augmented(LENGTH), LENGTH, BATCH_SIZE)
    assert stream_hash(batches) == stream_hash(expected)
