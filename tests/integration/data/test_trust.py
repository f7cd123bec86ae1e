"""Access to data hosts: token, job, version, TLS."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from torch.utils.data import DataLoader

from lightning_sm.data.host.data_host import DataHost
from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.protocol.call_metadata import PROOF_KEY, metadata, method, proof
from lightning_sm.data.protocol.openings import OpeningsReply
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.errors import DataHostMismatchError, DataSettingsError
from lightning_sm.job.variables import JOB_SECRET
from tests.integration.data.cluster import remote
from tests.integration.data.datasets import Augmented, Data
from tests.integration.data.fakes import FakeHost, Impostor, credentials

pytestmark = pytest.mark.processes

# Far longer than an answer takes, although processes take seconds to start, and far shorter than a trainer waits for a
# data host that may still come.
AT_ONCE_S = 30.0
# For errors that need a second look: promised within 30 s of the start of the trainer's processes.
SURELY_S = 45.0


def data():
    """Return a DataModule with two batches."""
    return Data(lambda: DataLoader(Augmented(8), batch_size=4))


def num_batches(address, **settings):
    """Return how many batches a trainer gets."""
    with remote([address], data(), **settings) as module:
        return sum(1 for _ in module.train_dataloader())


def refusal(address, job="local", within_s=AT_ONCE_S, **settings):
    """Return the error that explains why a trainer cannot use a data host."""
    module = RemoteDataModule(data(), [address], settings=DataServiceSettings(**settings), job=job)
    began = time.monotonic()
    with pytest.raises(DataHostMismatchError, match="data host") as caught:
        next(iter(module.train_dataloader()))
    assert time.monotonic() - began < within_s
    module.teardown("fit")
    return str(caught.value)


class Authority:
    """A certificate authority, and the files of certificates that it signed."""

    def __init__(self, folder, name):
        self._ca, self._folder, self._name = trustme.CA(), folder, name
        self.file = self._written("authority", self._ca.cert_pem)

    def settings(self, *names, is_mutual=False):
        """Return settings with a certificate for host names, and the authority if trainers show one as well."""
        issued = self._ca.issue_cert(*names)
        settings = {
            "tls_certificate": self._written("certificate", *issued.cert_chain_pems),
            "tls_key": self._written("key", issued.private_key_pem),
        }
        return {**settings, "tls_authority": self.file} if is_mutual else settings

    def _written(self, name, *blobs):
        path = self._folder / f"{self._name}-{name}.pem"
        path.write_bytes(b"".join(blob.bytes() for blob in blobs))
        return str(path)


@pytest.fixture
def ours(tmp_path):
    """The authority of the job."""
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path):
    """An authority outside the job."""
    return Authority(tmp_path, "theirs")


def test_the_secret_of_the_job_is_the_token(monkeypatch):
    """Hosts with the job's secret serve each other; another job's secret, or the job's name alone, is refused."""
    monkeypatch.setenv(JOB_SECRET.name, "of this job " * 4)
    with DataHost() as host:
        assert num_batches(host.address) == 2
        assert "belongs to job 'other' and has its token from" in refusal(host.address, "other")
        for secret, source in ((None, "the job's name"), ("of another job " * 4, JOB_SECRET.name)):
            monkeypatch.delenv(JOB_SECRET.name) if secret is None else monkeypatch.setenv(JOB_SECRET.name, secret)
            assert f"has its token from {source}. Compare both hosts" in refusal(host.address)


@pytest.mark.proof
def test_a_data_host_that_is_started_by_hand_has_a_secret_of_its_own(monkeypatch):
    """This process and its children have the secret; a trainer with only the job's name is told what to set."""
    monkeypatch.delenv(JOB_SECRET.name, raising=False)
    with ThreadPoolExecutor(4) as threads:
        hosts = list(threads.map(lambda _: DataHost(), range(4)))
    secret = os.environ[JOB_SECRET.name]
    assert len(secret) == 64
    with hosts[0] as host, hosts[3] as other:
        assert num_batches(host.address) == num_batches(other.address) == 2
        monkeypatch.delenv(JOB_SECRET.name)
        assert f"to train in another process, set the same {JOB_SECRET.name} in both" in refusal(host.address)
        monkeypatch.setenv(JOB_SECRET.name, secret)
        DataHost()
        assert os.environ[JOB_SECRET.name] == secret


