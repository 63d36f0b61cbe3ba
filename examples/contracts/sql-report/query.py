"""Loads orders into SQLite and writes the sum of each customer."""
import csv
import sqlite3

db = sqlite3.connect(":memory:")
db.execute("create table orders (customer text, cents integer)")
with open("orders.csv", newline="") as f:
    db.executemany("insert into orders values (?, ?)", csv.reader(f))
with open("sums.csv", "w", newline="") as f:
    csv.writer(f).writerows(db.execute("select customer, sum(cents) from orders group by customer order by customer"))
