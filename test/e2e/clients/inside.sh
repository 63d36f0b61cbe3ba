# The same as inside.py, with curl. Argument: the address of the server.
set -eu
base=$1
ask() { curl -sS --fail-with-body "$@"; }
field() { python3 -c 'import json, sys
v = json.load(sys.stdin)
for k in sys.argv[1].split("."): v = v[int(k)] if k.isdigit() else v[k]
print(v)' "$1"; }
[ "$(ask "$base/v1/me" | field can_read)" = True ]
mark=$(ask "$base/v1/inboxes/me/messages/wait?timeout=0" | field after)
action=$(ask -H 'Content-Type: application/json' -d '{"to": ["bob@example.com"], "subject": "curl at '"$base"'", "text": "Hello"}' "$base/v1/inboxes/me/messages" | field id)
while [ "$(ask "$base/v1/actions/$action?wait=60" | field state)" = pending ]; do :; done
id=
while [ -z "$id" ]; do
  got=$(ask "$base/v1/inboxes/me/messages/wait?timeout=60&after=$mark")
  mark=$(echo "$got" | field after)
  id=$(echo "$got" | python3 -c 'import json, sys
print(*[m["id"] for m in json.load(sys.stdin)["messages"] if m["subject"] == "Re: curl at '"$base"'"])')
done
[ "$(ask "$base/v1/inboxes/me/messages/$id" | field text)" = "Hello robot" ]
echo answered $(ask -H 'Content-Type: application/json' -d '{"text": "Hello back"}' "$base/v1/inboxes/me/messages/$id/reply" | field status)
