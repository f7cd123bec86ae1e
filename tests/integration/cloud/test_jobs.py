"""``lightning-sm jobs`` in a separate process, against a fake service on this machine. Nothing is ever sent to AWS."""

import signal
import subprocess
import sys

from tests.fakes.sagemaker_service import FakeService, process_environment

RUNNING = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}


def test_ctrl_c_ends_the_command_and_not_the_job():
    """The log is shown as it arrives; Ctrl-C stops only the command, which prints how to stop the job."""
    with FakeService(endings=[RUNNING], lines=["epoch=1/2"], requests=[{"TrainingJobName": "job-1"}]) as service:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_sm", "jobs", "logs", "-f", "job-1"],
            env={**process_environment(service.environment), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline().endswith(" algo-1 | epoch=1/2\n")
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert stdout == ""
    assert "Job job-1 is InProgress: Training" in stderr
    assert "lightning-sm jobs stop job-1" in stderr
    assert "Traceback" not in stderr
    assert not any("Stop" in operation for operation in service.operations)


def test_jobs_are_looked_after_without_torch_and_the_sdk():
    """The jobs commands need only boto3, so they run on a laptop."""
    code = (
        "import sys; from lightning_sm.__main__ import main\n"
        "try: main(['jobs', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'pytorch_lightning', 'grpc', 'sagemaker', 'jsonargparse'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
