"""Saves the contacts of an API: export.py URL. The wall adds the token. It exits with 3 if the API is out of reach."""
import json
import sys
import urllib.request

try:
    answer = urllib.request.urlopen(sys.argv[1], timeout=20).read()
except OSError as e:
    print(f"{sys.argv[1]}: {e}", file=sys.stderr)
    sys.exit(3)
json.dump(json.loads(answer), open("contacts.json", "w"))
