"""The code interpreter of a sandbox: runs cells of code and keeps their state.

It serves E2B's code interpreter protocol on port 49999 and runs inside the
sandbox, as the sandbox's user, next to the code it runs. So it protects
nothing: who may speak to it is decided outside, and all that it is told or
asked may be hostile without harm to anybody but this sandbox. It must not hold
a secret, and it must not die of a bad request: the agent would lose its state.

A context is one kernel process (ipykernel) with a working directory:

    starting ── ready ── gone      gone: exited, killed or restarted; the next
        └──────────────────┘             execution starts a new process and says
                                         that the old state is lost

Executions in one context run one after the other, in the order of arrival.
An execution whose client has gone is interrupted, so that a forgotten loop
does not block the context for ever.
"""

import argparse
import asyncio
import collections
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid

import tornado.httpserver
import tornado.web
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.connect import write_connection_file

LANGUAGES = {"python": "python", "python3": "python", "py": "python"}
SUPPORTED = "python"
HOME = "/home/user"

# The guest writes the sandbox's variables here when it is told who it is, which
# is after this server was started (or restored from a snapshot).
ENVS_FILE = "/run/postern/envs.json"

MAX_BODY = 64 << 20  # bytes of a request
MAX_ENVS = 1 << 20  # bytes of ENVS_FILE
MAX_CONTEXTS = 64
MAX_WAITING = 64  # executions that wait in one context
START_TIMEOUT = 60  # seconds until a new kernel must answer
KEEPALIVE = 5  # seconds of silence after which the client is told that we live
ANSWER = 30  # seconds in which an idle kernel must react at all
DRAIN = 2  # seconds to wait for output after the kernel said it is done
INTERRUPTS = 30  # seconds of interrupts before an abandoned execution's kernel is killed

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

# Starts a kernel without the debugger that ipykernel loads otherwise: it costs
# a third of the start and nobody can reach it. User code may import it later.
LAUNCH = """
import sys
sys.modules["debugpy"] = None
from ipykernel import kernelapp
del sys.modules["debugpy"]
kernelapp.launch_new_instance()
"""

# Runs once in every new kernel, unseen by the user. It lives in a module of its
# own, so that user code that rebinds "os" or "json" does not break it, and it
# imports nothing heavy: pandas is looked up only once the user has imported it.
SETUP = r'''
def _postern():
    import sys, types
    m = types.ModuleType("_postern")
    exec("""
import json, os
from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode

base = {}    # what the sandbox set for every execution
saved = None # name -> value before this execution, None: was not set

def enter(text):
    # Sets the sandbox's variables and those of one execution.
    global base, saved
    leave()
    want = json.loads(text)
    for k in base:
        if k not in want["base"]:
            os.environ.pop(k, None)
    base = want["base"]
    os.environ.update(base)
    saved = {k: os.environ.get(k) for k in want["call"]}
    os.environ.update(want["call"])

def leave():
    global saved
    for k, v in (saved or {}).items():
        if v is None:
            os.environ.pop(k, None)
        else:
            os.environ[k] = v
    saved = None

class Data(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict

def frame(df):
    # A table that is meant for a program, not for a chart of a million points.
    try:
        if df.size > 100_000:
            return None
        d = json.loads(df.to_json(orient="split", date_format="iso"))
        return {str(c): [row[i] for row in d["data"]] for i, c in enumerate(d["columns"])}
    except Exception:
        return None
""", m.__dict__)
    sys.modules["_postern"] = m
    f = get_ipython().display_formatter
    data = m.Data(parent=f)
    data.for_type_by_name("pandas.core.frame", "DataFrame", m.frame)
    f.formatters["e2b/data"] = data
_postern()
del _postern
'''

log = logging.getLogger("interpreter")


