"""One bash context of the code interpreter: a bash process that keeps its state.

bash is interactive, so that an interrupt ends the command and not bash; it has
no terminal. It reads one line for each cell, which evaluates the cell's code
from a file in memory and then writes the status into another pipe. Both are
opened by path, so that programs that a cell starts do not inherit them. What
code and programs print goes straight into the server's pipes.
"""

import os
import re
import select
import shlex
import signal
import sys

import link

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
# What a cell must not change by accident is ours by an unlikely name.
P = "__postern"


class Shell:
    def __init__(self):
        self.code = os.memfd_create("cell")
        self.status, status = os.pipe2(os.O_CLOEXEC)
        stdin, self.stdin = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.status, False)
        self.base = {}
        self.count = self.last = 0
        me = os.getpid()
        self.from_, self.to = f"/proc/{me}/fd/{self.code}", f"/proc/{me}/fd/{status}"
        self.died, died = os.pipe2(os.O_CLOEXEC)
        # A group of its own, so that an interrupt can be for bash and what it
        # runs in the foreground; the server kills by group, but we die with it,
        # and bash with us.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        high = [os.dup(fd) for fd in (stdin, link.OUT, link.ERR)]
        self.pid = os.posix_spawn(
            "/bin/bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], {**os.environ, "PS1": "", "PS2": ""},
            setsigdef=[signal.SIGINT, signal.SIGPIPE],
            file_actions=[(os.POSIX_SPAWN_DUP2, high[0], 0), (os.POSIX_SPAWN_DUP2, high[1], 1), (os.POSIX_SPAWN_DUP2, null, 2), (os.POSIX_SPAWN_DUP2, high[2], 200)],
        )  # fmt: skip
        for fd in (stdin, null, *high):
            os.close(fd)
        self.end = died
        # Its complaint that there is no terminal went to /dev/null.
        self.line(f"exec 2>&200 200>&-; set +m +H; unset PS1 PS2 HISTFILE; {P}_s() {{ return $1; }}; echo ready >{self.to}")

    def line(self, text):
        link.put(self.stdin, text.encode() + b"\n")

    def run(self, code, base, call):
        """Starts a cell."""
        code = code.encode("utf-8", "surrogateescape").replace(b"\0", b"")
        os.ftruncate(self.code, 0)
        os.pwrite(self.code, code, 0)
        before, after, odd = [], [], []
        for k in self.base:
            if k not in base and NAME.match(k):
                before.append(f"unset {k}")
        if base != self.base:
            before += [f"export {k}={shlex.quote(v)}" for k, v in base.items() if NAME.match(k)]
            self.base = base
        for i, (k, v) in enumerate(call.items()):
            if not NAME.match(k):
                odd.append(k)
                continue
            before.append(f"{P}_v{i}=${{{k}-}} {P}_h{i}=${{{k}+set}} {P}_a{i}=${{{k}@a}}; export {k}={shlex.quote(v)}")
            after.append(f"if [[ ${P}_h{i} ]]; then {k}=${P}_v{i}; [[ ${P}_a{i} == *x* ]] || export -n {k}; else unset {k}; fi; unset {P}_v{i} {P}_h{i} {P}_a{i}")
        if odd:
            link.say(link.ERR, f"bash cannot have variables of these names: {', '.join(odd)[:1000]}\n")
        # One line each: what is interrupted is one line, and the next goes on.
        self.line("; ".join(one.replace("\n", "'$'\\n''") for one in [*before, ":"]))
        self.line(f"IFS= read -r -d '' {P}_c <{self.from_} || :; [[ $- == *e* ]] || {P}_s {self.last}; eval \"${P}_c\" </dev/null")
        self.line(f"{P}_r=$?; {'; '.join([*after, ':'])}; printf '%s\\n' ${P}_r >{self.to}")

    def interrupt(self):
        """Interrupts bash and what it runs. What is in the background ignores it: bash sees to that."""
        for pid in [self.pid, *link.children(self.pid)]:
            try:
                os.kill(pid, signal.SIGINT)
            except ProcessLookupError:
                pass


def start():
    link.start(sys.argv[1])
    shell = Shell()
    commands = link.Commands()
    ended, w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *a: None)
    signal.set_wakeup_fd(w, warn_on_full_buffer=False)
    poll = select.poll()
    for fd in (link.CMD, shell.status, ended):
        poll.register(fd, select.POLLIN)
    running, interrupted, have = True, False, b""  # it is starting
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if shell.status in ready:
            have += os.read(shell.status, 4096)
            while b"\n" in have:
                line, _, have = have.partition(b"\n")
                if line == b"ready":
                    link.send({"t": "ready"})
                elif running:
                    shell.last = int(line) & 255 if line.isdigit() else 1
                    if interrupted:
                        link.send({"t": "error", "name": "KeyboardInterrupt", "value": "the execution was interrupted", "traceback": ""})
                    elif shell.last:
                        text = f"exit status {shell.last}"
                        link.send({"t": "error", "name": "ExitStatus", "value": text, "traceback": text})
                    link.send({"t": "done"})
                running = False
        if ended in ready:
            os.read(ended, 4096)
            pid, status = os.waitpid(shell.pid, os.WNOHANG)
            if pid:
                link.end(status)
        for c in commands.read() if link.CMD in ready else ():
            if c["op"] == "run":
                shell.count += 1
                running, interrupted = True, False
                link.send({"t": "busy"})
                link.send({"t": "count", "n": shell.count})
                shell.run(c["code"], c["base"], c["call"])
            elif c["op"] == "interrupt" and running:
                interrupted = True
                shell.interrupt()
            elif c["op"] == "reseed":
                if c["all"] and not running:
                    shell.line(f"RANDOM={int.from_bytes(os.urandom(2), 'big')}")
                if not c.get("silent"):
                    link.send({"t": "done"})
