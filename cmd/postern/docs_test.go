package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	// docCommand matches a command line of this program in a block of code, behind
	// variables that are set for it.
	docCommand = regexp.MustCompile(`^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:bin/|/usr/local/bin/)?postern ([a-z-].*)$`)
	// shellWord matches a word of a command line: quoted parts and others.
	shellWord = regexp.MustCompile(`(?:'[^']*'|"[^"]*"|[^\s'"])+`)
)

// docCommands returns the command lines of this program in the code of a page, as
// words without "postern".
func docCommands(page string) (lines [][]string) {
	page = strings.ReplaceAll(page, "\\\n", " ")
	fenced := false
	for line := range strings.SplitSeq(page, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		m := docCommand.FindStringSubmatch(line)
		if m == nil || !fenced && !strings.HasPrefix(line, "    ") {
			continue
		}
		var words []string
		for _, w := range shellWord.FindAllString(m[1], -1) {
			if strings.HasPrefix(w, "#") || strings.ContainsAny(w[:1], "|<>&;") || strings.HasPrefix(w, "2>") {
				break
			}
			if w != "…" && w != "..." {
				words = append(words, strings.NewReplacer("'", "", `"`, "").Replace(w))
			}
		}
		lines = append(lines, words)
	}
	return lines
}

// TestDocumentedCommandsExist parses each command line in the documentation: the
// command is there, and so are its flags, with values that they take. The pages of
// the tutorial and the tasks are also run, by e2e.TestPagesRun.
func TestDocumentedCommandsExist(t *testing.T) {
	parsed := 0
	check := func(path string) {
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, words := range docCommands(string(page)) {
			parsed++
			root := newRoot()
			root.InitDefaultCompletionCmd()
			cmd, rest, err := root.Find(words)
			if err == nil && cmd == root {
				err = errUsage
			}
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			if err != nil {
				t.Errorf("%s: postern %s: %v", path, strings.Join(words, " "), err)
			}
			if left := cmd.Flags().Args(); cmd.HasSubCommands() && len(left) > 0 {
				t.Errorf("%s: postern %s: there is no %q", path, strings.Join(words, " "), left[0])
			}
		}
	}
	for _, path := range []string{"../../README.md", "../../SECURITY.md", "../../CONTRIBUTING.md"} {
		check(path)
	}
	err := filepath.WalkDir("../../docs", func(path string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".md" {
			check(path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if parsed < 100 {
		t.Errorf("found %d command lines", parsed)
	}
}
