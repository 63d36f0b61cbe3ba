"""Writes the keys that a translation lacks, and placeholders that differ."""
import json
import re

en, de = json.load(open("en.json")), json.load(open("de.json"))
found = {"missing": sorted(en.keys() - de.keys()), "placeholders": []}
for key in sorted(en.keys() & de.keys()):
    if sorted(re.findall(r"{\w+}", en[key])) != sorted(re.findall(r"{\w+}", de[key])):
        found["placeholders"].append(key)
json.dump(found, open("translations.json", "w"))