class BadRequest(Exception):
    """A request that cannot be served; the text is for the caller."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def read_envs():
    """Returns the variables that the sandbox was created with."""
    try:
        with open(ENVS_FILE, "rb") as f:
            return strings(json.loads(f.read(MAX_ENVS)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        log.warning("read %s: %s", ENVS_FILE, e)
        return {}


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


class Run:
    """One request that a kernel works on."""

    def __init__(self):
        # Bounded: a client that reads slowly slows the reader down, and in
        # the end the kernel's publisher drops output; memory does not grow.
        self.messages = asyncio.Queue(maxsize=256)
        self.reply = asyncio.get_running_loop().create_future()


class Kernel:
    """One kernel process and our connection to it."""

    def __init__(self):
        self.runs = {}
        self.why = None  # why the process ended, once it has
        self.told = False  # whether a client knows that it ended
        self.dead = asyncio.Event()
        self.tasks = []
        self.client = None
        self.proc = None
        # Unix sockets: nothing to scan for from the network, no port to
        # collide with the user's servers. A directory for each kernel, since
        # user code may clean /tmp.
        self.dir = tempfile.mkdtemp(prefix="postern-kernel-")

    @classmethod
    async def start(cls, cwd):
        k = cls()
        try:
            await asyncio.wait_for(k._start(cwd), START_TIMEOUT)
        except BaseException:
            k.kill("did not start")
            await k.close()
            raise
        return k

    async def _start(self, cwd):
        conn = os.path.join(self.dir, "connection.json")
        write_connection_file(conn, transport="ipc", ip=os.path.join(self.dir, "s"), key=uuid.uuid4().hex.encode())
        env = dict(os.environ, HOME=os.environ.get("HOME", HOME), PYTHONUNBUFFERED="1")
        # What "pip install" puts there, as in a login shell.
        local = os.path.join(env["HOME"], ".local/bin")
        if local not in env.get("PATH", "").split(":"):
            env["PATH"] = local + ":" + env.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        env.update(read_envs())
        self.proc = await asyncio.create_subprocess_exec(
            # If we die, the kernel must not stay: nobody could reach it again.
            "/usr/bin/setpriv", "--pdeathsig", "KILL",
            # -P: a file named json.py in the working directory must not
            # keep the kernel from starting. IPython adds the directory later.
            sys.executable, "-P", "-c", LAUNCH, "-f", conn, "--Application.log_level=50",
            "--HistoryManager.enabled=False", "--InteractiveShell.colors=NoColor",
            cwd=cwd, env=env, start_new_session=True, stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.tasks.append(asyncio.create_task(self._reap()))
        self.client = AsyncKernelClient(connection_file=conn)
        self.client.load_connection_file()
        self.client.allow_stdin = False
        self.client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=False)
        # The subscription to the kernel's output is set up in the background;
        # what is sent before it is there is lost. So ask until it answers.
        while True:
            self._alive()
            self.client.kernel_info()
            try:
                await self.client.get_iopub_msg(timeout=0.2)
                break
            except Exception:  # noqa: BLE001 - queue.Empty of the library
                continue
        self.tasks.append(asyncio.create_task(self._read("iopub")))
        self.tasks.append(asyncio.create_task(self._read("shell")))
        await self.call(SETUP)

    def _alive(self):
        if self.dead.is_set():
            raise RuntimeError("kernel " + self.why)

    async def _reap(self):
        code = await self.proc.wait()
        if self.why is None:
            self.why = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        self.dead.set()

    async def _read(self, name):
        get = self.client.get_iopub_msg if name == "iopub" else self.client.get_shell_msg
        while True:
            try:
                msg = await get()
            except (ValueError, TypeError, KeyError) as e:
                # Code in the kernel can write anything to its own sockets.
                log.warning("read %s: %s", name, e)
                continue
            run = self.runs.get(msg["parent_header"].get("msg_id"))
            if run is None:
                continue
            if name == "iopub":
                await run.messages.put(msg)
            elif not run.reply.done():
                run.reply.set_result(msg)

    def submit(self, code, silent=False):
        """Sends code to the kernel and returns its Run and the id to drop it by."""
        self._alive()
        run = Run()
        mid = self.client.execute(code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False)
        self.runs[mid] = run
        return run, mid

    async def call(self, code):
        """Runs a line of ours and waits for it."""
        run, mid = self.submit(code, silent=True)
        drop = asyncio.create_task(self._discard(run))
        died = asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait({run.reply, died}, timeout=ANSWER, return_when=asyncio.FIRST_COMPLETED)
            if not run.reply.done():
                await self.give_up()
                self._alive()
            reply = run.reply.result()["content"]
            if reply.get("status") != "ok":
                raise RuntimeError(f"prepare kernel: {reply.get('ename')}: {reply.get('evalue')}")
        finally:
            drop.cancel()
            died.cancel()
            self.runs.pop(mid, None)

    async def give_up(self):
        """Ends a kernel that does not answer, as when user code broke its parts."""
        self.kill(f"did not answer for {ANSWER} s")
        await self.dead.wait()

    @staticmethod
    async def _discard(run):
        while True:
            await run.messages.get()

    def interrupt(self, group):
        """Interrupts the kernel, and with group also the processes it started."""
        try:
            (os.killpg if group else os.kill)(self.proc.pid, signal.SIGINT)
        except ProcessLookupError:
            pass

    def kill(self, why):
        if self.why is None:
            self.why = why
        if self.proc is not None and self.proc.returncode is None:
            try:
                os.killpg(self.proc.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    async def close(self):
        """Frees what the kernel held. Its process has been killed or has ended."""
        if self.proc is not None:
            await self.proc.wait()
        for t in self.tasks:
            t.cancel()
        if self.client is not None:
            self.client.stop_channels()
        shutil.rmtree(self.dir, ignore_errors=True)


class Context:
    def __init__(self, cid, language, cwd):
        self.id, self.language, self.cwd = cid, language, cwd
        self.kernel = None
        self.lost = None  # why the state is lost, until somebody was told
        self.waiting = 0
        self.turn = asyncio.Lock()
        self.closed = False
        self._starting = asyncio.Lock()

    def json(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def ready(self):
        """Returns a living kernel, a new one if need be."""
        async with self._starting:
            if self.closed:
                raise BadRequest(404, f"context {self.id} was removed")
            if self.kernel is None or self.kernel.dead.is_set():
                if self.kernel is not None:
                    await self.kernel.close()
                    self.kernel = None
                # A directory that is gone must not make the context unusable.
                cwd = self.cwd if os.path.isdir(self.cwd) else "/"
                self.kernel = await Kernel.start(cwd)
                later(self._watch(self.kernel))
            return self.kernel

    async def _watch(self, kernel):
        await kernel.dead.wait()
        if self.closed:
            return
        log.info("context %s: kernel %s", self.id, kernel.why)
        if not kernel.told:
            self.lost = kernel.why
        # At once, so that the next execution need not wait for it. If it does
        # not start there is no loop: the next execution tries again.
        await self.ready()

    async def restart(self):
        kernel = self.kernel
        if kernel is not None:
            kernel.told = True  # who asked for it knows
            kernel.kill("was restarted on request")
            await kernel.dead.wait()
        await self.ready()

    async def close(self):
        self.closed = True
        async with self._starting:
            if self.kernel is not None:
                self.kernel.kill("was removed")
                await self.kernel.close()

    async def execute(self, code, envs, emit, gone):
        """Runs code and emits its events; returns when the context is free again.

        gone is set when nobody listens any more.
        """
        kernel = await self.ready()
        if self.lost is not None:
            emit({"type": "stderr", "text": f"postern: the process of this context {self.lost}; it was started again and earlier state is lost\n", "timestamp": time.time_ns()})
            self.lost = None
        try:
            base = read_envs()
            if envs or base:
                # Twice dumped: the inner text is a literal in the kernel's code.
                text = json.dumps(json.dumps({"base": base, "call": envs}))
                await kernel.call(f"__import__('_postern').enter({text})")
            run, mid = kernel.submit(code)
            try:
                await self._stream(kernel, run, emit, gone)
            finally:
                kernel.runs.pop(mid, None)
            if envs:
                await kernel.call("__import__('_postern').leave()")
        except RuntimeError:
            if not kernel.dead.is_set():
                raise
        if kernel.dead.is_set() and not gone.is_set():
            kernel.told, self.lost = True, None
            emit({"type": "error", "name": "KernelDied",
                  "value": f"the process of this context {kernel.why}; it is started again and earlier state is lost",
                  "traceback": ""})  # fmt: skip

    async def _stream(self, kernel, run, emit, gone):
        died = asyncio.create_task(kernel.dead.wait())
        left = asyncio.create_task(gone.wait())
        try:
            heard = asked = time.monotonic()
            answered = False
            while True:
                get = asyncio.create_task(run.messages.get())
                # The last wait after the reply is short: if the kernel's "idle"
                # was dropped because we were slow, it will not come.
                quiet = DRAIN if run.reply.done() else max(0.05, heard + KEEPALIVE - time.monotonic())
                await asyncio.wait({get, died, left}, timeout=quiet, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    msg = get.result()
                    answered = True
                    if msg["msg_type"] == "status":
                        if msg["content"].get("execution_state") == "idle":
                            return
                        continue
                    event = to_event(msg)
                    if event is not None:
                        emit(event)
                        await emit.drain(gone)
                        heard = time.monotonic()
                    if not gone.is_set():
                        continue
                get.cancel()
                if kernel.dead.is_set():
                    return
                if gone.is_set():
                    await self._abandon(kernel, run)
                    return
                if run.reply.done() and run.messages.empty():
                    return
                if not answered and time.monotonic() - asked > ANSWER:
                    await kernel.give_up()
                    return
                if time.monotonic() - heard >= KEEPALIVE:
                    emit({"type": "keepalive"})
                    await emit.drain(gone)
                    heard = time.monotonic()
        finally:
            died.cancel()
            left.cancel()

    async def _abandon(self, kernel, run):
        """Interrupts an execution whose client has gone, until it has ended."""
        drop = asyncio.create_task(kernel._discard(run))
        died = asyncio.create_task(kernel.dead.wait())
        try:
            for i in range(INTERRUPTS):
                # First the kernel alone: servers that the user started from
                # earlier cells share its process group and should live. A
                # system(3) ignores the signal while its child runs, hence the
                # group afterwards.
                kernel.interrupt(group=i > 1)
                await asyncio.wait({run.reply, died}, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                if run.reply.done() or kernel.dead.is_set():
                    return
            kernel.kill(f"did not react to interrupts for {INTERRUPTS} s after its client had gone")
            await died
        finally:
            drop.cancel()
            died.cancel()


def to_event(msg):
    """Returns the protocol's event for a message of the kernel, or None."""
    kind, c = msg["msg_type"], msg["content"]
    if kind == "stream":
        return {"type": "stderr" if c.get("name") == "stderr" else "stdout", "text": c.get("text", ""), "timestamp": time.time_ns()}
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": c.get("execution_count")}
    if kind == "error":
        return {"type": "error", "name": c.get("ename", ""), "value": c.get("evalue", ""), "traceback": "\n".join(c.get("traceback", []))}
    if kind in ("execute_result", "display_data"):
        event, extra = {"type": "result", "is_main_result": kind == "execute_result"}, {}
        for mime, v in c.get("data", {}).items():
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
        return json.dumps(event, allow_nan=False, separators=(",", ":")) + "\n"
    except (ValueError, TypeError):
        return json.dumps(finite(event), default=str, separators=(",", ":")) + "\n"


