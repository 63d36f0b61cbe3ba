# Attacks on the servers of one allowed host, from inside a sandbox: see
# TestRoundTheWall. All cases come from one seed. The argument is a domain that
# the mail server takes mail for.
import concurrent.futures
import random
import socket
import sys

domain = sys.argv[1]


def play(port, pieces, turns):
    """Sends pieces, waiting a moment after each if turns is set."""
    try:
        s = socket.create_connection(("good.test", port), timeout=20)
    except OSError:
        return
    try:
        for p in pieces:
            s.sendall(p)
            if turns:
                s.settimeout(0.05)
                try:
                    s.recv(65536)
                except TimeoutError:
                    pass
                s.settimeout(20)
        s.shutdown(socket.SHUT_WR)
        while s.recv(65536):
            pass
    except OSError:
        pass
    finally:
        s.close()


def mail(r):
    eol = r.choice([b"\r\n", b"\r\n", b"\n"])
    junk = [
        b"HELP" + eol, b"XYZZY" + eol, b"AUTH PLAIN AGEAYg==" + eol, b"\0", b" " * 70, b"\r\n" * 15, b"get /" + eol, b"\0" + eol,
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 25\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x00\x05hello" + eol, b"a" * 2100 + eol, b"USER x" + eol,
        b"NOOP" + eol, b"RSET" + eol, b"HELLO" + eol, b"*1\r\n$4\r\nPING\r\n", b"\x05\x01\x00" + eol, b"\xff\xfb\x01" + eol, b"GET / HTTP/1.1\r\n",
    ]
    parts = [r.choice(junk) for _ in range(r.randrange(4))]

    def say(word, arg):
        if r.randrange(3) == 0:
            word = word.lower()
        parts.append(r.choice([b"", b"", b" ", b"\t"]) + word + arg + eol)

    say(r.choice([b"EHLO", b"HELO"]), b" x.example")
    say(b"MAIL", b" FROM:<a@x.example>")
    say(b"RCPT", r.choice([b" TO:<", b"\tTO:<", b" to: <"]) + b"b@" + domain.encode() + b">")
    say(b"DATA", b"")
    parts.append(b"Subject: round the wall\r\n\r\nsecret\r\n.\r\n")
    turns = r.randrange(2) == 0
    return r.choice([2526, 2526, 443, 80]), parts if turns else [b"".join(parts)], turns


def web(r):
    def odd(usual, *others):
        return usual if r.randrange(5) else r.choice(others)

    def request(host):
        g = b"good.test"
        eol = odd(b"\r\n", b"\n")
        method = odd(r.choice([b"GET", b"POST"]), b"get", b"M-SEARCH", b"VERSION-CONTROL", b"HEAD", b"OPTIONS", b"X")
        target = odd(b"/x", b"http://" + host + b"/x", b"http://" + g + b"@" + host + b"/", b"//" + host + b"/", b"HTTP://" + host)
        s = odd(b"", b"\r\n", b"\n", b" ", b"\r\n\r\n") + method + odd(b" ", b"\t", b"  ") + target + odd(b" HTTP/1.1", b" HTTP/1.0", b"") + eol
        s += odd(
            b"Host: " + host + eol, b"Host: " + host + b":80@" + g + eol, b"Host: " + g + b"\rHost: " + host + eol, b"Host : " + host + eol,
            b"Host: " + g + eol + b"Host: " + host + eol, b"host:" + host + b"." + eol, b"Host: " + g + b"\nHost: " + host + eol, b"", b"Host: " + host + b"\0" + eol,
            b"X: y" + eol + b" Host: " + host + eol + b"Host: " + g + eol)
        inner = b"GET /i HTTP/1.1\r\nHost: evil.test\r\n\r\n"
        k = r.randrange(8)
        if k == 0:
            s += b"Content-Length: " + odd(str(len(inner)).encode(), b"0", b"+5", b"5, 5", b"-1") + eol + eol + inner
        elif k == 1:
            s += odd(b"Transfer-Encoding: chunked", b"Transfer-Encoding : chunked", b"Transfer_Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 3") + eol + eol
            s += odd(b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner), b"5\nhello\n0\n\n" + inner, b"0x5\r\nhello\r\n0\r\n\r\n", b"0\r\nHost: evil.test\r\n\r\n", b"0\r\n\r\n" + inner)
        elif k == 2:
            s += b"Upgrade: " + r.choice([b"h2c", b"websocket"]) + eol + b"Connection: Upgrade" + eol + eol
        else:
            s += eol
        return s

    hosts = [b"good.test"] * r.randrange(4)
    hosts.insert(r.randrange(len(hosts) + 1), b"evil.test")
    parts = [request(h) for h in hosts]
    turns = r.randrange(2) == 0
    return 80, parts if turns else [b"".join(parts)], turns


cases = [mail(random.Random(i)) for i in range(200)] + [web(random.Random(i)) for i in range(500)]
socket.gethostbyname("good.test")
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    list(pool.map(lambda c: play(*c), cases))
print("attacked", len(cases), "times")