NOT_OF_THE_JOB = (
    "the server at this address is not a data host of this job: it did not prove that it has the token of this trainer"
)


@pytest.mark.parametrize("token", [None, "guessed"], ids=["no proof", "a wrong proof"])
@pytest.mark.parametrize("is_nonsense", [False, True])
def test_a_data_host_without_the_token_gets_nothing_and_nothing_of_it_is_read(token, is_nonsense):
    """The trainer refuses the first answer unread, with advice, and sends nothing about the dataset."""
    host, impostor = FakeHost(), Impostor(token)
    if is_nonsense:
        host.heartbeat = b"\x80\x05nonsense"
    with host.serving(guard=impostor) as address:
        error = refusal(address)
    assert NOT_OF_THE_JOB in error
    assert f"set the same {JOB_SECRET.name} in both. If the tokens are the same, another process" in error
    assert f"(data host at {address})" in error
    assert impostor.called <= {"Heartbeat"}


class Lacking(FakeHost):
    """A data host that asks for the dataset first."""

    def open(self, request):
        if self.loaded:
            return super().open(request)
        return OpeningsReply([], [one["source"] for one in json.loads(request)["openings"]]).encode()


def test_a_dataset_goes_to_nobody_who_has_taken_the_place_of_a_data_host():
    """Load needs a separate proof: the proof of an earlier call on the channel is not enough."""
    host = Lacking()
    with host.serving(guard=Impostor("guessed", only="Load")) as address:
        assert NOT_OF_THE_JOB in refusal(address)
    assert not host.loaded
    with host.serving() as address, remote([address], data()) as module:
        iter(module.train_dataloader())
        assert host.loaded


def test_a_data_host_logs_who_has_no_token(caplog):
    """The log names each address once, with what to compare."""
    with FakeHost().serving(credentials("other")) as address:
        for _ in range(2):
            refusal(address)
    (text,) = [text for text in caplog.messages if "Refused a call" in text]
    assert text == (
        "Refused a call from ipv4:127.0.0.1, which did not prove that it has the token of data host fake (job "
        f"'other', token from {credentials().token_source}). If it is a trainer of this job, compare "
        f"{JOB_SECRET.name} on both sides."
    )


def stranger(address, metadata, body=b"{}"):
    """Return code and text of each method's answer to a gRPC client without the token."""
    answers = {}
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        for name in ("OpenSources", "Load", "Fetch", "Heartbeat", "Status", "Stop"):
            if name in ("Load", "Fetch"):
                call = channel.stream_stream(method(name))(iter([body]), metadata=metadata, timeout=20)
            else:
                call = channel.unary_unary(method(name)).future(body, metadata=metadata, timeout=20)
            answers[name] = (call.code(), call.details())
    return answers


def test_a_stranger_is_told_nothing():
    """Without the token, every call gets the same uninformative answer, whatever else is right about it."""
    known = credentials("digits-2026-11-22")
    version, nonce, _ = metadata(known, "Status", "a number")
    right = [version, nonce]
    guessed = [(PROOF_KEY, proof(known, "data host", "a number")), (PROOF_KEY, "\x7e" * 64), (PROOF_KEY, known.token)]
    for sent in ([], [version], right, *([*right, one] for one in guessed), [("a", "b")]):
        with FakeHost().serving(known) as address:
            answers = stranger(address, sent)
        assert set(answers.values()) == {(grpc.StatusCode.UNAUTHENTICATED, "wrong token")}, answers


def test_the_bodies_of_strangers_are_not_read(pool):
    """Eight calls with 60 MB each and no token take no memory, and trainers get their batches meanwhile."""
    host = pool.serve(data().make)[0]
    (server,) = (child for child in host.main.children() if "data.server" in " ".join(child.cmdline()))
    assert num_batches(host.address) == 2
    before = peak_memory(server)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(stranger, host.address, [], bytes(60 << 20)) for _ in range(8)]
        assert num_batches(host.address) == 2
        codes = {code for call in calls for code, _ in call.result().values()}
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert peak_memory(server) - before < 60 << 20


