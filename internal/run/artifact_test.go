package run

import (
	"archive/zip"
	"bytes"
	"image"
	"image/png"
	"slices"
	"strings"
	"testing"

	"postern/internal/contract"
	"postern/internal/extract"
)

func TestShownPathsStayDistinct(t *testing.T) {
	seen := map[string]string{}
	for _, p := range []string{
		"/out/a.csv", "/out/ä.csv", "/out/a\nb.csv", `/out/a\nb.csv`, "/out/a\x1b[2Jb", "/out/\u202egnp.csv", "/out/a\u200bb.csv", "/out/ab.csv", "/out/\xff.csv", "/out/\ufffd.csv", `/out/\xff.csv`, "/out/a b.csv", "/out/a\u00a0b.csv", "/out/a\U000e0041b.csv",
	} {
		s := shownPath(p)
		if other, ok := seen[s]; ok {
			t.Errorf("%q and %q are both shown as %s", p, other, s)
		}
		seen[s] = p
		if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f || extract.Unseen(r) || r == 0x202e }) {
			t.Errorf("%q is shown as %q", p, s)
		}
	}
	if got := shownPath("/out/ä b.csv"); got != "/out/ä b.csv" {
		t.Errorf("an ordinary path is shown as %s", got)
	}
}

func TestDownloadNamesAreSafe(t *testing.T) {
	for path, want := range map[string]string{
		"/out/report.csv": "report.csv", "/out/../../etc/passwd": "passwd", "/out/.bashrc": "bashrc", "/out/--force": "force", "/out/a b\n.csv": "a_b_.csv",
		"/out/\u202evsc.exe": "_vsc.exe", "/out/CON.csv": "_CON.csv", "/out/..": "artifact-7", "/out/\xff\xfe": "artifact-7", "/out/com1": "_com1",
		"/out/" + strings.Repeat("x", 4096) + ".csv": strings.Repeat("x", 96) + ".csv", "/out/a\"; rm -rf.csv": "a___rm_-rf.csv",
	} {
		if got := downloadName(path, 7); got != want {
			t.Errorf("%.40q: %q, want %q", path, got, want)
		}
	}
}

func FuzzNames(f *testing.F) {
	f.Add("/out/a\n")
	f.Add("/out/\xff..")
	f.Fuzz(func(t *testing.T, p string) {
		n := downloadName(p, 1)
		if n == "" || len(n) > 110 || n[0] == '.' || n[0] == '-' || strings.ContainsFunc(n, func(r rune) bool { return r < '-' || r > 'z' || r == '/' || r == '\\' }) {
			t.Errorf("%q: %q", p, n)
		}
		if s := shownPath(p); strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("%q is shown as %q", p, s)
		}
	})
}

func picture(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, image.NewGray(image.Rect(0, 0, 2, 2))); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestContentMustMatchThePromisedType(t *testing.T) {
	var packed bytes.Buffer
	z := zip.NewWriter(&packed)
	if _, err := z.Create("a"); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	table := "id,name\n1,Anna\n2,\"Ben, B.\"\n"
	for _, tt := range []struct {
		name, promised, data string
		ok                   bool
	}{
		{"a table", "csv", table, true},
		{"a table with semicolons", "csv", "id;a;b\n1;2;\"x,y\"\n", true},
		{"a column", "csv", "id\n1\n2\n", true},
		{"a program as a table", "csv", "\x7fELF\x02\x01", false},
		{"a program behind the first rows", "csv", table + "\x7fELF\x02\x01\x00", false},
		{"a script as a table", "csv", "#!/bin/sh\nrm -rf /\n", false},
		{"JSON as a table", "csv", `{"PATH":"/bin"}`, false},
		{"a page as a table", "csv", "<html><script>1</script>", false},
		{"rows of different lengths", "csv", "a,b\n1,2,3\n", false},
		{"nothing as a table", "csv", "", false},
		{"an object", "json", `{"a":1}`, true},
		{"a truncated object", "json", `{"a":1`, false},
		{"a text as an object", "json", "hello", false},
		{"a text", "text", "hello\n", true},
		{"an empty text", "text", "", true},
		{"a script as a text", "text", "#!/usr/bin/env python3\n", false},
		{"escape sequences as a text", "text", "a\x1b]0;x\a", false},
		{"markdown", "markdown", "# Report\n", true},
		{"a page", "html", "<!doctype html><p>x", true},
		{"a table as a page", "html", table, false},
		{"a picture", "png", string(picture(t)), true},
		{"a picture with an archive behind it", "png", string(picture(t)) + packed.String(), false},
		{"a picture as a photo", "jpeg", string(picture(t)), false},
		{"an archive", "zip", packed.String(), true},
		{"a table as an archive", "zip", table, false},
		{"PDF", "pdf", "%PDF-1.7\n", true},
		{"parquet", "parquet", "PAR1xxxxxxxxPAR1", true},
		{"a truncated parquet file", "parquet", "PAR1xxxxxxxx", false},
		{"anything", "any", "\x7fELF", true},
	} {
		found, why := fits(tt.promised, []byte(tt.data))
		if (why == "") != tt.ok {
			t.Errorf("%s: %s, %q, want ok %v", tt.name, found, why, tt.ok)
		}
	}
	// Every type that a contract can name must be checked.
	for _, typ := range contract.Types() {
		if _, why := fits(typ, []byte("\x00\x01\x02")); why == "" && typ != typeAny {
			t.Errorf("type %s accepts anything", typ)
		}
	}
}

func TestScanFlagsSecretsAndPrograms(t *testing.T) {
	for _, tt := range []struct{ name, typ, data, flag string }{
		{"an environment dump that calls itself JSON", "json", `{"PATH":"/usr/bin:/bin","HOME":"/home/user","USER":"user"}`, "environment"},
		{"a placeholder of a secret", "text", "key pst_" + strings.Repeat("ab2c", 10), "secret"},
		{"a placeholder in binary data", "any", "\x00\x01pst_" + strings.Repeat("ab2c", 10) + "\x00", "secret"},
		{"a private key", "text", "-----BEGIN PRIVATE KEY-----\n" + strings.Repeat("MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcw\n", 10) + "-----END PRIVATE KEY-----\n", "private_key"},
		{"a program where anything goes", "any", "\x7fELF\x02\x01\x01", "program"},
		{"a script where anything goes", "any", "#!/bin/sh\n", "program"},
	} {
		s := scan(contract.Artifact{Type: tt.typ}, "/out/output.json", []byte(tt.data))
		if s.refused != "" || !slices.Contains(s.flags, tt.flag) {
			t.Errorf("%s: flags %v, findings %v, %s", tt.name, s.flags, s.findings, s.refused)
		}
	}
	if s := scan(contract.Artifact{Type: "csv"}, "/out/a.csv", []byte("id,name\n1,Anna\n")); s.refused != "" || len(s.flags) != 0 {
		t.Errorf("a table: %v", s)
	}
}

func FuzzPreview(f *testing.F) {
	f.Add("a,b\n1,2\n")
	f.Add(`{"a":1}`)
	f.Add("a\tb\n\"1\n2\"\t3\n")
	f.Fuzz(func(t *testing.T, data string) {
		for _, typ := range contract.Types() {
			found, why := fits(typ, []byte(data))
			text, _ := preview(typ, found, []byte(data))
			if why == "" && strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' }) {
				t.Errorf("%s: a control character is shown: %q", typ, text)
			}
		}
	})
}
