"""One context of the code interpreter: runs cells and keeps their state.

It is started by server.py with five descriptors: no input, the user's
output and errors as pipes, commands on 3 and events on 4, both JSON lines:

    {"op": "run", "code", "base", "call"}   →  busy, count, result*, error?, done
    {"op": "reseed", "all"}                 →  done

What a cell prints goes into the pipe line by line, so that a crash loses none of
it, and programs that it starts write to the same pipe. The server makes events
of it. It reads three pipes, so what goes into one waits until it has read the
others: only so does it know what came first.

A cell of plain Python runs without IPython: importing that costs 250 ms and
25 MB, more than all else in an idle sandbox together. What only IPython can do
(magics, "!cmd", rich output, tracebacks, "import IPython") loads it, once, with
the state that is there; from then on it runs every cell. What a user sees is
the same either way, but for the time that the first such cell takes.

Nothing here defends anything: the code that it runs can change it.
"""

import ast
import builtins
import fcntl
import io
import json
import linecache
import os
import signal
import sys
import termios
import threading
import time
import types

# Bound now: user code may rebind what is in these modules, by accident or to
# see what happens, and its next cell should still run.
loads, dumps, write, read = json.loads, json.dumps, os.write, os.read
environ, modules = os.environ, sys.modules
ioctl, sleep, monotonic = fcntl.ioctl, time.sleep, time.monotonic
OUT, ERR, CMD, EVENTS = 1, 2, 3, 4
UNREAD, NOTHING = termios.FIONREAD, bytes(4)
PATIENCE = 30  # seconds that one write waits until the server has read what came before
INLINE = "module://matplotlib_inline.backend_inline"
PID = os.getpid()
MAX_PIXELS = 32 << 20  # of a saved picture that is shown; the server ends kernels that send more than it takes
INTERACTIVE = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # CO_COROUTINE
SCALARS = (int, float, bool, complex, type(None))
REPRS = tuple("_repr_" + n + "_" for n in ("html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "json", "javascript", "mimebundle", "e2b_data", "e2b_chart")) + ("_ipython_display_", "_repr_pretty_")

main = types.ModuleType("__main__", None)
ns = main.__dict__
lock = threading.Lock()
shell = None  # IPython's, once it is loaded
loop = None  # the event loop of cells, once there was one
count = 1  # of the cell that runs, or is next
cells = []  # (count, code, file name) of what ran before IPython came
failed = False


def send(event, wait=True):
    b = dumps(event, default=str).encode() + b"\n"
    with lock:
        while b:
            b = b[write(EVENTS, b) :]
    if wait:
        taken(EVENTS)


patient = True  # whether the server has kept up so far, in this cell


def taken(fd):
    """Waits until the server has read what is in one of the pipes."""
    global patient
    pause, until = 0.00005, None
    try:
        while patient and ioctl(fd, UNREAD, NOTHING) != NOTHING:
            now = monotonic()
            until = until or now + PATIENCE
            if now > until:  # its client does not read: the order is given up, and nothing else
                patient = False
            sleep(pause)
            pause = min(2 * pause, 0.005)
    except OSError:
        pass  # closed by the user's code


class Output(io.FileIO):
    """One of the user's two outputs, as bytes."""

    def __init__(self, fd, name):
        super().__init__(fd, "wb", closefd=False)
        self.name, self.other = name, ERR if fd == OUT else OUT

    def write(self, b):
        taken(self.other)
        view = memoryview(b).cast("B")
        n = len(view)
        while view:
            view = view[super().write(view) :]
        return n


class Lines(io.TextIOWrapper):
    """One of the user's two outputs, as text.

    One print is several writes. They leave as one, so that those of two threads
    or processes do not mix, and in time: Flusher, switching and leaving see to
    what does not end in a line.

    One lock is for both outputs. A flush takes the text before it writes it, and
    another flush in between would find nothing and return: the cell would end
    before its output has left.
    """

    last = None  # the one that was written to last
    lock = threading.RLock()

    def __init__(self, fd, name):
        super().__init__(Output(fd, name), encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=False)
        self.mode = "w"

    def write(self, s):
        with Lines.lock:
            last = Lines.last
            if last is not self:
                Lines.last = self
                if last is not None and not last.closed:
                    last.flush()
            n = super().write(s)
            if s[-1:] == "\n":
                self.flush()
            return n

    def flush(self):
        with Lines.lock:
            super().flush()


# Programs that are started write after what was printed before, and a process
# that is forked must not have it, too. "os.kill" may be of this one.
LEAVING = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "signal.pthread_kill"}


def leaving(event, args):
    if event in LEAVING:
        flush()


class Flusher:
    """Lets others see output that does not end in a line, while a cell runs."""

    def __init__(self):
        self.running = threading.Event()
        self.started = False

    def __enter__(self):
        if not self.started:
            self.started = True
            threading.Thread(target=self.run, daemon=True, name="postern-flush").start()
        self.running.set()

    def __exit__(self, *a):
        self.running.clear()
        flush()

    def run(self):
        rest = threading.Event()
        while True:
            self.running.wait()
            rest.wait(0.2)
            flush()


def flush():
    for f in (sys.stdout, sys.stderr):
        try:
            f.flush()
        except Exception:  # noqa: BLE001 - the user's own, perhaps closed
            pass


# --- environment and randomness --------------------------------------------

base = {}  # what the sandbox set for every execution


def enter(want, call):
    """Sets the sandbox's variables and those of one execution; returns what undoes the latter."""
    global base
    if want != base:
        for k in base:
            if k not in want:
                environ.pop(k, None)
        base = want
        environ.update(base)
    saved = {k: environ.get(k) for k in call}
    environ.update(call)
    return saved


def leave(saved):
    for k, v in saved.items():
        if v is None:
            environ.pop(k, None)
        else:
            environ[k] = v


def reseed(everything):
    """Makes this process's random state unlike that of every other restore.

    Of a sandbox that goes on as itself (everything is False) the generators
    that a program may have seeded on purpose are left as they are.
    """
    m = modules.get("ssl") or modules.get("_ssl")
    if m is None and "_hashlib" in modules:
        try:
            import _ssl as m
        except ImportError:
            m = None
    if m is not None:
        # Reseeds the primary generator, from the system too; the public and
        # the private one follow when they see that it was.
        m.RAND_add(os.urandom(48), 48.0)
    if (m := modules.get("tempfile")) is not None:
        m._name_sequence = None
    if (m := modules.get("uuid")) is not None:
        # Not from a network card, which all sandboxes have alike; the lowest bit
        # of the first byte says so.
        m._node, m._last_timestamp = int.from_bytes(os.urandom(6), "big") | 1 << 40, None
        m._generate_time_safe = m._UuidCreate = None  # libuuid keeps a state of its own
    if not everything:
        return
    if (m := modules.get("random")) is not None:
        m.seed()
    if (m := modules.get("numpy.random")) is not None:
        m.seed()
    for name in ("torch",):
        if (m := modules.get(name)) is not None:
            try:
                m.seed()
            except Exception:  # noqa: BLE001 - half imported, perhaps
                pass


# --- IPython, when it is needed ------------------------------------------------


class Finder:
    """Loads IPython as a shell when user code imports any part of it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "IPython" or name == "ipykernel":
            load()
        return None


def load():
    """Returns IPython's shell, which goes on with the state of this process."""
    global shell
    if shell is None:
        if Finder in sys.meta_path:
            sys.meta_path.remove(Finder)
        # Files of the user's must not stand in for what IPython needs.
        mine = [p for p in sys.path if p in ("", os.getcwd())]
        sys.path[:] = [p for p in sys.path if p not in mine]
        sys.path.insert(0, os.path.dirname(__file__))
        try:
            import rich
        finally:
            sys.path[:1] = mine
            modules.pop("rich", None)
        shell = rich.make(main, send, count)
        shell.compile._filename_map.update({name: n for n, _, name in cells})
        history = shell.history_manager
        for n, code, _ in cells:
            history.input_hist_parsed[n:] = [code]
            history.input_hist_raw[n:] = [code]
        history.output_hist.update(outputs)
        for k in ("_", "__", "___"):
            if k in kept:
                ns[k] = kept[k]
                setattr(shell.displayhook, k, kept[k])
    return shell


class Hooks:
    """Changes modules as they are imported, so that what they make is shown as E2B does."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        change = HOOKS.get(name)
        if change is None:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def show_saved(module):
    """Shows what PIL saves to a file of a name."""
    module.Image.save = saving(module.Image.save)


def show_figures(module):
    """Makes matplotlib's figures results.

    Jupyter sets MPLBACKEND for that. Programs that a cell starts would get it,
    too, and have nobody to show a figure to.
    """
    if not environ.get("MPLBACKEND"):
        module.rcParams["backend"] = INLINE


HOOKS = {"PIL.Image": show_saved, "matplotlib": show_figures}


def saving(save):
    from functools import wraps

    @wraps(save)
    def save_and_show(self, fp, format=None, **params):
        save(self, fp, format, **params)
        # A process that a cell forked has our pipe, and must not write into
        # the middle of what we write.
        if isinstance(fp, str) and os.getpid() == PID:
            picture(self)

    return save_and_show


def picture(image):
    """Sends one of PIL's images as a result; IPython is not needed for it."""
    from base64 import b64encode

    try:
        if image.width * image.height > MAX_PIXELS:
            return
        text = f"<{type(image).__module__}.{type(image).__name__} image mode={image.mode} size={image.width}x{image.height}>"
        data = {"text/plain": text, "image/png": b64encode(image._repr_png_()).decode()}
    except Exception:  # noqa: BLE001 - not every mode can be PNG, and what was asked for is done
        return
    flush()
    send({"t": "result", "main": False, "data": data})


def get_ipython():
    """Returns IPython's shell."""
    return load()


def display(*objs, **kwargs):
    """Shows objects in the richest way that they have."""
    load()
    from IPython.display import display

    return display(*objs, **kwargs)


def no_input(*args, **kwargs):
    from IPython.core.error import StdinNotImplementedError

    raise StdinNotImplementedError("raw_input was called, but this frontend does not support input requests.")


# --- cells of plain python -----------------------------------------------------

outputs = {}  # what Out is
inputs = [""]  # what In is
kept = {"_": "", "__": "", "___": ""}
future = 0  # compiler flags of "from __future__" in earlier cells


def text_of(v):
    """Returns what IPython would show for v, or None if only IPython knows."""
    t = type(v)
    if t in SCALARS or t is str:
        return repr(v)
    if t in (list, tuple, dict):
        # Its pretty printer breaks lines over 79 characters.
        if simple(v, 200) and len(s := repr(v)) < 78:
            return s
        return None
    if hasattr(t, "__array_interface__") and t.__module__ == "numpy":
        return repr(v)
    return None


def simple(v, budget):
    """Reports whether v has only what is shown by repr alone."""
    todo = [v]
    while todo:
        v = todo.pop()
        budget -= 1
        t = type(v)
        if budget < 0:
            return False
        if t in SCALARS or t is str:
            if t is str and len(v) > 80:
                return False
        elif t is list or t is tuple:
            if len(v) > budget:
                return False
            todo.extend(v)
        elif t is dict:
            if len(v) > budget:
                return False
            todo.extend(v.keys())
            todo.extend(v.values())
        else:
            return False
    return True


def show(v):
    """The hook for the value of a cell's last expression."""
    if shell is not None:  # loaded by this very cell
        shell.displayhook(v)
        return
    if v is None:
        return
    text = text_of(v)
    if text is None:
        load().displayhook(v)
        return
    flush()
    data = {"text/plain": text}
    if type(v) in (list, dict):
        try:
            data["application/json"] = loads(dumps(v, allow_nan=False))
        except (TypeError, ValueError):
            pass  # JSON has no such keys or numbers
    send({"t": "result", "main": True, "data": data})
    kept["___"], kept["__"], kept["_"] = kept["__"], kept["_"], v
    if not any(k in ns and ns[k] is not kept_before for k, kept_before in shown.items()):
        ns.update(kept)
        shown.update(kept)
    ns[f"_{count}"] = outputs[count] = v


shown = {"_": "", "__": "", "___": ""}  # what ns has of these from us: the user may use the names


def plan(code):
    """Returns the parsed cell, or None if it is for IPython."""
    if not code.strip():
        return ast.Module(body=[], type_ignores=[])
    try:
        tree = compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | INTERACTIVE | future, True)
    except Exception:  # noqa: BLE001 - also deep nesting; IPython shows it
        return None
    body = tree.body
    if len(body) == 1 and type(body[0]) is ast.Expr and "\n" not in code.strip():
        # "ls" and "ls -l" are expressions, and may be magics.
        word = code.split(None, 1)[0].rstrip(";")
        if word.isidentifier() and word not in ns and not hasattr(builtins, word) and not word in ("await", "lambda", "not", "yield"):
            return None
    return tree


