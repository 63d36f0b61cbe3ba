"""Sums the sales of each region: report.py IN.csv OUT.csv."""
import csv
import sys

totals = {}
with open(sys.argv[1], newline="") as f:
    for row in csv.DictReader(f):
        totals[row["region"]] = totals.get(row["region"], 0) + int(row["units"]) * int(row["cents"])
with open(sys.argv[2], "w", newline="") as f:
    out = csv.writer(f)
    out.writerow(["region", "cents"])
    out.writerows(sorted(totals.items()))
