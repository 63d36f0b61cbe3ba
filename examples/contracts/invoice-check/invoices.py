"""Writes the invoices whose lines do not add up."""
import json

wrong = []
for invoice in json.load(open("invoices.json")):
    if sum(line["cents"] for line in invoice["lines"]) != invoice["total_cents"]:
        wrong.append(invoice["number"])
json.dump({"wrong": wrong}, open("wrong.json", "w"))