def run_plain(tree, code):
    """Runs a parsed cell; returns False if it raised."""
    global count, future
    name = f"<ipython-input-{count}-{hash(code) & 0xffffffffffff:012x}>"
    cells.append((count, code, name))
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    inputs.append(code)
    ns["_i"], ns["_ii"], ns["_iii"] = code, ns.get("_i", ""), ns.get("_ii", "")
    ns[f"_i{count}"] = code
    body, last = tree.body, []
    if body and type(body[-1]) is ast.Expr and not code.rstrip().endswith(";"):
        body, last = body[:-1], body[-1:]
    try:
        flags = INTERACTIVE | future
        steps = []
        if body:
            steps.append(compile(ast.Module(body=body, type_ignores=[]), name, "exec", flags, True))
        if last:
            if steps:
                flags |= steps[0].co_flags & FUTURES
            steps.append(compile(ast.Interactive(body=last), name, "single", flags, True))
        for s in steps:
            future |= s.co_flags & FUTURES
        execute(steps, code)
        return True
    except BaseException as e:  # noqa: BLE001 - KeyboardInterrupt and SystemExit are the cell's too
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tb = e.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename != name:
            tb = tb.tb_next
        flush()
        complain(type(e), e, tb)
        return False


FUTURES = 0
for _n in ("barry_as_FLUFL", "annotations", "generator_stop"):
    FUTURES |= getattr(__import__("__future__"), _n).compiler_flag


