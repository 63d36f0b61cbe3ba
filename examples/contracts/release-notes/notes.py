"""Groups the commits of a release into notes."""
groups = {"feat": [], "fix": []}
for line in open("commits.txt"):
    kind, _, text = line.strip().partition(": ")
    if kind in groups:
        groups[kind].append(text)
with open("notes.md", "w") as out:
    for kind, title in (("feat", "New"), ("fix", "Mended")):
        out.write(f"## {title}\n\n" + "".join(f"- {text}\n" for text in groups[kind]) + "\n")
