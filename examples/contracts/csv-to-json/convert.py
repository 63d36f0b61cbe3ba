"""Converts CSV to JSON: convert.py IN.csv OUT.json."""
import csv
import json
import sys

with open(sys.argv[1], newline="") as f, open(sys.argv[2], "w") as out:
    json.dump(list(csv.DictReader(f)), out, indent=1)