def execute(steps, code):
    waits = any(s.co_flags & COROUTINE for s in steps)
    # As in Jupyter a cell runs inside the event loop, so that it can make
    # tasks; but not one that wants to run a loop of its own, which Jupyter
    # refuses.
    if waits or ("asyncio" in modules and not ("asyncio.run(" in code or "run_until_complete(" in code or "run_forever(" in code)):
        inside(steps_in_loop(steps))
        return
    for s in steps:
        exec(s, ns)


async def steps_in_loop(steps):
    for s in steps:
        v = eval(s, ns)
        if s.co_flags & COROUTINE:
            await v


def inside(coro):
    """Runs a coroutine in the loop that all cells share."""
    global loop
    import asyncio

    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    task = loop.create_task(coro)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():  # interrupted: it must not go on in the next cell
            task.cancel()
            try:
                loop.run_until_complete(task)
            except BaseException:  # noqa: BLE001
                pass
        raise


def complain(kind, e, tb):
    try:
        load()
        if kind is SystemExit:
            shell.showtraceback((kind, e, tb), exception_only=True)
        else:
            shell.showtraceback((kind, e, tb), tb_offset=0)
    except BaseException as broken:  # noqa: BLE001 - IPython itself may be broken by then
        import traceback

        lines = traceback.format_exception(kind, e, tb) + [f"(IPython did not load: {broken!r})"]
        send({"t": "error", "name": kind.__name__, "value": str(e), "traceback": "".join(lines)})