background = set()


def later(coro):
    """Runs coro without anybody waiting for it; the set keeps it from being collected."""
    t = asyncio.create_task(coro)
    background.add(t)

    def done(t):
        background.discard(t)
        if not t.cancelled() and t.exception() is not None:
            log.warning("background: %s", t.exception())

    t.add_done_callback(done)
    return t


class Interpreter:
    """All contexts."""

    def __init__(self):
        self.contexts = collections.OrderedDict()
        self.default = None
        self.first = None  # task that starts the first default context

    async def default_context(self):
        if self.default is None or self.default.id not in self.contexts:
            self.default = self._add("python", HOME if os.path.isdir(HOME) else os.getcwd())
        await self.default.ready()
        return self.default

    def _add(self, language, cwd):
        if len(self.contexts) >= MAX_CONTEXTS:
            raise BadRequest(429, f"there are {MAX_CONTEXTS} contexts already; remove one first")
        c = Context(str(uuid.uuid4()), language, cwd)
        self.contexts[c.id] = c
        return c

    async def create(self, language, cwd):
        c = self._add(language, cwd)
        try:
            await c.ready()
        except BaseException:
            self.contexts.pop(c.id, None)
            raise
        return c

    def get(self, cid):
        c = self.contexts.get(cid)
        if c is None:
            raise BadRequest(404, f"context {cid[:64]} not found")
        return c

    async def remove(self, cid):
        c = self.get(cid)
        del self.contexts[cid]
        await c.close()


