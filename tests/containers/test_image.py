"""The content of the image, and the behaviour of its entry point."""

import json
import re
import secrets
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.containers.engine import docker
from tests.fakes.job_folder import resource_config, write_job

pytestmark = pytest.mark.docker

# Reports that it runs, then waits for SIGTERM, which ends it.
WAITING_SCRIPT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("script runs", flush=True)
raise SystemExit(128 + signal.sigwait({signal.SIGTERM}))
"""
DEADLINE_S = 120
REPOSITORY = Path(__file__).parents[2]


@contextmanager
def advisories(vulnerable):
    """Run a fake of OSV's service that reports one vulnerable package; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]["name"]
            package = {"name": vulnerable, "ecosystem": "PyPI"}
            fixed = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}
            known = {"id": "GHSA-test-0001", "summary": "a test", "affected": [{"package": package, "ranges": [fixed]}]}
            answer = json.dumps({"vulns": [known]} if asked == vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            """Write nothing to the tests' output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def facts(image):
    """The image's configuration, from the engine."""
    return json.loads(docker("image", "inspect", image).stdout)[0]["Config"]


@pytest.fixture
def container_name():
    """A name for one container, which is removed after the test."""
    name = f"lightning-sm-test-{secrets.token_hex(4)}"
    yield name
    docker("rm", "--force", name, check=False)


def inside(image, script):
    """Return the output of a shell script in a container of the image."""
    return docker("run", "--rm", "--network", "none", "--entrypoint", "bash", image, "-euc", script).stdout


def test_doctor_finds_the_image_sound(image):
    """doctor, the image's smoke test, finds no problem and prints the versions."""
    ended = docker("run", "--rm", image, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(ended.stdout)["results"]}
    assert "sagemaker-training" in checks["versions"]["found"]
    assert checks["signals"]["status"] == "ok"


def test_the_entry_point_is_process_1(facts):
    """The launcher gets the service's signals directly, without a shell in between."""
    assert facts["Entrypoint"] == ["lightning-sm"]


def test_the_package_lies_where_the_service_hides_nothing(image):
    """lightning_sm is in site-packages, outside /opt/ml; the app is in the toolkit's code folder."""
    paths = inside(
        image, "cd /; python -c 'import lightning_sm; print(lightning_sm.__file__)'; ls /opt/ml/code/app/train.py"
    )
    package, app = paths.split()
    assert package.endswith("/site-packages/lightning_sm/__init__.py")
    assert app == "/opt/ml/code/app/train.py"


@pytest.mark.proof
def test_torch_can_compile(image):
    """The image has C and C++ compilers and Python's headers, which torch.compile needs in a job."""
    script = "import torch; print(torch.compile(lambda x: (x.sin() + 1).sum())(torch.zeros(8)).item())"
    assert inside(image, f"command -v gcc; OMP_NUM_THREADS=1 python -c '{script}'").splitlines()[-1] == "8.0"


def test_the_toolkit_is_there(image):
    """Users can choose the toolkit's entry point instead of ours."""
    assert inside(image, "command -v train") == "/opt/conda/bin/train\n"


@pytest.mark.proof
def test_what_pip_installed_can_be_frozen(image):
    """The lock has pip's packages with version and checksum, except those that the Dockerfile installs itself."""
    script = (REPOSITORY / "docker" / "pip_lock.py").read_text(encoding="utf-8")
    command = ["docker", "run", "--rm", "--interactive", "--entrypoint", "python", image, "-"]
    ended = subprocess.run(command, input=script, capture_output=True, text=True, timeout=300, check=True)
    lines = ended.stdout.splitlines()
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines), lines
    names = {line.partition("==")[0].lower() for line in lines}
    assert {"sagemaker-training", "jsonargparse"} <= {name.replace("_", "-") for name in names}
    assert not {"lightning-sm", "lightning-bolts"} & names


