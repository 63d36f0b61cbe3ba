"""Writes requirements.txt with the versions of releases.json, if only the last part grows."""
import json

releases = json.load(open("releases.json"))
lines = []
for line in open("requirements.in"):
    name, version = line.strip().split("==")
    new = releases.get(name, version)
    if new.split(".")[:2] == version.split(".")[:2]:
        version = new
    lines.append(f"{name}=={version}\n")
open("requirements.txt", "w").writelines(lines)
