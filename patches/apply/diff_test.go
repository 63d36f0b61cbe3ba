package main

import (
	"strings"
	"testing"
)

const (
	file  = "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\n"
	patch = "numbers: say more\n\nWhy: a reason.\n\n--- a/dir/numbers.txt\n+++ b/dir/numbers.txt\n" +
		"@@ -1,3 +1,4 @@\n one\n-two\n+TWO\n+two and a half\n three\n" +
		"@@ -6,3 +7,2 @@ func context\n six\n-seven\n eight\n"
)

func TestApply(t *testing.T) {
	diffs, err := parse(patch)
	if err != nil {
		t.Fatal(err)
	}
	if len(diffs) != 1 || diffs[0].path != "dir/numbers.txt" {
		t.Fatalf("got %+v, want one change of dir/numbers.txt", diffs)
	}
	got, err := diffs[0].apply(file)
	if want := "one\nTWO\ntwo and a half\nthree\nfour\nfive\nsix\neight\n"; err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

// TestOnlyWhatFitsExactlyIsApplied: no fuzz and no offset. The error names the hunk and the
// line.
func TestOnlyWhatFitsExactlyIsApplied(t *testing.T) {
	for _, tt := range []struct{ name, file, want string }{
		{"the context differs", strings.Replace(file, "three", "3", 1), `hunk 1 (@@ -1,3 +1,4 @@) of dir/numbers.txt does not fit: line 3 is "3", the patch has "three"`},
		{"a removed line differs", strings.Replace(file, "seven", "7", 1), `hunk 2 (@@ -6,3 +7,2 @@) of dir/numbers.txt does not fit: line 7 is "7", the patch has "seven"`},
		{"spaces differ", strings.Replace(file, "six", "six ", 1), `hunk 2 (@@ -6,3 +7,2 @@) of dir/numbers.txt does not fit: line 6 is "six ", the patch has "six"`},
		{"it fits one line further down", "zero\n" + file, `line 1 is "zero", the patch has "one"`},
		{"a later hunk fits one line further down", strings.Replace(file, "four", "four\nfour and a half", 1), `hunk 2 (@@ -6,3 +7,2 @@) of dir/numbers.txt does not fit: line 6 is "five", the patch has "six"`},
		{"it is applied already", "one\nTWO\ntwo and a half\nthree\nfour\nfive\nsix\neight\n", `line 2 is "TWO", the patch has "two"`},
		{"the file ends early", "one\ntwo\nthree\nfour\nfive\nsix\n", "line 7 is"},
		{"the file ends before the hunk", "one\ntwo\nthree\n", "the file has no line 6"},
		{"the last line is not ended", strings.TrimSuffix(file, "\n"), `line 8 is "eight", the patch has "eight"`},
		{"lines end otherwise", strings.ReplaceAll(file, "\n", "\r\n"), `line 1 is "one\r", the patch has "one"`},
		{"the file is empty", "", "line 1 is"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			diffs, err := parse(patch)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := diffs[0].apply(tt.file); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %q, %v, want an error with %s", got, err, tt.want)
			}
		})
	}
}

func TestMalformedPatchesAreRefused(t *testing.T) {
	names := "--- a/f\n+++ b/f\n"
	for _, tt := range []struct{ name, patch, want string }{
		{"empty", "", "it changes no file"},
		{"only a reason", "Why: a reason.\n", "it changes no file"},
		{"no hunk", names, "f has no hunk"},
		{"a new file", "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "it changes no file"},
		{"a removed file", "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "want the names of one file"},
		{"a renamed file", "--- a/f\n+++ b/g\n@@ -1 +1 @@\n-x\n+y\n", "want the names of one file"},
		{"a file outside", "--- a/../../etc/passwd\n+++ b/../../etc/passwd\n@@ -1 +1 @@\n-x\n+y\n", "is not in the module"},
		{"an absolute path", "--- a//etc/passwd\n+++ b//etc/passwd\n@@ -1 +1 @@\n-x\n+y\n", "is not in the module"},
		{"too few lines", names + "@@ -1,2 +1,2 @@\n-x\n+y\n", "is cut short"},
		{"too many lines", names + "@@ -1 +1 @@\n-x\n+y\n+z\n", "want the names of one file"},
		{"a context line that is not counted", names + "@@ -1,2 +1 @@\n-x\n x\n x\n", "want the names of one file"},
		{"counts that do not agree", names + "@@ -1,1 +1,2 @@\n x\n x\n", "does not count its lines"},
		{"a header without numbers", names + "@@ x @@\n-x\n", "malformed header"},
		{"a binary file", names + "@@ -1 +1 @@\nGIT binary patch\n", `has the line "GIT binary patch"`},
		{"no newline at the end", names + "@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+y\n", "No newline"},
		{"a signature", names + "@@ -1 +1 @@\n-x\n+y\n-- \n2.39.5\n", "want the names of one file"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := parse(tt.patch); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %+v, %v, want an error with %s", got, err, tt.want)
			}
		})
	}
	t.Run("its lines do not move as it says", func(t *testing.T) {
		diffs, err := parse(names + "@@ -1 +2 @@\n-x\n+y\n")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := diffs[0].apply("x\n"); err == nil || !strings.Contains(err.Error(), "its first line would be 1") {
			t.Errorf("got %q, %v, want an error", got, err)
		}
	})
}