def language_of(v):
    """Returns the supported language that v names, or None."""
    if v is not None and not isinstance(v, str):
        raise BadRequest(400, "language must be a string")
    return LANGUAGES.get((v or "python").lower())


class Handler(tornado.web.RequestHandler):
    def initialize(self, interpreter):
        self.interpreter = interpreter
        self.gone = asyncio.Event()

    def on_connection_close(self):
        self.gone.set()

    def body(self):
        """Returns the request's JSON object; an empty body is an empty object."""
        if not self.request.body:
            return {}
        try:
            v = json.loads(self.request.body)
        except (ValueError, RecursionError) as e:
            raise BadRequest(400, f"body is not JSON: {e}") from e
        if not isinstance(v, dict):
            raise BadRequest(400, "body must be a JSON object")
        return v

    def _handle_request_exception(self, e):
        if isinstance(e, (BadRequest, tornado.web.HTTPError)):
            status = e.status if isinstance(e, BadRequest) else e.status_code
            text = str(e) if isinstance(e, BadRequest) else self._reason_of(e)
        else:
            log.error("%s %s: %r", self.request.method, self.request.path, e)
            status, text = 500, f"{type(e).__name__}: {e}"
        if self._finished:
            return
        if self._headers_written:  # too late for a status
            self.finish()
            return
        self.clear()
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(text)

    @staticmethod
    def _reason_of(e):
        return e.reason or tornado.httputil.responses.get(e.status_code, "error")

    def log_exception(self, *a):
        pass