def peak_memory(process):
    """Return the peak memory of a process in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def test_a_trainer_of_another_version_is_told_both_versions(monkeypatch):
    """A data host with another protocol version is reported at once, with both versions."""
    monkeypatch.setattr(grpc_transport, "PROTOCOL_VERSION", "99")
    with FakeHost().serving() as address:
        assert "data host fake speaks version 99 of the protocol, this trainer version 3." in refusal(address)


@pytest.mark.parametrize("is_mutual", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_batches_come_over_tls(ours, is_mutual):
    """Data hosts show a certificate; with an authority, trainers show one as well."""
    settings = ours.settings("127.0.0.1", "localhost", is_mutual=is_mutual)
    with DataHost("127.0.0.1:0", settings=DataServiceSettings(**settings)) as host:
        assert num_batches(host.address, **settings) == 2


def test_a_trainer_with_tls_says_at_once_why_it_does_not_trust_a_data_host(ours, theirs):
    """A plain data host, another authority and another name cause distinct errors instead of a timeout."""
    mine = ours.settings("127.0.0.1")
    with FakeHost().serving() as address:
        error = refusal(address, within_s=SURELY_S, **mine)
        assert "the data host does not use TLS, but this trainer has data_service.tls_certificate=" in error
    with FakeHost().serving(credentials(**theirs.settings("127.0.0.1"))) as address:
        assert "is not data_service.tls_certificate" in refusal(address, **mine)
    with FakeHost().serving(credentials(**theirs.settings("127.0.0.1", is_mutual=True))) as address:
        assert "is not signed by data_service.tls_authority" in refusal(address, **mine, tls_authority=ours.file)
    other_name = theirs.settings("algo-7")
    with FakeHost().serving(credentials(**other_name)) as address:
        assert "Add it as a SubjectAlternativeName" in refusal(address, **other_name)


@pytest.mark.parametrize(
    "how",
    [
        "without a certificate",
        pytest.param("without TLS", marks=pytest.mark.proof),
        pytest.param("with a certificate of another authority", marks=pytest.mark.proof),
    ],
)
def test_a_data_host_with_tls_refuses_trainers_without_their_part_of_it(ours, theirs, how):
    """A trainer without TLS, without a certificate, or with another authority's soon learns what differs."""
    mutual = ours.settings("127.0.0.1", is_mutual=True)
    settings, expected = {
        "without TLS": ({}, "the data host uses TLS, but this trainer has no data_service.tls_certificate"),
        "without a certificate": (
            {name: mutual[name] for name in ("tls_certificate", "tls_key")},
            "signed by its data_service.tls_authority, but this trainer has .* and no data_service.tls_authority",
        ),
        "with a certificate of another authority": (
            {**theirs.settings("127.0.0.1"), "tls_authority": ours.file},
            "signed by its data_service.tls_authority, but this trainer has .* and data_service.tls_authority=",
        ),
    }[how]
    with FakeHost().serving(credentials(**mutual)) as address:
        assert re.search(expected, refusal(address, within_s=SURELY_S, **settings))


def test_a_data_host_that_starts_late_or_leaves_is_no_tls_mismatch(ours):
    """A trainer waits while nobody listens, and while the listener closes each connection."""
    settings = ours.settings("127.0.0.1", is_mutual=True)
    known = credentials(**settings)
    with socket.create_server(("127.0.0.1", 0)) as leaving:
        leaving.settimeout(SURELY_S)
        address = f"127.0.0.1:{leaving.getsockname()[1]}"
        module = RemoteDataModule(data(), [address], settings=DataServiceSettings(**settings))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(iter, module.train_dataloader())
            for _ in range(10):
                leaving.accept()[0].close()
            leaving.close()
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1)
            with FakeHost().serving(known, address):
                waiting.result(timeout=SURELY_S)
                module.teardown("fit")


def test_a_wrong_tls_file_is_named_before_anything_starts(ours, tmp_path):
    """Both ends check the files before they start processes, and name the file and the setting."""
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    settings = DataServiceSettings(**{**ours.settings("localhost"), "tls_certificate": str(broken)})
    expected = rf"{broken} \(data_service.tls_certificate\) contains no PEM certificate"
    with pytest.raises(DataSettingsError, match=expected), DataHost(settings=settings):
        pass
    with pytest.raises(DataSettingsError, match=expected):
        next(iter(RemoteDataModule(data(), ["localhost:1"], settings=settings).train_dataloader()))
