"""Writes messages with Python's standard library as its users do, one in base64
on a line."""

import base64
import email.header
import email.mime.application
import email.mime.image
import email.mime.message
import email.mime.multipart
import email.mime.text
import email.message
import email.policy
import email.utils

TO = "Bob <b@x.example>, =?utf-8?q?=C3=9Cnal?= <u@y.example>"
LONG = "Grüße aus Köln, und noch einmal: " * 8
LINES = "A line of words that is rather long, so that it has to be folded by whoever writes it. " * 5 + "\n.\n..\nFrom here\n  trailing  \n"
HTML = '<html><head><title>Hi</title></head><body><p style="margin:0">Grüße <a href="https://x.example/">here</a></p></body></html>'


def out(m):
    raw = m.as_bytes(policy=m.policy.clone(linesep="\r\n", max_line_length=78))
    print(base64.b64encode(raw).decode())


def new(subject, text=None):
    m = email.message.EmailMessage()
    m["From"] = "Agent <agent@p.example>"
    m["To"] = ["Bob <b@x.example>", "Ünal <u@y.example>"][0]
    m["Subject"] = subject
    m["Date"] = email.utils.localtime()
    m["Message-ID"] = email.utils.make_msgid(domain="p.example")
    if text is not None:
        m.set_content(text)
    return m


def old(part, subject):
    part["From"] = "Agent <agent@p.example>"
    part["To"] = TO
    part["Subject"] = subject
    return part


out(new("hello", "hello\n"))
out(new("", ""))
out(new(LONG.strip(), LINES + LONG))
m = new("Привет 你好 🎉", LONG)
m.add_alternative(HTML, subtype="html")
out(m)
m = new("files", "x")
m.add_alternative(HTML, subtype="html")
m.add_attachment(b"%PDF" + bytes(range(256)) * 10, maintype="application", subtype="pdf", filename="Übersicht 你好.pdf")
m.add_attachment("text\nmore\n", filename="a b.txt")
m.add_attachment(b"", maintype="application", subtype="octet-stream", filename="empty.bin")
inner = email.message.EmailMessage()
inner["From"] = "c@x.example"
inner["Subject"] = "inner"
inner.set_content("inner")
m.add_attachment(inner)
out(m)
m = new("inline", "x")
m.add_alternative(HTML, subtype="html")
m.get_payload()[1].add_related(b"\x89PNG", "image", "png", cid="<logo>", filename="logo.png")
out(m)
m = new("Re: hello", "x")
m["In-Reply-To"] = "<1@x.example>"
m["References"] = " ".join("<%d.%s@x.example>" % (i, "a" * 40) for i in range(40))
m["Reply-To"] = "desk@p.example"
m["X-Priority"] = "1"
m["List-Unsubscribe"] = "<https://x.example/u>, <mailto:u@p.example>"
out(m)

out(old(email.mime.text.MIMEText("hello"), "hello"))
out(old(email.mime.text.MIMEText(LONG, "plain", "utf-8"), email.header.Header(LONG.strip(), "utf-8")))
out(old(email.mime.text.MIMEText("Grüße", "plain", "iso-8859-1"), email.header.Header("Grüße", "iso-8859-1")))
out(old(email.mime.text.MIMEText("日本", "plain", "iso-2022-jp"), email.header.Header("日本", "iso-2022-jp")))
m = old(email.mime.multipart.MIMEMultipart("alternative"), "both")
m.attach(email.mime.text.MIMEText("hello", "plain", "utf-8"))
m.attach(email.mime.text.MIMEText(HTML, "html", "utf-8"))
out(m)
m = old(email.mime.multipart.MIMEMultipart(), "files")
m.preamble = "This is a multi-part message in MIME format.\n"
m.attach(email.mime.text.MIMEText("hello"))
for name in ("a.pdf", "a b.pdf", ("iso-8859-1", "", "Übersicht.pdf"), ("utf-8", "", "Übersicht 你好 mit einem recht langen Namen, der weiter und weiter geht.pdf")):
    p = email.mime.application.MIMEApplication(b"%PDF" * 100)
    p.add_header("Content-Disposition", "attachment", filename=name)
    m.attach(p)
p = email.mime.application.MIMEApplication(b"x", Name="named.bin")
p["Content-Disposition"] = 'attachment; filename="named.bin"'
m.attach(p)
m.attach(email.mime.image.MIMEImage(b"\x89PNG\r\n\x1a\n", "png", name="a.png"))
m.attach(email.mime.message.MIMEMessage(old(email.mime.text.MIMEText("inner"), "inner")))
out(m)