# --- the loop ------------------------------------------------------------------


def run(code):
    global count, shell
    send({"t": "count", "n": count})
    tree = None if shell is not None else plan(code)
    if tree is None:
        run_rich(code)
        return
    run_plain(tree, code)
    if shell is not None:  # it came with this cell, so nobody told it
        shell.events.trigger("post_execute")
        history = shell.history_manager
        if len(history.input_hist_parsed) <= count:
            history.input_hist_parsed.append(code)
            history.input_hist_raw.append(code)
    count += 1
    if shell is not None:
        shell.execution_count = count


def run_rich(code):
    global count
    s = load()
    if "getpass" in modules:
        modules["getpass"].getpass = no_input
    alone = "asyncio.run(" in code or "run_until_complete(" in code or "run_forever(" in code
    try:
        if "asyncio" not in modules or alone:
            s.run_cell(code, store_history=True)
        else:
            try:
                result = inside(s.run_cell_async(code, store_history=True, transformed_cell=s.transform_cell(code)))
            except SyntaxError:
                s.run_cell(code, store_history=True)
            else:
                s.events.trigger("post_execute")
                s.events.trigger("post_run_cell", result)
    finally:
        count = s.execution_count


def handle(msg):
    op = msg["op"]
    if op == "run":
        global patient
        patient = True
        send({"t": "busy"}, False)
        saved = enter(msg["base"], msg["call"])
        try:
            with flusher:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    run(msg["code"])
                finally:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as e:  # noqa: BLE001 - an interrupt between two lines of ours
            complain(type(e), e, None)
        finally:
            leave(saved)
    elif op == "reseed":
        reseed(msg["all"])
    flush()
    send({"t": "done"}, False)