class Health(Handler):
    async def get(self):
        # Warm means warm: a snapshot may be taken once this says OK.
        first = self.interpreter.first
        if not first.done():
            raise BadRequest(503, "starting")
        if first.exception() is not None:
            await self.interpreter.default_context()
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.write("OK")


class Execute(Handler):
    async def post(self):
        body = self.body()
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
        language = language_of(body.get("language"))
        context = None
        if language is not None:
            context = self.interpreter.get(cid) if cid else await self.interpreter.default_context()
            if context.waiting >= MAX_WAITING:
                raise BadRequest(429, f"{MAX_WAITING} executions wait in this context already")
            await context.ready()

        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("Cache-Control", "no-store")
        emit = Emitter(self)
        await emit.drain(self.gone)
        if context is None:
            # As an event and not as a status: the official clients show a
            # status without its text.
            emit({"type": "error", "name": "UnsupportedLanguage",
                  "value": f"language {body['language'][:64]!r} is not supported by this template; supported: {SUPPORTED}",
                  "traceback": ""})  # fmt: skip
        elif await self.wait_turn(context, emit):
            try:
                await context.execute(code, envs, emit, self.gone)
            except Exception as e:  # noqa: BLE001 - the stream must end well, whatever happened
                log.error("execute: %r", e)
                emit({"type": "error", "name": type(e).__name__, "value": str(e), "traceback": ""})
            finally:
                context.turn.release()
        emit({"type": "end_of_execution"})
        await emit.drain(self.gone)

    async def wait_turn(self, context, emit):
        """Waits for the context to be free; False if the client has gone."""
        context.waiting += 1
        turn = asyncio.create_task(context.turn.acquire())
        left = asyncio.create_task(self.gone.wait())
        try:
            while not turn.done():
                await asyncio.wait({turn, left}, timeout=KEEPALIVE, return_when=asyncio.FIRST_COMPLETED)
                if self.gone.is_set():
                    break
                if not turn.done():
                    emit({"type": "keepalive"})
                    await emit.drain(self.gone)
            if self.gone.is_set():
                if not turn.cancel() and turn.done():
                    context.turn.release()
                return False
            return True
        finally:
            context.waiting -= 1
            left.cancel()


