# A host of an emulated cluster: records what it sees of its container, then exits or waits as its argument says.
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from lightning_sm.job.control_folder import Phase, announce

OPT_ML = Path("/opt/ml")
# Only a hang reaches this limit.
DEADLINE_S = 600
PORT = 4711


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(sys.argv)
        time.sleep(0.05)


def meet(host, hosts):
    """Connect to all hosts, and wait until all have connected: a host's name vanishes when it exits."""
    addresses = {socket.gethostbyname(host)}
    with socket.create_server(("", PORT), backlog=len(hosts)) as server:
        server.settimeout(DEADLINE_S)
        for other in hosts:
            until(lambda other=other: connects(other, addresses))
        for _ in hosts:
            server.accept()[0].close()
    return addresses


def connects(host, addresses):
    try:
        with socket.create_connection((host, PORT), timeout=DEADLINE_S) as connection:
            addresses.add(connection.getpeername()[0])
    except OSError:
        return False
    return True


def can_write(folder):
    try:
        (folder / "written").touch()
    except OSError:
        return False
    return True


def main(how):
    config = json.loads((OPT_ML / "input" / "config" / "resourceconfig.json").read_text())
    host, hosts = config["current_host"], config["hosts"]
    addresses = meet(host, hosts)
    channels = OPT_ML / "input" / "data"
    checkpoint = OPT_ML / "checkpoints" / "last"
    facts = {
        "group": config["current_group_name"],
        "hostname": socket.gethostname(),
        "addresses": len(addresses),
        "interface": config["network_interface_name"] in os.listdir("/sys/class/net"),
        "channels": {one.name: sorted(os.listdir(one)) for one in channels.iterdir()},
        "writable": [one.name for one in channels.iterdir() if can_write(one)],
        "checkpoint": checkpoint.read_text() if checkpoint.exists() else None,
        "lines": os.environ.get("LINES_OF_TEXT"),
        "leaked": os.environ.get("ONLY_ON_THIS_MACHINE"),
        "free_memory": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    }
    (OPT_ML / "model" / "facts.json").write_text(json.dumps(facts))
    print("noted", flush=True)
    process = announce()
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    if how == "wait":
        rank = hosts.index(host)
        if checkpoint.parent.is_dir() and rank == 0 and not facts["checkpoint"]:
            checkpoint.write_text("saved")
            until(checkpoint.with_name("last.sagemaker-uploaded").exists)
        if not facts["checkpoint"]:  # a later attempt has nothing left to do
            process.beat(rank, 5, 0, Phase.TRAINING, trained_epoch=1)
            print("waits", flush=True)
            threading.Event().wait(DEADLINE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
