"""Writes a changelog of the repository in repo.bundle."""
import subprocess

subprocess.run(["git", "clone", "--quiet", "repo.bundle", "repo"], check=True)
log = subprocess.run(["git", "-C", "repo", "log", "--format=- %s"], check=True, capture_output=True, text=True)
open("CHANGELOG.md", "w").write("# Changes\n\n" + log.stdout)
