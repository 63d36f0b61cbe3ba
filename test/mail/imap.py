# Reads an inbox with Python's imaplib, as its documentation shows.
import email.policy
import imaplib
import os
import ssl

context = ssl.create_default_context(cafile=os.environ["CERT"])
user, key = os.environ["IMAP_USER"], os.environ["KEY"]


def ok(answer):
    status, data = answer
    assert status == "OK", answer
    return data


with imaplib.IMAP4_SSL("localhost", int(os.environ["PORT"]), ssl_context=context) as box:
    try:
        box.login(user, "pib_wrong")
        raise SystemExit("a wrong password opens the inbox")
    except imaplib.IMAP4.error as err:
        assert "AUTHENTICATIONFAILED" in str(err), err
    box.login(user, key)
    names = b" ".join(ok(box.list()))
    assert b"Drafts" in names and b"Junk" not in names, names
    assert ok(box.select("INBOX", readonly=True)) == [b"2"]
    assert ok(box.search(None, "ALL")) == [b"1 2"]
    assert ok(box.uid("SEARCH", None, '(FROM "bob" SUBJECT "First")')) == [b"1"]
    assert ok(box.search("UTF-8", "TEXT", b"hello")) == [b"2"]
    data = ok(box.fetch("2", "(RFC822)"))
    message = email.message_from_bytes(data[0][1], policy=email.policy.default)
    assert message["subject"] == "Grüße", message["subject"]
    assert [(p.get_filename(), p.get_content()) for p in message.iter_attachments()] == [("ü.bin", b"hello")]
    assert ok(box.fetch("1:2", "(FLAGS)")) == [b"1 (FLAGS ())", b"2 (FLAGS ())"], "EXAMINE sets no flag"
    box.close()

# With STARTTLS, a draft, and flags.
with imaplib.IMAP4("localhost", int(os.environ["CLEAR"])) as box:
    assert "LOGINDISABLED" in box.capabilities
    try:
        box.login(user, key)
        raise SystemExit("a password in the clear opens the inbox")
    except imaplib.IMAP4.error as err:
        assert "PRIVACYREQUIRED" in str(err) or "LOGINDISABLED" in str(err), err
    box.starttls(context)
    ok(box.authenticate("PLAIN", lambda _: f"\0{user}\0{key}".encode()))
    ok(box.append("Drafts", r"(\Draft)", None, b"To: bob@example.com\r\nSubject: Plan\r\n\r\nHello\r\n"))
    assert ok(box.select("Drafts")) == [b"1"]
    assert b"Subject: Plan" in ok(box.fetch("1", "(BODY.PEEK[HEADER])"))[0][1]
    ok(box.store("1", "+FLAGS", r"\Deleted"))
    assert ok(box.expunge()) == [b"1"]
    status, data = box.append("Sent", None, None, b"Subject: forged\r\n\r\nx\r\n")
    assert status == "NO" and b"CANNOT" in data[0], data
    ok(box.select("INBOX"))
    ok(box.store("1", "+FLAGS", r"(\Flagged project)"))
    assert ok(box.search(None, "KEYWORD", "project")) == [b"1"]
    ok(box.store("1", "-FLAGS", r"(\Flagged project)"))
    # The old way to move: copy, mark, expunge.
    ok(box.copy("1", "Archive"))
    ok(box.store("1", "+FLAGS", r"\Deleted"))
    assert ok(box.expunge()) == [b"1"], "the copied message and no other"
    assert ok(box.select("INBOX")) == [b"1"]
    assert ok(box.select("Archive")) == [b"1"]
    assert ok(box.fetch("1", "(FLAGS)")) == [b"1 (FLAGS ())"]
    ok(box.uid("MOVE", "1", "INBOX"))
    assert ok(box.select("INBOX")) == [b"2"]
print("imaplib is content")