class Emitter:
    """Writes events to the client; drain waits until it can take more."""

    def __init__(self, handler):
        self.handler = handler

    def __call__(self, event):
        if not self.handler.gone.is_set():
            self.handler.write(encode(event))

    async def drain(self, gone):
        if gone.is_set():
            return
        # Not awaited directly: a client that stops reading and then goes away
        # would leave us waiting for a flush that never ends.
        flush = asyncio.ensure_future(self.handler.flush())
        left = asyncio.create_task(gone.wait())
        await asyncio.wait({flush, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if flush.done() and flush.exception() is not None:
            gone.set()
        elif not flush.done():
            flush.cancel()


class Contexts(Handler):
    async def get(self):
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps([c.json() for c in self.interpreter.contexts.values()]))

    async def post(self):
        body = self.body()
        language = language_of(body.get("language"))
        if language is None:
            raise BadRequest(400, f"language {body['language'][:64]!r} is not supported by this template; supported: {SUPPORTED}")
        cwd = body.get("cwd") or HOME
        if not isinstance(cwd, str) or "\0" in cwd or not cwd.startswith("/"):
            raise BadRequest(400, "cwd must be an absolute path")
        if not os.path.isdir(cwd):
            raise BadRequest(400, f"cwd {cwd[:256]!r} is not a directory")
        c = await self.interpreter.create(language, cwd)
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps(c.json()))


class OneContext(Handler):
    async def delete(self, cid):
        await self.interpreter.remove(cid)
        self.set_status(204)


class Restart(Handler):
    async def post(self, cid):
        await self.interpreter.get(cid).restart()
        self.set_status(204)


class NotFound(Handler):
    async def prepare(self):
        raise BadRequest(404, "not found")


async def serve(address, port):
    it = Interpreter()
    it.first = asyncio.create_task(it.default_context())
    it.first.add_done_callback(lambda t: t.exception() and log.error("start kernel: %r", t.exception()))
    args = {"interpreter": it}
    app = tornado.web.Application(
        [
            (r"/health", Health, args),
            (r"/execute", Execute, args),
            (r"/contexts", Contexts, args),
            (r"/contexts/([^/]+)", OneContext, args),
            (r"/contexts/([^/]+)/restart", Restart, args),
        ],
        default_handler_class=NotFound,
        default_handler_args=args,
        log_function=lambda _: None,
    )
    server = tornado.httpserver.HTTPServer(
        app, max_body_size=MAX_BODY, max_buffer_size=MAX_BODY, max_header_size=64 << 10, body_timeout=120, idle_connection_timeout=600
    )
    sockets = tornado.netutil.bind_sockets(port, address)
    server.add_sockets(sockets)
    log.info("listening on %s:%d", address, sockets[0].getsockname()[1])
    stop = asyncio.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(s, stop.set)
    await stop.wait()
    server.stop()
    await asyncio.gather(*(c.close() for c in it.contexts.values()), return_exceptions=True)


def main():
    p = argparse.ArgumentParser(description="code interpreter of a Postern sandbox")
    p.add_argument("--listen", default="0.0.0.0:49999", metavar="ADDRESS:PORT")
    address, _, port = p.parse_args().listen.rpartition(":")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="interpreter: %(message)s")
    logging.getLogger("tornado.general").setLevel(logging.ERROR)
    asyncio.run(serve(address, int(port)))


if __name__ == "__main__":
    main()
