"""Writes the words of a text that are not in a list of words."""
import re

known = set(open("words.txt").read().split())
text = open("text.md").read().lower()
unknown = sorted({word for word in re.findall(r"[a-z]+", text) if word not in known})
open("unknown.txt", "w").write("\n".join(unknown) + "\n")
