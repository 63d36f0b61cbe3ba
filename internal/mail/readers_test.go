package mail

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// A reading is what somebody else's mail program shows of a message.
type reading struct {
	Words []string
	HTML  string
	Files []struct{ Name, SHA256, Text string }
	Error string
}

// reader starts a program of test/mail that reads messages, and returns a
// function that has it read one.
func reader(t *testing.T, name string, args ...string) func(raw []byte) map[string]reading {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
	})
	enc, dec := json.NewEncoder(in), json.NewDecoder(out)
	return func(raw []byte) (r map[string]reading) {
		if err := enc.Encode(map[string][]byte{"raw": raw}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := dec.Decode(&r); err != nil {
			t.Fatalf("%s: %v (test/install-npm test/mail installs what it needs)", name, err)
		}
		return r
	}
}

// TestOthersShowNothingMore: whatever npm's mailparser and postal-mime and
// Python's email show a recipient of a message that is let in, its reviewer was
// shown: each word that was hidden in it, and each file by its digest.
func TestOthersShowNothingMore(t *testing.T) {
	if _, err := os.Stat("../../test/mail/node_modules/postal-mime"); err != nil {
		t.Fatalf("%v: test/install-npm test/mail installs it", err)
	}
	readers := []func([]byte) map[string]reading{
		reader(t, "node", "../../test/mail/readers.mjs"),
		reader(t, "python3", "../../test/mail/readers.py"),
	}
	wrong := 0
	eachGenerated(t, 500, 2, func(g *generator, e Envelope, s Summary) {
		if wrong > 5 {
			return
		}
		seen := shownToReviewer(s)
		m, err := Parse(e.Raw)
		if err != nil {
			t.Fatal(err)
		}
		for _, read := range readers {
			for program, r := range read(e.Raw) {
				if problem := shownMore(r, seen, m, s); problem != "" {
					wrong++
					t.Errorf("%s shows the recipient %s, and the reviewer did not see it:\n%s\n--- shown:\n%s\n", program, problem, e.Raw, seen)
				}
			}
		}
	})
}

// shownMore returns what a program shows that the reviewer was not shown.
func shownMore(r reading, seen string, m Message, s Summary) string {
	// All of the HTML, not only what we take for its words.
	words := hiddenWord.FindAllString(strings.ToLower(strings.Join(r.Words, "\n")+"\n"+r.HTML), -1)
	for _, f := range r.Files {
		words = append(words, hiddenWord.FindAllString(strings.ToLower(f.Name), -1)...)
	}
	for _, w := range words {
		if !strings.Contains(seen, w) && !noted(s, m, w) {
			return "the word " + w
		}
	}
	for _, f := range r.Files {
		if strings.Contains(seen, f.SHA256) || slices.ContainsFunc(m.Attachments, func(a Attachment) bool { return sameFile(a, f.SHA256) }) || noted(s, m, "") {
			continue
		}
		// It is what the reviewer read, or a part of it or of a file, as this program
		// writes it down.
		words := hiddenWord.FindAllString(strings.ToLower(f.Text), -1)
		if len(words) == 0 && len(strings.TrimSpace(f.Text)) > 40 {
			return "the file " + quote(f.Name) + " with the digest " + f.SHA256
		}
		for _, w := range words {
			if !strings.Contains(seen, w) && !slices.ContainsFunc(m.Attachments, func(a Attachment) bool { return strings.Contains(strings.ToLower(string(a.Data)), w) }) {
				return "the word " + w + " in the file " + quote(f.Name)
			}
		}
	}
	return ""
}

// sameFile compares digests, but for how the lines end: programs write their own
// line ends into files that are text.
func sameFile(a Attachment, sum string) bool {
	if a.Digest() == sum {
		return true
	}
	lf := strings.ReplaceAll(string(a.Data), "\r\n", "\n")
	for _, v := range []string{lf, strings.TrimRight(lf, "\n"), lf + "\n", strings.TrimRight(string(a.Data), "\r\n"), string(a.Data) + "\r\n"} {
		if digest([]byte(v)) == sum {
			return true
		}
	}
	return false
}

// noted reports whether a person is asked in every mode, and is told, since a
// message in the message is not read alike. What a program shows of that one
// cannot be said; of all other files the words are looked for.
func noted(s Summary, m Message, w string) bool {
	told := func(what string) bool {
		return slices.ContainsFunc(s.Notes, func(n string) bool { return strings.Contains(n, "what is not shown here") && strings.Contains(n, what) })
	}
	return told("message") || told("") && slices.ContainsFunc(m.Attachments, func(a Attachment) bool { return strings.Contains(strings.ToLower(string(a.Data)), w) })
}
