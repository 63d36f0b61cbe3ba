"""Halves a picture in the PPM format (P6) and writes it as PNG: resize.py IN.ppm OUT.png."""
import struct
import sys
import zlib

_, width, height, _, pixels = open(sys.argv[1], "rb").read().split(maxsplit=4)
width, height = int(width), int(height)
rows = []
for y in range(0, height - height % 2, 2):
    rows.append(b"\0" + b"".join(pixels[(y * width + x) * 3:][:3] for x in range(0, width - width % 2, 2)))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


with open(sys.argv[2], "wb") as out:
    out.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width // 2, height // 2, 8, 2, 0, 0, 0)))
    out.write(chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b""))
