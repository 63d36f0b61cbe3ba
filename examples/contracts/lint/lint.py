"""Compiles each file and writes what does not."""
import pathlib

found = []
for path in sorted(pathlib.Path("src").rglob("*.py")):
    try:
        compile(path.read_text(), str(path), "exec")
    except SyntaxError as e:
        found.append(f"{path}:{e.lineno}: {e.msg}")
open("lint.txt", "w").write("\n".join(found) + "\n")