@pytest.mark.proof
def test_a_bill_of_materials_lists_all_packages_and_a_scan_names_the_vulnerable_one(image, tmp_path):
    """``make sbom`` writes a valid bill of Debian's and Python's packages, and fails if one is vulnerable."""
    with advisories("idna") as url:
        options = [f"IMAGE={image}", f"BIN={Path(sys.executable).parent}", f"SBOM={tmp_path}/sbom"]
        options.append(f"AUDIT=-s osv --osv-url {url}")
        command = ["make", "--assume-old=.venv/.proof", "sbom", *options]
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == image
    assert {"gcc", "bash", "torch", "lightning-sm", "sagemaker-training"} <= {one["name"] for one in bill["components"]}
    assert ended.returncode != 0
    assert "Found 1 known vulnerability in 1 package" in ended.stderr
    assert re.search(r"^idna +\S+ +GHSA-test-0001 +99\.0", ended.stdout, re.MULTILINE)


def test_pytorch_is_for_gpus(image):
    """PyTorch is built for CUDA, although this machine has no GPU."""
    assert inside(image, "python -c 'import torch; print(torch.version.cuda)'").strip() != "None"


def test_no_secret_is_in_the_settings(facts):
    """Variables and labels contain neither secrets nor the address of a package index."""
    settings = [*facts["Env"], *map(str, (facts["Labels"] or {}).items())]
    assert not [
        line for line in settings if any(word in line.upper() for word in ("TOKEN", "SECRET", "PASSWORD", "://"))
    ]


def test_off_sagemaker_train_says_so(image):
    """Without a job, the container exits with 2, says what is missing, and what to run on a laptop."""
    ended = docker("run", "--rm", image, "train", check=False)
    assert ended.returncode == 2
    assert "This is not a SageMaker host" in ended.stdout
    assert "lightning-sm local" in ended.stdout


def test_stopping_reaches_the_script(image, container_name, tmp_path):
    """``docker stop`` reaches the script; its exit code is the container's, and the failure file has the reason."""
    ml = write_job(tmp_path / "ml", resource_config({"homogeneousCluster": ["algo-1"]}, "algo-1"))
    (ml / "output").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "wait.py").write_text(WAITING_SCRIPT, encoding="utf-8")
    mounts = [f"--volume={ml / name}:/opt/ml/{name}" for name in ("input", "output")]
    options = [*mounts, f"--volume={tmp_path / 'code'}:/opt/ml/code", "--env=SAGEMAKER_PROGRAM=wait.py"]
    command = ["docker", "run", f"--name={container_name}", "--hostname=algo-1", *options, image, "train"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as container:
        said = next((line for line in container.stdout if "script runs" in line), None)
        assert said is not None
        docker("stop", "--time", str(DEADLINE_S), container_name, timeout_s=2 * DEADLINE_S)
        container.communicate(timeout=DEADLINE_S)
    assert container.returncode == 143
    assert (
        (ml / "output" / "failure")
        .read_text(encoding="utf-8")
        .startswith("The job was stopped or interrupted (SIGTERM)")
    )


@pytest.mark.proof
def test_the_baked_app_trains(image, container_name, tmp_path):
    """With only the service's files, the app in the image trains, and saves its model and a report."""
    hyperparameters = {"config": "app/configs/smoke.yaml"}
    resources = resource_config({"homogeneousCluster": ["algo-1"]}, "algo-1")
    ml = write_job(tmp_path / "ml", resources, hyperparameters=hyperparameters)
    mounts = []
    for name in ("input", "output", "model"):
        (ml / name).mkdir(exist_ok=True)
        mounts.append(f"--volume={ml / name}:/opt/ml/{name}")
    options = [f"--name={container_name}", "--hostname=algo-1", "--env=OMP_NUM_THREADS=1", *mounts]
    docker("run", *options, image, "train", timeout_s=DEADLINE_S)
    assert {path.name for path in (ml / "model").iterdir()} >= {"model.ckpt", "state_dict.pt", "config.yaml"}
    assert (ml / "output" / "data" / "report.html").exists()
    assert not (ml / "output" / "failure").exists()