def commands():
    """Yields commands until the server has gone."""
    have = b""
    while True:
        line, sep, rest = have.partition(b"\n")
        if sep:
            have = rest
            yield loads(line)
            continue
        parts = [have]
        while True:
            wait()
            b = read(CMD, 1 << 16)
            if not b:
                return
            parts.append(b)
            if b"\n" in b:
                break
        have = b"".join(parts)


def wait():
    """Waits for a command; what cells left in the loop goes on meanwhile."""
    if loop is None or loop.is_closed():
        return
    try:
        pending = modules["asyncio"].all_tasks(loop)
        if not pending:
            return
        come = loop.create_future()
        loop.add_reader(CMD, lambda: come.done() or come.set_result(None))
        try:
            loop.run_until_complete(come)
        finally:
            loop.remove_reader(CMD)
    except BaseException:  # noqa: BLE001 - a task may raise anything, SystemExit too
        pass


flusher = Flusher()


def start():
    try:
        os.chdir(sys.argv[1])
    except OSError:
        os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # For a process that is in the middle of a cell while it is saved.
    signal.signal(signal.SIGRTMIN + 5, lambda *a: reseed(True))
    signal.signal(signal.SIGRTMIN + 6, lambda *a: reseed(False))
    for fd in (CMD, EVENTS):
        os.set_inheritable(fd, False)
    sys.stdout = sys.__stdout__ = Lines(OUT, "<stdout>")
    sys.stderr = sys.__stderr__ = Lines(ERR, "<stderr>")
    sys.addaudithook(leaving)
    # A forked process must not find the lock taken by a thread that it does not have.
    os.register_at_fork(before=Lines.lock.acquire, after_in_parent=Lines.lock.release, after_in_child=Lines.lock.release)
    # Python sets it for itself where there is no locale (PEP 538). It is not the
    # user's, and -X utf8 does without.
    environ.pop("LC_CTYPE", None)
    modules["__main__"] = main
    sys.argv = [""]
    sys.path.insert(0, "")
    sys.meta_path[:0] = [Finder, Hooks]
    sys.displayhook = show
    ns.update(__builtins__=builtins, __builtin__=builtins, get_ipython=get_ipython, In=inputs, Out=outputs, _ih=inputs, _oh=outputs, _dh=[os.getcwd()], _i="", _ii="", _iii="", **kept)
    builtins.__IPYTHON__ = True
    builtins.get_ipython = get_ipython
    builtins.display = display
    builtins.input = no_input
    # So that the first cell does not find it slow.
    exec(compile(ast.Interactive(body=plan("None").body), "<cell>", "single"), {})
    import gc

    gc.collect()
    gc.freeze()
    send({"t": "ready"})
    for msg in commands():
        handle(msg)
