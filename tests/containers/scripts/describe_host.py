# A job's script without Lightning: leaves in data/<host>.json what this host was given. All hosts leave together.
import json
import os
import socket
import time
from pathlib import Path

OPT_ML = Path("/opt/ml")
DEADLINE_S = 60.0


def meet(hosts, port):
    """Return when every host has come, and has been met by every other one."""
    deadline = time.monotonic() + DEADLINE_S
    with socket.create_server(("", port)) as server:
        server.settimeout(DEADLINE_S)
        for host in hosts:
            while True:
                try:
                    socket.create_connection((host, port), timeout=1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
        for _ in hosts:
            server.accept()[0].close()


if __name__ == "__main__":
    config = {path.stem: json.loads(path.read_text()) for path in (OPT_ML / "input" / "config").glob("*.json")}
    host, hosts = config["resourceconfig"]["current_host"], config["resourceconfig"]["hosts"]
    name = host.rpartition("-")[0]
    data = OPT_ML / "input" / "data"
    (OPT_ML / "model" / name).write_text(name)
    meet(hosts, 20200)
    seen = {
        "config": config,
        "channels": {folder.name: sorted(file.name for file in folder.iterdir()) for folder in data.iterdir()},
        "model": sorted(path.name for path in (OPT_ML / "model").iterdir()),
        "environment": {name: os.environ.get(name) for name in ("AWS_REGION", "TRAINING_JOB_NAME", "ADDED")},
    }
    (OPT_ML / "output" / "data" / f"{name}.json").write_text(json.dumps(seen))
    meet(hosts, 20201)
