# Checks the digest of a backup and that its archive can be read.
set -eu
sha256sum -c SHA256SUMS
tar -tzf backup.tar.gz >files.txt
