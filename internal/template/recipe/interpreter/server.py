"""The code interpreter of a sandbox: runs cells of code and keeps their state.

It serves E2B's code interpreter protocol on port 49999 and runs inside the
sandbox, as the sandbox's user, next to the code it runs. So it protects
nothing: who may speak to it is decided outside, and all that it is told or
asked may be hostile without harm to anybody but this sandbox. It must not hold
a secret, and it must not die of a bad request: the agent would lose its state.

A context is one process with a working directory, kernel.py or that of another
language, see LANGUAGES:

    starting ── ready ── gone      gone: exited, killed or restarted; the next
        └──────────────────┘             execution starts a new process and says
                                         that the old state is lost

Executions in one context run one after the other, in the order of arrival.
An execution whose client has gone is interrupted, so that a forgotten loop
does not block the context for ever.

A sandbox may be a copy of another one, restored from its snapshot. Then the
guest changes GENERATION, and before the next execution each process that has
run code of the user's is told to seed its random state anew, and each that has
not is replaced by a new one: only so its hash seed and the layout of its memory
are its own too.

Every idle sandbox holds this program in memory, so it imports little: threads
and blocking sockets, no asyncio and no HTTP library. The main thread accepts
connections, starts processes (their parent-death signal goes by the thread)
and empties the pipes of idle ones; each connection has a thread.
"""

import _thread
import codecs
import errno
import fcntl
import json
import os
import select
import signal
import socket
import sys
import threading
import time

HOME = "/home/user"
HERE = os.path.dirname(os.path.abspath(__file__))

# The guest writes the sandbox's variables here when it is told who it is, which
# is after this server was started (or restored from a snapshot).
ENVS_FILE = "/run/postern/envs.json"
# Changes at each restore. The machine's id changes before it, and only if the
# sandbox is another one than that which was saved.
GENERATION = "/run/postern/generation"
MACHINE_ID = "/etc/machine-id"

MAX_BODY = 64 << 20  # bytes of a request
MAX_HEAD = 64 << 10  # bytes of its head
MAX_ENVS = 1 << 20  # bytes of ENVS_FILE
MAX_CONNECTIONS = 512
MAX_CONTEXTS = 64
MAX_WAITING = 64  # executions that wait in one context
START_TIMEOUT = 60  # seconds until a new kernel must answer
KEEPALIVE = 5  # seconds of silence after which the client is told that we live
ANSWER = 30  # seconds in which an idle kernel must react at all
INTERRUPTS = 30  # seconds of interrupts before an abandoned execution's kernel is killed
BODY_TIMEOUT = 120  # seconds that a request may take to arrive
IDLE_TIMEOUT = 600  # seconds that a connection may be idle
MAX_EVENT = 256 << 20  # bytes of one event of a kernel
# Output is gathered, so that what was printed as one is shown as one, however
# many pieces it was written in. Jupyter gathers for 0.2 s.
MAX_PIPE = 1 << 20  # bytes that a pipe holds at most (/proc/sys/fs/pipe-max-size)
MAX_TEXT = 64 << 10  # characters of output in one event
LINES_WAIT = 0.02  # seconds that whole lines wait for more
REST_WAIT = 0.2  # seconds that the beginning of a line waits for its end
# After a restore the sandbox's first command is on its way; a new process
# would compete with it for the processor.
CALM = 0.05

MIMES = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}

STATUS = {200: "OK", 204: "No Content", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}


def python(module):
    """Returns the command that starts one of our modules as a kernel."""
    # As a module, so that it is not compiled anew each time. -P: a file named
    # json.py in the working directory must not keep the kernel from starting.
    launch = f"import sys; sys.path.insert(0, {HERE!r}); import {module}; del sys.path[0]; {module}.start()"
    return [sys.executable, "-X", "utf8", "-P", "-c", launch]


