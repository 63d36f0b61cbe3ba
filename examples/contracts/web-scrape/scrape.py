"""Saves the titles of one site's pages: scrape.py URL. It exits with 3 if the site is out of reach."""
import json
import re
import sys
import urllib.request

try:
    page = urllib.request.urlopen(sys.argv[1], timeout=20).read().decode()
except OSError as e:
    print(f"{sys.argv[1]}: {e}", file=sys.stderr)
    sys.exit(3)
json.dump(re.findall(r"<title>(.*?)</title>", page), open("titles.json", "w"))
