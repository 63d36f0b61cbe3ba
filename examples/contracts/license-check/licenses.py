"""Writes which packages have a license that is not on the list. It exits with 1 if one has."""
import json
import pathlib

allowed = {"MIT", "BSD-3-Clause", "Apache-2.0"}
bad = []
for path in sorted(pathlib.Path("packages").glob("*.json")):
    package = json.loads(path.read_text())
    if package["license"] not in allowed:
        bad.append(package)
json.dump(bad, open("licenses.json", "w"))
raise SystemExit(bool(bad))