# --expose-internals: node has parsers of its own, which nobody else may use.
# --no-force-async-hooks-checks: else it aborts when a callback is interrupted.
NODE = ["node", "--expose-internals", "--no-warnings", "--no-force-async-hooks-checks", os.path.join(HERE, "kernel.mjs")]
# By a shell, since Java cannot change its directory. Less memory and a quicker
# start in exchange for a slower peak; the opened package has the map of the
# environment.
JAVA = ["/bin/sh", "-c", 'cd "$0" 2>/dev/null || cd /; export LANG="${LANG-C.UTF-8}"; exec java -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData --add-opens java.base/java.util=ALL-UNNAMED -cp ' + os.path.join(HERE, "java") + " Kernel"]
# What each language needs in a template, and how its kernel is started; the
# working directory and the language are added. A language costs nothing before
# its first use.
LANGUAGES = {
    "python": ((), python("kernel")),
    "javascript": (("node",), NODE),
    "typescript": (("node",), NODE),
    "r": (("R", "/usr/lib/R/site-library/IRkernel", os.path.join(HERE, "jupyter.py")), python("jupyter")),
    "java": (("java", os.path.join(HERE, "java/Kernel.class")), JAVA),
    "bash": (("bash",), python("shell")),
}
ALIASES = {"python3": "python", "py": "python", "js": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash"}
FULL = "code-interpreter-v1"  # the template that has all of them
FIRST = ("python", "javascript")  # have a context from the start
BINARIES = ("/usr/local/bin", "/usr/bin", "/bin")


def has(thing):
    """Reports whether the template has a program or a path."""
    if thing.startswith("/"):
        return os.path.exists(thing)
    return any(os.access(os.path.join(d, thing), os.X_OK) for d in BINARIES)


def available():
    """Returns the languages that the template has."""
    return [name for name, (needs, _) in LANGUAGES.items() if all(map(has, needs))]


def log(text):
    try:
        os.write(2, f"interpreter: {text}\n".encode())
    except OSError:
        pass


class BadRequest(Exception):
    """A request that cannot be served; the text is for the caller."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Gone(Exception):
    """The client has gone."""


def random_id():
    """Returns a random UUID. The kernel of the sandbox is asked each time: no state here could be that of a copy."""
    b = bytearray(os.urandom(16))
    b[6], b[8] = b[6] & 0x0F | 0x40, b[8] & 0x3F | 0x80
    h = b.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def read_envs():
    """Returns the variables that the sandbox was created with."""
    try:
        with open(ENVS_FILE, "rb") as f:
            return strings(json.loads(f.read(MAX_ENVS)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        log(f"read {ENVS_FILE}: {e}")
        return {}


def read_identity():
    """Returns (generation, machine id)."""
    out = []
    for path in (GENERATION, MACHINE_ID):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                out.append(os.read(fd, 256))
            finally:
                os.close(fd)
        except OSError:
            out.append(b"")
    return tuple(out)


def strings(v):
    """Returns v, a map of variables, or raises ValueError."""
    if v is None:
        return {}
    if not isinstance(v, dict):
        raise ValueError("variables must be an object of strings")
    for k, s in v.items():
        # setenv(3) would refuse these with a traceback in the user's cell.
        if not isinstance(s, str) or not k or "=" in k or "\0" in k or "\0" in s:
            raise ValueError(f"variable {k[:64]!r} must have a name without '=' and a text without NUL")
    return v


def pipe(blocking_end):
    """Returns a pipe whose other end does not block: 0 and 1 name the ends."""
    p = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(p[1 - blocking_end], False)
    return p


class Kernel:
    """One kernel process and our ends of its pipes.

    lock is held by whoever reads the pipes: an execution, or the main thread
    while there is none.
    """

    def __init__(self, house, language, cwd):
        self.house, self.language, self.cwd = house, language, cwd
        self.lock = threading.Lock()
        self.pid = 0
        self.ended = False  # reaped
        self.why = None  # why the process ended, once it has
        self.told = False  # whether a client knows that it ended
        self.used = False  # whether it has run code of the user's
        self.identity = house.identity  # of the sandbox that it was seeded in
        self.fds = []
        self.shut = set()  # those of fds that it has closed at its end
        self.have = b""
        self.decoders = {}
        self.death, self._death = os.pipe2(os.O_CLOEXEC)  # hangs up when the process has ended

    # Only the main thread calls it, see the package comment.
    def spawn(self):
        # The user's code has this environment, and should find in it what a
        # command that is run in the sandbox finds, and nothing of ours.
        env = dict(os.environ)
        for k in ("LANG", "LC_CTYPE"):
            env.pop(k, None)  # of this service, and what Python made of none
        env.setdefault("HOME", HOME)
        # What "pip install" puts there, as in a login shell.
        local = os.path.join(env["HOME"], ".local/bin")
        if local not in env.get("PATH", "").split(":"):
            env["PATH"] = local + ":" + env.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        env.update(read_envs())
        ours, theirs = [], []
        # Commands to it, then events, output and errors from it.
        for reads in (True, False, False, False):
            r, w = pipe(0 if reads else 1)
            ours.append(w if reads else r)
            theirs.append(r if reads else w)
        self.commands, self.events, self.out, self.err = self.fds = ours
        new = codecs.getincrementaldecoder("utf-8")
        self.decoders = {self.out: ("stdout", new("replace")), self.err: ("stderr", new("replace"))}
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # Above all targets, so that one dup2 does not overwrite what the next
        # one copies.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (null, theirs[2], theirs[3], theirs[0], theirs[1])]
        try:
            # setpriv: if we die, the kernel must not stay: nobody could reach
            # it again.
            args = ["/usr/bin/setpriv", "--pdeathsig", "KILL", *LANGUAGES[self.language][1], self.cwd, self.language]
            self.pid = os.posix_spawn(
                args[0], args, env, setsid=True, setsigdef=[signal.SIGINT, signal.SIGPIPE],
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate(high)],
            )  # fmt: skip
        finally:
            for fd in [null, *theirs, *high]:
                os.close(fd)

    def end(self, status):
        """Says that the process has ended; the main thread calls it."""
        if self.why is None:
            self.why = f"was ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"ended with status {os.WEXITSTATUS(status)}"
        self.ended = True
        os.close(self._death)

    def wait(self, timeout):
        """Waits for the end of the process; False if it did not end in time."""
        p = select.poll()
        p.register(self.death, select.POLLIN)
        return self.ended or bool(p.poll(timeout * 1000))

    def interrupt(self, group):
        """Interrupts the kernel, and with group also the processes it started."""
        if self.language != "python":
            self.tell({"op": "interrupt"})
        # R and bash are told by their parents, see jupyter.py and shell.py.
        if self.language == "python" or group and self.language not in ("r", "bash"):
            self.signal(signal.SIGINT, group)

    def tell(self, command):
        """Sends a short command that has no answer; it may run a cell meanwhile."""
        try:
            os.write(self.commands, json.dumps(command).encode() + b"\n")  # less than PIPE_BUF: whole or not at all
        except OSError:
            pass

    def signal(self, number, group=False):
        if self.pid and not self.ended:
            try:
                (os.killpg if group else os.kill)(self.pid, number)
            except ProcessLookupError:
                pass

    def kill(self, why):
        if self.why is None:
            self.why = why
        self.signal(signal.SIGKILL, True)

    def close(self):
        """Frees our ends. The process has been killed or has ended; nobody reads."""
        for fd in (*self.fds, self.death):
            os.close(fd)
        self.fds = []

    def send(self, command):
        """Sends a command; False if the kernel is gone or does not take it."""
        b = json.dumps(command).encode() + b"\n"
        p = select.poll()
        p.register(self.commands, select.POLLOUT)
        p.register(self.death, select.POLLIN)
        view = memoryview(b)
        while view:
            try:
                view = view[os.write(self.commands, view) :]
                continue
            except BlockingIOError:
                pass
            except OSError:  # it has closed its end
                self.wait(1)
                return False
            ready = p.poll(ANSWER * 1000)
            if not ready:
                self.kill(f"did not answer for {ANSWER} s")
                self.wait(ANSWER)
                return False
            if any(fd == self.death for fd, _ in ready):
                return False
        return True

    def output(self, fd):
        """Returns what has been written to fd since, and whether there may be more."""
        try:
            b = os.read(fd, 1 << 16)
        except BlockingIOError:
            return "", False
        if not b:
            self.shut.add(fd)
        return self.decoders[fd][1].decode(b), bool(b)

    def outputs(self, fd):
        """Yields what has been written to fd, as much as a pipe can hold: a program that never stops must not keep us."""
        more, size = True, 0
        while more and fd not in self.shut and size <= MAX_PIPE:
            text, more = self.output(fd)
            size += len(text)
            yield text

    def read_events(self):
        """Returns the events that have arrived whole, and whether the pipe is open."""
        try:
            b = os.read(self.events, 1 << 20)
        except BlockingIOError:
            return [], True
        if not b:
            self.shut.add(self.events)
            return [], False
        if b"\n" not in b:
            self.have += b
            if len(self.have) > MAX_EVENT:
                self.kill("sent an event that is too large")
            return [], True
        *whole, self.have = (self.have + b).split(b"\n")
        events = []
        for line in whole:
            # Code in the kernel can write anything to its own pipe.
            try:
                e = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(e, dict):
                events.append(e)
        return events, True

    def discard(self):
        """Reads what nobody listens to; the caller holds lock."""
        for fd in self.fds[1:]:  # none if it was closed
            for _ in range(64):
                try:
                    if not os.read(fd, 1 << 16):
                        self.shut.add(fd)
                        break
                except OSError:
                    break
        self.have = b""
        for _, d in self.decoders.values():
            d.reset()

    def await_event(self, kind, timeout):
        """Waits for one event of a kernel that runs no cell; False if it did not come."""
        until = time.monotonic() + timeout
        p = select.poll()
        for fd in {self.events, self.out, self.err, self.death} - self.shut:
            p.register(fd, select.POLLIN)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return False
            for fd, _ in p.poll(left * 1000):
                if fd == self.events:
                    events, open_ = self.read_events()
                    if any(e.get("t") == kind for e in events):
                        return True
                    if not open_:
                        p.unregister(fd)
                elif fd == self.death:
                    return False
                else:
                    self.output(fd)
                    if fd in self.shut:
                        p.unregister(fd)

    def freshen(self, everything):
        """Makes its random state its own; the caller holds lock."""
        if self.send({"op": "reseed", "all": everything}) and not self.await_event("done", ANSWER) and not self.ended:
            self.kill(f"did not answer for {ANSWER} s")
            self.wait(ANSWER)


class Turns:
    """A lock that is taken in the order of arrival."""

    def __init__(self):
        self.lock = threading.Lock()
        self.queue = []

    def join(self):
        turn = threading.Event()
        with self.lock:
            self.queue.append(turn)
            if len(self.queue) == 1:
                turn.set()
        return turn

    def leave(self, turn):
        with self.lock:
            self.queue.remove(turn)
            if self.queue:
                self.queue[0].set()


class Context:
    def __init__(self, house, language, cwd):
        self.id, self.language, self.cwd = random_id(), language, cwd
        self.house = house
        self.kernel = None
        self.lost = None  # why the state is lost, until somebody was told
        self.turns = Turns()
        self.closed = False
        self.starting = threading.RLock()

    def json(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    def rename(self):
        self.id = random_id()
        return self.id

    def ready(self):
        """Returns a living kernel that is this sandbox's own, a new one if need be."""
        with self.starting:
            if self.closed:
                raise BadRequest(404, f"context {self.id} was removed")
            k = self.kernel
            if k is not None and not k.ended and k.identity != self.house.identity and not k.used:
                k.told = True
                k.kill("was of another sandbox")
            if k is None or k.ended or k.why is not None:
                if k is not None:
                    k.wait(ANSWER)
                    if not k.told:
                        k.told, self.lost = True, k.why
                    with k.lock:
                        k.close()
                    self.kernel = None
                # A directory that is gone must not make the context unusable.
                cwd = self.cwd if os.path.isdir(self.cwd) else "/"
                k = Kernel(self.house, self.language, cwd)
                self.house.spawn(k)
                with k.lock:
                    if not k.await_event("ready", START_TIMEOUT):
                        k.kill("did not start")
                        k.wait(ANSWER)
                        k.close()
                        raise RuntimeError(f"kernel {k.why}")
                self.kernel = k
                self.house.watch(self, k)
            return k

    def drop(self):
        """Ends a process that has run nothing and that the sandbox may do without."""
        with self.starting:
            k = self.kernel
            if k is not None and not k.used and not self.turns.queue:
                k.told = True
                k.kill("was of another sandbox")

    def settle(self, k):
        """Gives a kernel that is a copy random state of its own; the caller holds its lock."""
        now = self.house.identity
        if k.identity != now:
            k.freshen(k.identity[1] != now[1])
            k.identity = now

    def restart(self):
        k = self.kernel
        if k is not None:
            k.told = True  # who asked for it knows
            k.kill("was restarted on request")
            k.wait(ANSWER)
        self.ready()

    def close(self):
        self.closed = True
        with self.starting:
            k = self.kernel
            if k is not None:
                k.kill("was removed")
                k.wait(ANSWER)
                self.house.forget(k)
                with k.lock:
                    k.close()
                self.kernel = None

    def execute(self, code, envs, client):
        """Runs code and sends its events to the client; returns when the context is free again."""
        k = self.ready()
        if self.lost is not None:
            client.emit({"type": "stderr", "text": f"postern: the process of this context {self.lost}; it was started again and earlier state is lost\n", "timestamp": time.time_ns()})
            self.lost = None
        with k.lock:
            self.settle(k)
            k.discard()
            k.used = True
            if not k.ended and k.send({"op": "run", "code": code, "base": read_envs(), "call": envs}):
                try:
                    self.stream(k, client)
                except Gone:
                    self.abandon(k)
            died = k.ended or k.why is not None
        if died and not client.gone():
            k.wait(ANSWER)
            k.told, self.lost = True, None
            client.emit({"type": "error", "name": "KernelDied",
                         "value": f"the process of this context {k.why}; it is started again and earlier state is lost",
                         "traceback": ""})  # fmt: skip

    def stream(self, k, client):
        """Sends what the kernel says until it is done or has ended."""
        p = select.poll()
        for fd in {k.events, k.out, k.err, k.death} - k.shut:
            p.register(fd, select.POLLIN)
        client.watch(p)
        heard = asked = time.monotonic()
        answered = counted = False
        said = Said(client)
        while True:
            now = time.monotonic()
            left = max(heard, said.at) + KEEPALIVE - now
            if not answered:
                left = min(left, asked + ANSWER - now)
            if said.text:
                left = min(left, said.due() - now)
            ready = dict(p.poll(max(0, left) * 1000))
            if client.socket.fileno() in ready and client.gone():
                raise Gone
            # Before the events are read: what was printed before an event comes
            # before it, and what is printed after it is written only when the
            # event has been read, see kernel.py. Only the first one, the cell's
            # number, comes before all output.
            if counted or k.death in ready:
                for fd in (k.out, k.err):
                    if fd in ready or k.events in ready or k.death in ready:
                        self.gather(k, fd, said)
                    if fd in ready and fd in k.shut:
                        p.unregister(fd)  # or it would wake us for ever
            if k.events in ready:
                events, open_ = k.read_events()
                if not open_:
                    p.unregister(k.events)
                for e in events:
                    answered = True
                    if not counted and e.get("t") != "busy":
                        counted = True
                        if e.get("t") == "count":
                            client.emit(to_event(e))
                            e = {}
                        for fd in (k.out, k.err):
                            self.gather(k, fd, said)
                    if e.get("t") == "done":
                        for fd in (k.out, k.err):
                            said.add(k.decoders[fd][0], k.decoders[fd][1].decode(b"", True))
                        said.tell()
                        return
                    if (event := to_event(e)) is not None:
                        said.tell()
                        client.emit(event)
                        heard = time.monotonic()
            elif k.death in ready:
                said.tell()
                return
            now = time.monotonic()
            if said.text and now >= said.due():
                said.tell(lines=True)
            if not answered and now - asked >= ANSWER:
                k.kill(f"did not answer for {ANSWER} s")
                k.wait(ANSWER)
                return
            if now - max(heard, said.at) >= KEEPALIVE:
                client.emit({"type": "keepalive"})
                heard = now

    @staticmethod
    def gather(k, fd, said):
        for text in k.outputs(fd):
            said.add(k.decoders[fd][0], text)

    def abandon(self, k):
        """Interrupts an execution whose client has gone, until it has ended."""
        for i in range(INTERRUPTS):
            # First the kernel alone: servers that the user started from
            # earlier cells share its process group and should live. A
            # system(3) ignores the signal while its child runs, hence the
            # group afterwards.
            k.interrupt(group=i > 1)
            if k.await_event("done", 1) or k.ended:
                return
        k.kill(f"did not react to interrupts for {INTERRUPTS} s after its client had gone")
        k.wait(ANSWER)


class Said:
    """Output that has been read and not yet sent: of one stream, since the order of the two is kept."""

    def __init__(self, client):
        self.client = client
        self.kind = self.text = ""
        self.since = 0  # when its first part was read
        self.at = 0  # when some was sent last

    def add(self, kind, text):
        if not text:
            return
        if kind != self.kind:
            self.tell()
        if not self.text:
            self.since = time.monotonic()
        self.kind = kind
        self.text += text
        if len(self.text) >= MAX_TEXT:
            self.tell(lines=True)

    def due(self):
        """When it has waited long enough."""
        return self.since + (LINES_WAIT if "\n" in self.text else REST_WAIT)

    def tell(self, lines=False):
        """Sends it, but for the beginning of a line if lines is set and a whole line is there."""
        n = len(self.text)
        if lines and "\n" in self.text:
            n = self.text.rindex("\n") + 1
        now, self.text = self.text[:n], self.text[n:]
        if now:
            self.since = self.at = time.monotonic()
            self.client.emit({"type": self.kind, "text": now, "timestamp": time.time_ns()})


def to_event(e):
    """Returns the protocol's event for one of a kernel's, or None."""
    kind = e.get("t")
    if kind == "count":
        return {"type": "number_of_executions", "execution_count": e.get("n")}
    if kind == "error":
        return {"type": "error", "name": e.get("name", ""), "value": e.get("value", ""), "traceback": e.get("traceback", "")}
    if kind == "result" and isinstance(e.get("data"), dict):
        event, extra = {"type": "result", "is_main_result": bool(e.get("main"))}, {}
        for mime, v in e["data"].items():
            if v is None:
                continue
            if mime == "text/plain" and isinstance(v, str) and len(v) > 1 and v[0] == v[-1] and v[0] in "'\"":
                v = v[1:-1]
            if mime in MIMES:
                event[MIMES[mime]] = v
            else:
                extra[mime] = v
        if extra:
            event["extra"] = extra
        return event
    return None


def finite(v):
    """Returns v with null for the numbers that JSON does not have."""
    if isinstance(v, float):
        return v if v - v == 0 else None
    if isinstance(v, dict):
        return {str(k): finite(x) for k, x in v.items()}
    if isinstance(v, (list, tuple)):
        return [finite(x) for x in v]
    return v


def encode(event):
    # ASCII only: the official JavaScript client decodes each network chunk by
    # itself and would break a character that lies across two.
    try:
        return json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (ValueError, TypeError):
        return json.dumps(finite(event), default=str, separators=(",", ":")).encode() + b"\n"


class House:
    """All contexts, and the main thread's work."""

    def __init__(self):
        self.lock = threading.RLock()
        self.contexts = {}
        self.defaults = {}  # language → context of executions that name none
        self.identity = read_identity()
        self.orders = []  # kernels to start, with an event that says it was done
        self.kernels = {}  # pid → (kernel, its context once it is ready)
        self.wake_r, self.wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.connections = 0
        self.warm = False
        self.fresh_at = None  # when to replace what a restore has made stale

    # --- for the threads of connections

    def wake(self):
        try:
            os.write(self.wake_w, b"w")
        except BlockingIOError:
            pass

    def spawn(self, kernel):
        """Has the main thread start a kernel's process."""
        done = threading.Event()
        order = [kernel, done, None]
        with self.lock:
            self.orders.append(order)
        self.wake()
        done.wait()
        if order[2] is not None:
            raise order[2]

    def watch(self, context, kernel):
        """Has the main thread look after a kernel that is ready."""
        with self.lock:
            if kernel.pid in self.kernels:
                self.kernels[kernel.pid] = (kernel, context)
        if kernel.ended:
            self.died(kernel, context)
        self.wake()

    def forget(self, kernel):
        with self.lock:
            self.kernels.pop(kernel.pid, None)

    def check(self):
        """Notices that this sandbox has become a copy; called before any code runs."""
        now = read_identity()
        with self.lock:
            if now == self.identity:
                return
            other = now[1] != self.identity[1]
            self.identity = now
            for kernel, _ in self.kernels.values():
                # A cell that was running while the sandbox was saved goes on
                # running; the others are told again before they run anything.
                if kernel.used and kernel.lock.locked():
                    if kernel.language == "python":
                        kernel.signal(signal.SIGRTMIN + (5 if other else 6))
                    else:
                        kernel.tell({"op": "reseed", "all": other, "silent": True})
            if not other:
                return
            for d in self.defaults.values():
                if d.id in self.contexts and (d.kernel is None or not d.kernel.used) and not d.turns.queue:
                    # Nobody has been told its id but the sandbox that was saved.
                    self.contexts = {(k if c is not d else d.rename()): c for k, c in self.contexts.items()}

    def default_context(self, language="python"):
        """Returns the context of a language for executions that name none. It may have no process yet."""
        with self.lock:
            c = self.defaults.get(language)
            if c is None or c.id not in self.contexts:
                c = self.defaults[language] = self.add(language, HOME if os.path.isdir(HOME) else os.getcwd())
            return c

    def add(self, language, cwd):
        with self.lock:
            if len(self.contexts) >= MAX_CONTEXTS:
                raise BadRequest(429, f"there are {MAX_CONTEXTS} contexts already; remove one first")
            c = Context(self, language, cwd)
            self.contexts[c.id] = c
            return c

    def create(self, language, cwd):
        c = self.add(language, cwd)
        try:
            c.ready()
        except BaseException:
            self.contexts.pop(c.id, None)
            raise
        return c

    def get(self, cid):
        c = self.contexts.get(cid)
        if c is None:
            raise BadRequest(404, f"context {cid[:64]} not found")
        return c

    def remove(self, cid):
        with self.lock:
            c = self.get(cid)
            del self.contexts[cid]
        c.close()

    def warm_up(self):
        try:
            languages = available()
            for language in FIRST:
                if language in languages:
                    self.default_context(language)
            self.default_context().ready()
            self.warm = True
        except Exception as e:  # noqa: BLE001 - the next request tries again
            log(f"start kernel: {e}")

    def died(self, kernel, context):
        if context is None or context.closed or context.kernel is not kernel:
            return
        if kernel.why != "was of another sandbox":
            log(f"context {context.id}: kernel {kernel.why}")
        # At once, so that the next execution need not wait for it. If it does
        # not start there is no loop: the next execution tries again. The other
        # languages cost more, and may not be used again.
        if context.language == "python":
            later(context.ready)

    # --- the main thread

    def reap(self):
        with self.lock:
            pids = list(self.kernels)
        for pid in pids:
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done, status = pid, 0
            if done == pid:
                with self.lock:
                    kernel, context = self.kernels.pop(pid)
                kernel.end(status)
                self.died(kernel, context)

    def start_ordered(self):
        with self.lock:
            orders, self.orders = self.orders, []
        for order in orders:
            try:
                order[0].spawn()
                with self.lock:
                    self.kernels[order[0].pid] = (order[0], None)
            except Exception as e:  # noqa: BLE001 - for who ordered it
                order[2] = e
            order[1].set()

    def refresh(self):
        """Replaces what a restore has made stale before somebody waits for it."""
        self.fresh_at = None
        with self.lock:
            contexts = list(self.contexts.values())
        for c in contexts:
            k = c.kernel
            if k is not None and not k.used and k.identity != self.identity:
                later(c.ready if c.language == "python" else c.drop)

    def run(self, listener, notices):
        me = select.poll()
        base = {listener.fileno(), self.wake_r}
        if notices is not None:
            base.add(notices)
        registered = set()
        fresh_for = self.identity  # what the processes were last refreshed for
        while True:
            with self.lock:
                idle = {fd: k for k, c in self.kernels.values() if c is not None and not k.lock.locked() and not k.ended for fd in k.fds[1:] if fd not in k.shut}
            want = base | idle.keys()
            for fd in registered - want:
                me.unregister(fd)
            for fd in want - registered:
                me.register(fd, select.POLLIN)
            registered = want
            timeout = None if self.fresh_at is None else max(0, self.fresh_at - time.monotonic()) * 1000
            for fd, _ in me.poll(timeout):
                if fd == listener.fileno():
                    self.accept(listener)
                elif fd == self.wake_r:
                    if self.woken():
                        return
                elif fd == notices:
                    os.read(fd, 4096)
                    self.check()
                    # An execution may have noticed it first: then check changes nothing.
                    if self.identity != fresh_for:
                        fresh_for = self.identity
                        self.fresh_at = time.monotonic() + CALM
                elif fd in idle and idle[fd].lock.acquire(blocking=False):
                    k = idle[fd]
                    try:
                        k.discard()
                    finally:
                        k.lock.release()
                    if fd in k.shut and fd == k.events:
                        # It has ended, as we shall hear in a moment, or is mad.
                        later(lambda k=k: k.wait(1) or k.kill("closed the pipe that it answers on"))
            if self.fresh_at is not None and time.monotonic() >= self.fresh_at:
                self.refresh()

    def woken(self):
        """Does what the main thread was woken for; True to end."""
        try:
            what = os.read(self.wake_r, 4096)
        except BlockingIOError:
            what = b""
        if signal.SIGTERM in what or signal.SIGINT in what:
            return True
        self.start_ordered()
        self.reap()
        return False

    def accept(self, listener):
        try:
            s, _ = listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)
            return
        if self.connections >= MAX_CONNECTIONS:
            s.close()
            return
        with self.lock:
            self.connections += 1
        try:
            _thread.start_new_thread(Client(self, s).serve, ())
        except RuntimeError:  # no more threads
            s.close()
            self.hang_up()

    def hang_up(self):
        with self.lock:
            self.connections -= 1


