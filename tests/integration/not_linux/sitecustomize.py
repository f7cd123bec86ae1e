"""Simulates macOS: removes what only Linux offers from a Python process. PYTHONPATH makes Python load this file first.

Third-party packages must be imported before the removal, or they would look for their macOS binaries. PRELOAD names
further packages to import.
"""

import errno
import fcntl
import importlib
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import select
import selectors
import signal
import socket
import sys

for name in ("psutil", "urllib.request", *os.environ.get("PRELOAD", "").split()):
    importlib.import_module(name)

# Missing from Python 3.10 to 3.12 on macOS, according to "Availability" in each module's documentation.
LINUX_ONLY = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "memfd_create", "pidfd_open", "waitid"),
        *("P_ALL", "P_PID", "P_PIDFD", "WEXITED", "WNOWAIT", "WSTOPPED", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"),
        *("eventfd", "pipe2", "posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "fdatasync"),
        *("getrandom", "setns", "unshare", "getxattr", "O_TMPFILE", "O_DIRECT", "O_PATH", "sched_getparam"),
    ),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT", "SIGPWR"),
    socket: (
        *("AF_NETLINK", "AF_PACKET", "SO_PEERCRED", "SO_BINDTODEVICE", "SO_MARK", "MSG_CMSG_CLOEXEC", "MSG_NOSIGNAL"),
        *("SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_CORK", "TCP_KEEPIDLE", "TCP_INFO"),
    ),
    select: ("epoll",),
    selectors: ("EpollSelector",),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SETPIPE_SZ", "F_OFD_SETLK"),
    mmap: ("MAP_POPULATE", "MAP_STACK", "MADV_HUGEPAGE"),
}
for module, attributes in LINUX_ONLY.items():
    for attribute in attributes:
        if hasattr(module, attribute):
            delattr(module, attribute)
selectors.DefaultSelector = selectors.PollSelector
multiprocessing.context._default_context._default_context = multiprocessing.get_context("spawn")
sys.platform = "darwin"


def refuse(event, arguments):
    """Fail as macOS does: no /proc, a single loopback address, no abstract Unix sockets."""
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys/", "/dev/shm")) and not _is_psutil():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])
    if event in {"socket.bind", "socket.connect"}:
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else ""
        if str(host).startswith("127.") and host != "127.0.0.1":
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        if isinstance(address, (str, bytes)) and address[:1] in {"\0", b"\0"}:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if event == "ctypes.dlsym" and arguments[1] in {"prctl", "mallopt", "memfd_create"}:
        raise AttributeError(f"dlsym: symbol not found: {arguments[1]}")


def _is_psutil():
    """Check whether psutil opens the file: on macOS it asks the kernel instead, so it must not fail here."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("psutil"):
            return True
        frame = frame.f_back
    return False


sys.addaudithook(refuse)
