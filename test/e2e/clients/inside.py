# Proposes an email to Bob, waits until it is approved and for Bob's answer, reads that and
# answers it. Arguments: the address of the server, and requests or urllib.
import json, sys, urllib.request

base, library = sys.argv[1:]
if library == "requests":
    from pip._vendor import requests

    def ask(path, body=None):
        r = requests.get(base + path, timeout=90) if body is None else requests.post(base + path, json=body, timeout=90)
        r.raise_for_status()
        return r.json()
else:
    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        req = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(req, timeout=90))

me = ask("/v1/me")
assert me["kind"] == "sandbox" and me["can_read"], me
subject = f"{library} at {base}"
mark = ask("/v1/inboxes/me/messages/wait?timeout=0")["after"]
action = ask("/v1/inboxes/me/messages", {"to": ["bob@example.com"], "subject": subject, "text": "Hello"})["id"]
while ask(f"/v1/actions/{action}?wait=60")["state"] == "pending":
    pass
while True:
    got = ask(f"/v1/inboxes/me/messages/wait?timeout=60&after={mark}")
    mark = got["after"]
    mine = [m for m in got["messages"] if m["subject"] == "Re: " + subject]
    if mine:
        break
full = ask("/v1/inboxes/me/messages/" + mine[0]["id"])
assert full["text"].strip() == "Hello robot", full
answer = ask(f"/v1/inboxes/me/messages/{full['id']}/reply", {"text": "Hello back"})
print("answered", answer["status"])
