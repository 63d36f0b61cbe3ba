"""What the kernels that are written in Python and drive another program share.

Such a kernel (shell.py, jupyter.py) speaks to server.py as kernel.py does:
commands on descriptor 3, events on 4, the user's output on 1 and 2. It is not
the process that runs the code, but its parent, and ends when that ends.
"""

import fcntl
import json
import os
import signal
import termios
import time

OUT, ERR, CMD, EVENTS = 1, 2, 3, 4
NOTHING = bytes(4)
PATIENCE = 30  # seconds that a write waits until the server has read what came before


def put(fd, b):
    while b:
        b = b[os.write(fd, b) :]


def taken(*fds):
    """Waits until the server has read what is in the pipes: it reads three, and only so knows what came first."""
    until = time.monotonic() + PATIENCE
    pause = 0.00005
    for fd in fds:
        try:
            while fcntl.ioctl(fd, termios.FIONREAD, NOTHING) != NOTHING and time.monotonic() < until:
                time.sleep(pause)
                pause = min(2 * pause, 0.005)
        except OSError:
            pass  # nobody reads any more


def send(event):
    put(EVENTS, json.dumps(event).encode() + b"\n")


def say(fd, text):
    """Writes output of the user's, after all that came before."""
    taken(EVENTS, ERR if fd == OUT else OUT)
    put(fd, text.encode("utf-8", "replace"))


class Commands:
    """The commands that the server sends; a descriptor to poll, and what has come."""

    def __init__(self):
        os.set_blocking(CMD, False)
        self.have = b""

    def read(self):
        """Returns the commands that have arrived; ends the process when the server has gone."""
        while True:
            try:
                b = os.read(CMD, 1 << 20)
            except BlockingIOError:
                break
            if not b:
                os.killpg(0, signal.SIGKILL)
            self.have += b
        *whole, self.have = self.have.split(b"\n")
        return [json.loads(line) for line in whole]


def start(cwd):
    """Prepares this process: the working directory, descriptors, signals."""
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")
    for fd in (CMD, EVENTS):
        os.set_inheritable(fd, False)
    # For the programs that a cell has started.
    signal.signal(signal.SIGINT, lambda *a: None)
    # Python sets it for itself where there is no locale (PEP 538).
    os.environ.pop("LC_CTYPE", None)


def children(pid):
    """Returns the descendants of a process."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as f:
                    parents[int(name)] = int(f.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                pass
    out, todo = [], [pid]
    while todo:
        p = todo.pop()
        mine = [c for c, parent in parents.items() if parent == p]
        out += mine
        todo += mine
    return out


def end(status):
    """Ends as the program did that this process was for."""
    if os.WIFSIGNALED(status):
        n = os.WTERMSIG(status)
        if n not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(n, signal.SIG_DFL)
        os.kill(os.getpid(), n)
    os._exit(os.WEXITSTATUS(status))
