"""One R context of the code interpreter: IRkernel, spoken to in Jupyter's protocol.

https://jupyter-client.readthedocs.io/en/stable/messaging.html, version 5.3, over
ZeroMQ sockets in a directory that only this user can open. What R prints comes
in messages and is written into the server's pipes; what programs print that R
starts goes there by itself.
"""

import hashlib
import hmac
import json
import os
import shutil
import signal
import sys
import tempfile
import time

import link
import zmq

DELIMITER = b"<IDS|MSG>"
PORTS = ("shell", "iopub", "control", "stdin", "hb")


def quoted(s):
    """Returns a text as R reads it: JSON's escapes are R's, too."""
    return json.dumps(s, ensure_ascii=False)


class R:
    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="postern-r-")
        self.key = os.urandom(16).hex()
        self.session = os.urandom(16).hex()
        self.sent = 0
        at = os.path.join(self.directory, "k")
        connection = {f"{name}_port": i + 1 for i, name in enumerate(PORTS)}
        connection.update(transport="ipc", ip=at, key=self.key, signature_scheme="hmac-sha256", kernel_name="ir")
        path = os.path.join(self.directory, "connection.json")
        with open(path, "w") as f:
            json.dump(connection, f)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.pid = os.posix_spawnp(
            "R", ["R", "--slave", "--no-save", "--no-restore", "-e", "IRkernel::main()", "--args", path], {"LANG": "C.UTF-8", **os.environ},
            setsigdef=[signal.SIGINT, signal.SIGPIPE], file_actions=[(os.POSIX_SPAWN_DUP2, null, 0)],
        )  # fmt: skip
        os.close(null)
        context = zmq.Context()
        self.shell, self.iopub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        self.iopub.setsockopt(zmq.SUBSCRIBE, b"")
        # Nothing is dropped, however fast it comes.
        self.iopub.setsockopt(zmq.RCVHWM, 0)
        for name, s in (("shell", self.shell), ("iopub", self.iopub)):
            s.connect(f"ipc://{at}-{connection[name + '_port']}")

    def sign(self, parts):
        m = hmac.new(self.key.encode(), digestmod=hashlib.sha256)
        for p in parts:
            m.update(p)
        return m.hexdigest().encode()

    def request(self, kind, content):
        """Sends a request and returns its ID."""
        self.sent += 1
        mid = f"{self.session}-{self.sent}"
        head = {"msg_id": mid, "username": "user", "session": self.session, "msg_type": kind, "version": "5.3",
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
        parts = [json.dumps(head).encode(), b"{}", b"{}", json.dumps(content).encode()]
        self.shell.send_multipart([DELIMITER, self.sign(parts), *parts])
        return mid

    def execute(self, code, silent=False):
        return self.request("execute_request", {"code": code, "silent": silent, "store_history": not silent, "user_expressions": {}, "allow_stdin": False, "stop_on_error": True})

    def messages(self, socket):
        """Yields (type, ID of the request, content) of what has arrived."""
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            parts = socket.recv_multipart()
            try:
                i = parts.index(DELIMITER)
                head, parent, _, content = (json.loads(p) for p in parts[i + 2 : i + 6])
                yield head["msg_type"], parent.get("msg_id"), content
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # user code can send anything

    def forget_paths(self):
        """Removes the sockets' names: who has connected needs them no more."""
        shutil.rmtree(self.directory, ignore_errors=True)

    # The code of these is silent: it is not counted, and prints nothing.

    def enter(self, base, new, call):
        """Returns code that sets the variables for a cell."""
        gone = [k for k in base if k not in new]
        lines = [f"Sys.unsetenv(c({', '.join(map(quoted, gone))}))"] if gone else []
        if new != base:
            lines += [assign(new)]
        if call:
            lines += [f"options(.postern_env = Sys.getenv(c({', '.join(map(quoted, call))}), NA, names = TRUE))", assign(call)]
        return "; ".join(lines)

    LEAVE = "local({ v <- getOption('.postern_env'); for (k in names(v)) if (is.na(v[[k]])) Sys.unsetenv(k) else do.call(Sys.setenv, as.list(v[k])); options(.postern_env = NULL) })"


def assign(variables):
    return f"invisible(do.call(Sys.setenv, list({', '.join(f'{quoted(k)} = {quoted(v)}' for k, v in variables.items())})))"


class Kernel:
    """The state of the cell that runs, if one does."""

    def __init__(self, r):
        self.r = r
        self.base = {}
        self.count = 0
        self.steps = []  # of the cell, as (code, silent); then done
        self.waits = None  # the request that is under way
        self.replied = self.idle = False
        self.silent = self.interrupted = self.errored = self.answer = False
        self.ready = False

    def next(self):
        self.replied = self.idle = False
        if not self.steps:
            self.waits = None
            if self.answer:
                link.send({"t": "done"})
            return
        code, self.silent = self.steps.pop(0)
        self.waits = self.r.execute(code, self.silent)

    def run(self, code, base, call):
        self.count += 1
        self.interrupted = self.errored = False
        self.answer = True
        link.send({"t": "busy"})
        link.send({"t": "count", "n": self.count})
        before = self.r.enter(self.base, base, call)
        self.base = base
        self.steps = ([(before, True)] if before else []) + [(code, False)] + ([(self.r.LEAVE, True)] if call else [])
        self.next()

    def message(self, kind, mid, c):
        if mid != self.waits:
            return
        if kind == "status" and c.get("execution_state") == "idle":
            self.idle = True
        elif kind.endswith("_reply"):
            self.replied = True
            if kind == "execute_reply" and any(p.get("source") == "ask_exit" for p in c.get("payload") or () if isinstance(p, dict)):
                os.kill(self.r.pid, signal.SIGKILL)  # quit(): it leaves the end to us
                os._exit(0)
            elif kind == "execute_reply" and c.get("status") != "ok" and not self.silent and not self.errored:
                self.complain(c)
        elif self.silent:
            pass
        elif kind == "stream":
            link.say(link.ERR if c.get("name") == "stderr" else link.OUT, str(c.get("text", "")))
        elif kind in ("display_data", "execute_result") and isinstance(c.get("data"), dict):
            link.send({"t": "result", "main": kind == "execute_result", "data": c["data"]})
        elif kind == "error":
            self.complain(c)
        if self.idle and self.replied:
            if not self.ready:
                self.ready = True
                self.r.forget_paths()
                link.send({"t": "ready"})
                self.waits = None
            else:
                self.next()

    def complain(self, c):
        self.errored = True
        if self.interrupted:
            link.send({"t": "error", "name": "KeyboardInterrupt", "value": "the execution was interrupted", "traceback": ""})
            return
        lines = c.get("traceback") or ()
        link.send({"t": "error", "name": str(c.get("ename", "ERROR")), "value": str(c.get("evalue", "")), "traceback": "\n".join(map(str, lines))})

    def interrupt(self):
        """Interrupts R, and from the second time on the programs that it waits for, if there are any.

        R hears nothing while it waits; and it must not hear twice: then it ends.
        """
        programs = link.children(self.r.pid) if self.interrupted else []
        self.interrupted = True
        for pid in programs or [self.r.pid]:
            try:
                os.kill(pid, signal.SIGINT)
            except ProcessLookupError:
                pass

    def command(self, c):
        if c["op"] == "run":
            self.run(c["code"], c["base"], c["call"])
        elif c["op"] == "interrupt":
            if self.waits is not None and not self.silent:
                self.interrupt()
        elif c["op"] == "reseed":
            self.answer = not c.get("silent")
            if self.waits is not None:
                self.answer = True  # of the cell; it keeps its seed
            elif c["all"]:
                # Only of what has drawn random numbers already.
                self.steps = [(f"if (exists('.Random.seed', globalenv())) set.seed({int.from_bytes(os.urandom(4), 'big') >> 1})", True)]
                self.next()
            elif self.answer:
                link.send({"t": "done"})


def start():
    link.start(sys.argv[1])
    ended, w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *a: None)
    signal.set_wakeup_fd(w, warn_on_full_buffer=False)
    r = R()
    kernel = Kernel(r)
    commands = link.Commands()
    poll = zmq.Poller()
    for s in (r.shell, r.iopub, link.CMD, ended):
        poll.register(s, zmq.POLLIN)
    asked = 0
    while True:
        # Until it hears us and we hear it.
        if not kernel.ready and time.monotonic() - asked > 0.5:
            asked = time.monotonic()
            kernel.waits, kernel.idle, kernel.replied = r.request("kernel_info_request", {}), False, False
        ready = dict(poll.poll(None if kernel.ready else 100))
        if ended in ready:
            os.read(ended, 4096)
            pid, status = os.waitpid(r.pid, os.WNOHANG)
            if pid:
                r.forget_paths()
                link.end(status)
        for s in (r.iopub, r.shell):
            if s in ready:
                for kind, mid, content in r.messages(s):
                    if isinstance(content, dict):
                        kernel.message(kind, mid, content)
        if link.CMD in ready:
            for c in commands.read():
                kernel.command(c)
