"""IPython for kernel.py: a shell that sends what it shows as events.

It looks like ipykernel's to programs that ask (pandas, tqdm and others go by
the name of the class), and has neither its sockets nor its threads.
"""

import json
import os
import sys
import types

# Only a terminal needs these, and they are 10 MB. They are hidden while IPython
# loads; user code can import them later.
_hidden = {"IPython.terminal.embed": types.ModuleType("IPython.terminal.embed"), "jedi": None}
_hidden["IPython.terminal.embed"].embed = None
_hidden = {k: v for k, v in _hidden.items() if k not in sys.modules}
sys.modules.update(_hidden)
try:
    from IPython.core import page
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.formatters import BaseFormatter
    from IPython.core.interactiveshell import InteractiveShell, InteractiveShellABC
finally:
    for _n in _hidden:
        sys.modules.pop(_n, None)
from base64 import b64encode

from traitlets import ObjectName, Unicode
from traitlets.config import Config

loads = json.loads
send = None


def clean(data):
    """Returns a bundle of formats as JSON can carry it."""
    return {k: b64encode(v).decode() if isinstance(v, bytes) else v for k, v in data.items()}


def flush():
    for f in (sys.stdout, sys.stderr):
        try:
            f.flush()
        except Exception:  # noqa: BLE001 - the user's own, perhaps closed
            pass


class Hook(DisplayHook):
    """Sends the value of a cell's last expression."""

    def write_output_prompt(self):
        pass

    def write_format_data(self, format_dict, md_dict=None):
        flush()
        send({"t": "result", "main": True, "data": clean(format_dict)})

    def finish_displayhook(self):
        pass


class Publisher(DisplayPublisher):
    """Sends what display() shows."""

    def publish(self, data, metadata=None, source=None, *, transient=None, update=False, **kwargs):
        flush()
        send({"t": "result", "main": False, "data": clean(data)})

    def clear_output(self, wait=False):
        pass


class ZMQInteractiveShell(InteractiveShell):
    def enable_gui(self, gui=None):
        pass

    def init_virtualenv(self):
        pass

    def init_sys_path(self):
        pass

    def init_hooks(self):
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(page.display_page), 99)

    def system_piped(self, cmd):
        """Runs "!cmd", in a terminal that nobody sits at.

        So its programs must not wait for a key. As in Jupyter they are told by
        their environment, here theirs alone.
        """
        told = {"TERM": "xterm-color", "PAGER": "cat", "GIT_PAGER": "cat"}
        before = {k: os.environ.get(k) for k in told}
        os.environ.update(told)
        try:
            super().system_piped(cmd)
        finally:
            for k, v in before.items():
                if v is None:
                    os.environ.pop(k, None)
                else:
                    os.environ[k] = v

    system = system_piped

    def ask_exit(self):
        raise SystemExit

    def _showtraceback(self, etype, evalue, stb):
        flush()
        send({"t": "error", "name": str(etype.__name__), "value": str(evalue), "traceback": "\n".join(stb)})
        self._last_traceback = stb


# Programs that look where it comes from look for this.
ZMQInteractiveShell.__module__ = "ipykernel.zmqshell"
InteractiveShellABC.register(ZMQInteractiveShell)


class Data(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


class Chart(BaseFormatter):
    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, obj):
        # Not for_type_by_name: matplotlib's backend takes from every formatter
        # what it has for figures.
        if any(c.__module__ == "matplotlib.figure" and c.__name__ == "Figure" for c in type(obj).__mro__):
            return figure(obj)
        return super().__call__(obj)


MAX_CELLS = 100_000  # of a table or a list that is sent as data, too


def frame(df):
    # A table that is meant for a program, not for a chart of a million points.
    try:
        if df.size > MAX_CELLS:
            return None
        return {str(k): [plain(v) for v in column] for k, column in df.to_dict(orient="list").items()}
    except Exception:  # noqa: BLE001 - a table that cannot be data is still shown
        return None


def plain(v):
    """Returns a cell of a table as JSON has it."""
    if v is None or type(v) in (str, int, bool):
        return v
    if hasattr(v, "isoformat"):
        return v.isoformat() if v == v else None  # NaT is not itself
    if hasattr(v, "item"):
        v = v.item()
    if isinstance(v, float) and v - v != 0:
        return None
    return v


def figure(fig):
    global chart
    try:
        if chart is None:
            # By its path: a file of the user's must not stand in for it.
            from importlib.util import module_from_spec, spec_from_file_location

            spec = spec_from_file_location("postern_chart", os.path.join(os.path.dirname(__file__), "chart.py"))
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            chart = module
        return chart.of(fig)
    except Exception:  # noqa: BLE001 - the picture is shown in any case
        return {}


chart = None


def as_json(v):
    """Returns a list or dict as JSON, or None if it has what JSON has not."""
    try:
        text = json.dumps(v, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return loads(text) if len(text) <= 1 << 20 else None


def make(main, sender, count):
    """Makes the shell over a module's variables; the next cell is number count."""
    global send
    send = sender
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor"
    config.IPKernelApp.connection_file = ""  # programs ask whether there is such a section
    ZMQInteractiveShell.displayhook_class = Hook
    ZMQInteractiveShell.display_pub_class = Publisher
    shell = ZMQInteractiveShell.instance(config=config, user_module=main, user_ns=main.__dict__)
    shell.execution_count = count
    f = shell.display_formatter
    data = Data(parent=f)
    data.for_type_by_name("pandas.core.frame", "DataFrame", frame)
    f.formatters["e2b/data"] = data
    f.formatters["e2b/chart"] = Chart(parent=f)
    for kind in (list, dict):
        f.formatters["application/json"].for_type(kind, as_json)
    return shell
