"""Writes the text of a simple PDF: pdftext.py IN.pdf OUT.txt."""
import re
import sys
import zlib

data = open(sys.argv[1], "rb").read()
lines = []
for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.S):
    try:
        stream = zlib.decompress(stream)
    except zlib.error:
        pass
    lines += [text.decode("latin-1") for text in re.findall(rb"\((.*?)\)\s*Tj", stream)]
open(sys.argv[2], "w").write("\n".join(lines) + "\n")
