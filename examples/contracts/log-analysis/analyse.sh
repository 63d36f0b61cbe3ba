# Counts the status codes of a web server's log, the most frequent first.
set -eu
cut -d ' ' -f 2 access.log | sort | uniq -c | sort -rn >statuses.txt
