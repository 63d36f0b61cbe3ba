"""Reads messages with Python's email, by both of its policies: {raw} in base64 as
a line of JSON on standard input each, what a program made with it shows a
recipient as a line of JSON on standard output. The standard library alone."""

import base64
import email
import email.header
import email.policy
import hashlib
import json
import sys


def clean(s):
    return str(s).encode("utf-8", "replace").decode("utf-8")


def new(raw):
    m = email.message_from_bytes(raw, policy=email.policy.default)
    words, html, files = [], "", []
    for name in ("subject", "from", "to", "cc", "reply-to", "sender"):
        for v in m.get_all(name, []):
            words.append(clean(v))
    for part in m.walk():
        if part.is_multipart() and part.get_content_maintype() == "multipart":
            continue
        if part.get_content_type() == "message/rfc822":
            continue  # walk goes into it
        name = part.get_filename() or ""
        text = part.get_content_maintype() == "text"
        if text and part.get_content_disposition() != "attachment":
            s = clean(part.get_content())
            if part.get_content_subtype() == "html":
                html += s
            else:
                words.append(s)
            words.append(clean(name))
        elif not part.is_multipart():
            data = part.get_payload(decode=True) or b""
            files.append({"name": clean(name), "sha256": hashlib.sha256(data).hexdigest(), "text": data.decode("latin-1")})
    return {"words": words, "html": html, "files": files}


def old(raw):
    m = email.message_from_bytes(raw)
    words, html, files = [], "", []
    for name in ("subject", "from", "to", "cc", "reply-to", "sender"):
        for v in m.get_all(name, []):
            words.append(clean(email.header.make_header(email.header.decode_header(v))))
    for part in m.walk():
        if part.is_multipart():
            continue
        data = part.get_payload(decode=True) or b""
        name = part.get_filename() or ""
        if part.get_content_maintype() == "text" and part.get_content_disposition() != "attachment":
            s = data.decode(part.get_content_charset() or "utf-8", "replace")
            if part.get_content_subtype() == "html":
                html += s
            else:
                words.append(s)
            words.append(clean(name))
        else:
            files.append({"name": clean(name), "sha256": hashlib.sha256(data).hexdigest(), "text": data.decode("latin-1")})
    return {"words": words, "html": html, "files": files}


for line in sys.stdin:
    raw = base64.b64decode(json.loads(line)["raw"])
    out = {}
    for name, read in (("email.policy.default", new), ("email.policy.compat32", old)):
        try:
            out[name] = read(raw)
        except Exception as e:  # what it cannot read it shows nobody
            out[name] = {"error": repr(e)}
    sys.stdout.write(json.dumps(out) + "\n")
    sys.stdout.flush()