def later(f):
    """Runs f in a thread of its own without anybody waiting for it."""

    def run():
        try:
            f()
        except Exception as e:  # noqa: BLE001 - nobody else hears of it
            log(f"background: {e}")

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError as e:
        log(f"background: {e}")


class Client:
    """One connection."""

    def __init__(self, house, s):
        self.house, self.socket = house, s
        self.have = b""
        self.streaming = False
        self.left = False

    # --- bytes

    def fill(self, timeout):
        self.socket.settimeout(timeout)
        b = self.socket.recv(1 << 16)
        if not b:
            raise Gone
        self.have += b

    def line(self, deadline):
        while b"\n" not in self.have:
            if len(self.have) > MAX_HEAD:
                raise BadRequest(400, "a line is too long")
            self.fill(self.until(deadline))
        line, _, self.have = self.have.partition(b"\n")
        return line.rstrip(b"\r")

    @staticmethod
    def until(deadline):
        left = deadline - time.monotonic()
        if left <= 0:
            raise BadRequest(400, "the request took too long")
        return left

    def exactly(self, n, deadline):
        if len(self.have) < n:
            parts, have = [self.have], len(self.have)
            self.have = b""
            while have < n:
                self.socket.settimeout(self.until(deadline))
                b = self.socket.recv(min(1 << 20, n - have))
                if not b:
                    raise Gone
                parts.append(b)
                have += len(b)
            return b"".join(parts)
        out, self.have = self.have[:n], self.have[n:]
        return out

    def write(self, b):
        """Writes while the client reads; raises Gone when it has gone."""
        s = self.socket
        s.setblocking(False)
        view = memoryview(b)
        p = None
        while view:
            try:
                view = view[s.send(view) :]
                continue
            except BlockingIOError:
                pass
            except OSError:
                self.left = True
                raise Gone from None
            if p is None:
                p = select.poll()
                p.register(s, select.POLLOUT | select.POLLRDHUP)
            for _, what in p.poll():
                if what & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) and self.gone():
                    raise Gone

    def watch(self, p):
        """Makes a poll wake up when the client goes."""
        p.register(self.socket, select.POLLRDHUP)

    def gone(self):
        if not self.left:
            p = select.poll()
            p.register(self.socket, select.POLLRDHUP)
            self.left = any(what & (select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, what in p.poll(0))
        return self.left

    # --- requests

    def serve(self):
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self.request():
                pass
        except (Gone, OSError):
            pass
        except Exception as e:  # noqa: BLE001 - one connection must not end the others
            log(f"serve: {e!r}")
        finally:
            self.socket.close()
            self.house.hang_up()

    def request(self):
        """Serves one request; False if it was the connection's last."""
        if not self.have:
            self.fill(IDLE_TIMEOUT)
        deadline = time.monotonic() + BODY_TIMEOUT
        self.streaming, keep = False, False
        method = path = ""
        try:
            try:
                first = self.line(deadline).decode("latin-1").split(" ")
                if len(first) != 3 or not first[2].startswith("HTTP/1."):
                    raise BadRequest(400, "not an HTTP request")
                method, path = first[0], first[1].partition("?")[0]
                head, size = {}, 0
                while line := self.line(deadline):
                    size += len(line)
                    if size > MAX_HEAD:
                        raise BadRequest(400, "the head is too large")
                    k, sep, v = line.decode("latin-1").partition(":")
                    if not sep:
                        raise BadRequest(400, "a header field has no colon")
                    head[k.strip().lower()] = v.strip()
                # Only when the body has been read is the next request found.
                body = self.body(head, deadline)
                keep = first[2] != "HTTP/1.0" and "close" not in head.get("connection", "").lower()
                self.route(method, path, body)
            except (BadRequest, Gone):
                raise
            except TimeoutError:
                raise Gone from None
            except OSError as e:
                if self.gone():
                    raise Gone from None
                raise BadRequest(500, f"{type(e).__name__}: {e}") from e
            except Exception as e:  # noqa: BLE001 - the answer must be whole, whatever happened
                log(f"{method} {path}: {e!r}")
                raise BadRequest(500, f"{type(e).__name__}: {e}") from e
        except BadRequest as e:
            if self.streaming:  # too late for a status
                return False
            self.answer(e.status, str(e)[:400].encode(), "text/plain; charset=utf-8", close=not keep)
        return keep

    def body(self, head, deadline):
        if "chunked" in head.get("transfer-encoding", "").lower():
            parts, size = [], 0
            while True:
                try:
                    n = int(self.line(deadline).partition(b";")[0], 16)
                except ValueError:
                    raise BadRequest(400, "a chunk has no size") from None
                size += n
                if n < 0 or size > MAX_BODY:
                    raise BadRequest(400, f"body is over {MAX_BODY >> 20} MiB")
                if n == 0:
                    while self.line(deadline):
                        pass
                    return b"".join(parts)
                parts.append(self.exactly(n, deadline))
                self.line(deadline)
        length = head.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise BadRequest(400, "Content-Length is not a number")
        if int(length) > MAX_BODY:
            raise BadRequest(400, f"body is over {MAX_BODY >> 20} MiB")
        if head.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self.exactly(int(length), deadline)

    def answer(self, status, body, kind, close=False):
        head = f"HTTP/1.1 {status} {STATUS[status]}\r\n"
        if status != 204:
            head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        if close:
            head += "Connection: close\r\n"
        self.write(head.encode("latin-1") + b"\r\n" + (body if status != 204 else b""))

    def json(self, v):
        self.answer(200, json.dumps(v).encode(), "application/json")

    def route(self, method, path, body):
        parts = path.strip("/").split("/")
        routes = {
            ("health",): {"GET": self.health},
            ("execute",): {"POST": self.execute},
            ("contexts",): {"GET": self.list_contexts, "POST": self.create_context},
        }
        handlers = routes.get(tuple(parts))
        if handlers is None and parts[0] == "contexts" and len(parts) == 2:
            handlers = {"DELETE": lambda _: self.remove_context(parts[1])}
        elif handlers is None and parts[0] == "contexts" and len(parts) == 3 and parts[2] == "restart":
            handlers = {"POST": lambda _: self.restart_context(parts[1])}
        if handlers is None:
            raise BadRequest(404, "not found")
        if method not in handlers:
            raise BadRequest(405, "Method Not Allowed")
        self.house.check()
        handlers[method](body)

    @staticmethod
    def object(body):
        """Returns the request's JSON object; an empty body is an empty object."""
        if not body:
            return {}
        try:
            v = json.loads(body)
        except (ValueError, RecursionError) as e:
            raise BadRequest(400, f"body is not JSON: {e}") from e
        if not isinstance(v, dict):
            raise BadRequest(400, "body must be a JSON object")
        return v

    def health(self, _):
        # Warm means warm: a snapshot may be taken once this says OK.
        if not self.house.warm:
            raise BadRequest(503, "starting")
        self.house.default_context().ready()
        self.answer(200, b"OK", "text/plain; charset=utf-8")

    def execute(self, body):
        body = self.object(body)
        code, cid = body.get("code"), body.get("context_id")
        if not isinstance(code, str):
            raise BadRequest(400, "code must be a string")
        if cid is not None and not isinstance(cid, str):
            raise BadRequest(400, "context_id must be a string")
        if cid and body.get("language"):
            raise BadRequest(400, "give context_id or language, not both")
        try:
            envs = strings(body.get("env_vars"))
        except ValueError as e:
            raise BadRequest(400, f"env_vars: {e}") from e
        language, refused = language_of(body.get("language"))
        context = None
        if not refused:
            context = self.house.get(cid) if cid else self.house.default_context(language)
            if len(context.turns.queue) > MAX_WAITING:
                raise BadRequest(429, f"{MAX_WAITING} executions wait in this context already")
            context.ready()
        self.streaming = True
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nCache-Control: no-store\r\nTransfer-Encoding: chunked\r\n\r\n")
        if context is None:
            # As an event and not as a status: the official clients show a
            # status without its text.
            self.emit({"type": "error", "name": "UnsupportedLanguage", "value": refused, "traceback": ""})
        else:
            self.in_turn(context, code, envs)
        self.emit({"type": "end_of_execution"})
        self.write(b"0\r\n\r\n")

    def in_turn(self, context, code, envs):
        turn = context.turns.join()
        try:
            heard = time.monotonic()
            while not turn.wait(0.2):
                if self.gone():
                    raise Gone
                if time.monotonic() - heard >= KEEPALIVE:
                    self.emit({"type": "keepalive"})
                    heard = time.monotonic()
            if self.gone():
                raise Gone
            context.execute(code, envs, self)
        except Gone:
            raise
        except Exception as e:  # noqa: BLE001 - the stream must end well, whatever happened
            log(f"execute: {e!r}")
            self.emit({"type": "error", "name": type(e).__name__, "value": str(e), "traceback": ""})
        finally:
            context.turns.leave(turn)
            self.house.wake()  # the kernel is idle: its pipes are the main thread's again

    def emit(self, event):
        b = encode(event)
        self.write(b"%x\r\n" % len(b) + b + b"\r\n")

    def list_contexts(self, _):
        with self.house.lock:
            self.json([c.json() for c in self.house.contexts.values()])

    def create_context(self, body):
        body = self.object(body)
        language, refused = language_of(body.get("language"))
        if refused:
            raise BadRequest(400, refused)
        cwd = body.get("cwd") or HOME
        if not isinstance(cwd, str) or "\0" in cwd or not cwd.startswith("/"):
            raise BadRequest(400, "cwd must be an absolute path")
        if not os.path.isdir(cwd):
            raise BadRequest(400, f"cwd {cwd[:256]!r} is not a directory")
        # E2B's kernels run as root. To start elsewhere would let relative paths
        # of the caller's code mean other files than it thinks.
        if not os.access(cwd, os.X_OK):
            raise BadRequest(400, f"cwd {cwd[:256]!r} is closed to the user that contexts run as")
        self.json(self.house.create(language, cwd).json())

    def remove_context(self, cid):
        self.house.remove(cid)
        self.answer(204, b"", "")

    def restart_context(self, cid):
        self.house.get(cid).restart()
        self.answer(204, b"", "")


def language_of(v):
    """Returns the language that v names, and why there can be no context of it, if so."""
    if v is not None and not isinstance(v, str):
        raise BadRequest(400, "language must be a string")
    name = (v or "python").strip().lower()
    name = ALIASES.get(name, name)
    if name not in LANGUAGES:
        return name, f"language {name[:64]!r} is not known; this template has: {', '.join(available())}"
    if not all(map(has, LANGUAGES[name][0])):
        return name, f"language {name!r} is not in this template, but in {FULL}; this one has: {', '.join(available())}"
    return name, None


def notices_of(directory):
    """Returns a descriptor that is readable when files of a directory are replaced."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0 or libc.inotify_add_watch(fd, directory.encode(), 0x80 | 0x8) < 0:  # IN_MOVED_TO, IN_CLOSE_WRITE
        log(f"watch {directory}: {os.strerror(ctypes.get_errno())}")
        return None
    return fd


def main():
    listen = "0.0.0.0:49999"
    if len(sys.argv) == 3 and sys.argv[1] == "--listen":
        listen = sys.argv[2]
    elif len(sys.argv) != 1:
        sys.exit("usage: interpreter [--listen ADDRESS:PORT]")
    address, _, port = listen.rpartition(":")
    # Threads that answer short requests need no more.
    threading.stack_size(256 << 10)
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.pop(name, None)  # for this program alone
    house = House()
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(s, lambda *a: None)
    signal.set_wakeup_fd(house.wake_w, warn_on_full_buffer=False)
    listener = socket.create_server((address, int(port)), backlog=128)
    listener.setblocking(False)
    log(f"listening on {address}:{listener.getsockname()[1]}")
    notices = notices_of(os.path.dirname(GENERATION))
    later(house.warm_up)
    house.run(listener, notices)
    for kernel, _ in house.kernels.values():
        kernel.kill("ended with the interpreter")
    os._exit(0)
