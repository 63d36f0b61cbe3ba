package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// A fileDiff is what a patch changes in one file.
type fileDiff struct {
	path  string // in the module, with slashes
	hunks []hunk
}

// A hunk replaces lines. Each of its lines begins with a space (context), "-" or "+".
type hunk struct {
	header   string
	from, to int // number of the first line, before and after
	lines    []string
}

var hunkHeader = regexp.MustCompile(`^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@`)

// parse reads a patch. It takes only what it can apply exactly: unified diffs of files that
// exist before and after. Text before the first diff is the patch's reason.
func parse(text string) ([]fileDiff, error) {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	i := 0
	for i < len(lines) && !strings.HasPrefix(lines[i], "--- a/") {
		i++
	}
	var out []fileDiff
	for i < len(lines) {
		name, isOld := strings.CutPrefix(lines[i], "--- a/")
		if !isOld || i+1 == len(lines) || lines[i+1] != "+++ b/"+name {
			return nil, fmt.Errorf("line %d is %q: want the names of one file, as --- a/FILE and +++ b/FILE", i+1, lines[i])
		}
		if !filepath.IsLocal(name) {
			return nil, fmt.Errorf("%q is not in the module", name)
		}
		d := fileDiff{path: name}
		i += 2
		for i < len(lines) && strings.HasPrefix(lines[i], "@@") {
			h, rest, err := parseHunk(lines[i:])
			if err != nil {
				return nil, fmt.Errorf("hunk %d of %s: %w", len(d.hunks)+1, name, err)
			}
			d.hunks = append(d.hunks, h)
			i = len(lines) - len(rest)
		}
		if len(d.hunks) == 0 {
			return nil, fmt.Errorf("%s has no hunk", name)
		}
		out = append(out, d)
	}
	if len(out) == 0 {
		return nil, errors.New("it changes no file")
	}
	return out, nil
}

// parseHunk reads a hunk and returns the lines after it.
func parseHunk(lines []string) (h hunk, rest []string, err error) {
	m := hunkHeader.FindStringSubmatch(lines[0])
	if m == nil {
		return h, nil, fmt.Errorf("malformed header %q", lines[0])
	}
	count := func(s string) int {
		if s == "" {
			return 1
		}
		n, _ := strconv.Atoi(s) // digits
		return n
	}
	h = hunk{header: m[0], from: count(m[1]), to: count(m[3])}
	before, after := count(m[2]), count(m[4])
	for rest = lines[1:]; before > 0 || after > 0; rest = rest[1:] {
		if len(rest) == 0 {
			return h, nil, fmt.Errorf("%s is cut short", h.header)
		}
		switch {
		case strings.HasPrefix(rest[0], " "):
			before, after = before-1, after-1
		case strings.HasPrefix(rest[0], "-"):
			before--
		case strings.HasPrefix(rest[0], "+"):
			after--
		default:
			return h, nil, fmt.Errorf("%s has the line %q", h.header, rest[0])
		}
		h.lines = append(h.lines, rest[0])
	}
	if before < 0 || after < 0 {
		return h, nil, fmt.Errorf("%s does not count its lines", h.header)
	}
	return h, rest, nil
}

// apply returns the file with the changes. The lines that are removed and those around
// them must be exactly what the patch says, at the line that it says: a change that fits
// elsewhere too might end up in a function that only looks similar.
func (d fileDiff) apply(content string) (string, error) {
	old := strings.SplitAfter(content, "\n")
	var out []string
	taken := 0 // lines of old
	for i, h := range d.hunks {
		fail := func(format string, a ...any) error {
			return fmt.Errorf("hunk %d (%s) of %s does not fit: %s", i+1, h.header, d.path, fmt.Sprintf(format, a...))
		}
		if h.from-1 < taken || h.from-1 > len(old) {
			return "", fail("the file has no line %d after the hunks before it", h.from)
		}
		out = append(out, old[taken:h.from-1]...)
		taken = h.from - 1
		if h.to != len(out)+1 {
			return "", fail("its first line would be %d", len(out)+1)
		}
		for _, line := range h.lines {
			kind, text := line[0], line[1:]+"\n"
			if kind == '+' {
				out = append(out, text)
				continue
			}
			if taken == len(old) || old[taken] != text {
				got := "the end of the file"
				if taken < len(old) {
					got = strconv.Quote(strings.TrimSuffix(old[taken], "\n"))
				}
				return "", fail("line %d is %s, the patch has %q", taken+1, got, line[1:])
			}
			if kind == ' ' {
				out = append(out, text)
			}
			taken++
		}
	}
	return strings.Join(append(out, old[taken:]...), ""), nil
}
