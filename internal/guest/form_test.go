package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"strings"
	"testing"
	"testing/iotest"
)

// parts reads a form and describes its parts. It stops at the first error.
func parts(src io.Reader, boundary string) (out []string, err error) {
	f := newForm(src, boundary)
	defer f.Close()
	for {
		p, err := f.next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if p.name == "skipped" {
			continue
		}
		var b bytes.Buffer
		if err := f.writeTo(&b); err != nil {
			return out, err
		}
		out = append(out, fmt.Sprintf("%q %q %q", p.name, p.filename, b.Bytes()))
	}
}

// library is parts by mime/multipart.
func library(src io.Reader, boundary string) (out []string, err error) {
	r := multipart.NewReader(src, boundary)
	for {
		p, err := r.NextRawPart()
		if err == io.EOF { //nolint:errorlint // an error that wraps it is a body that was cut off
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if p.FormName() == "skipped" {
			continue
		}
		b, err := io.ReadAll(p)
		if err != nil {
			return out, err
		}
		filename := ""
		if kind, params, err := mime.ParseMediaType(p.Header.Get("Content-Disposition")); err == nil && kind == "form-data" {
			filename = params["filename"]
		}
		out = append(out, fmt.Sprintf("%q %q %q", p.FormName(), filename, b))
	}
}

// same fails if the two readers differ, whatever the steps in which the body arrives.
func same(t *testing.T, body, boundary string) {
	t.Helper()
	want, wantErr := library(strings.NewReader(body), boundary)
	for name, src := range map[string]io.Reader{
		"whole":         strings.NewReader(body),
		"byte by byte":  iotest.OneByteReader(strings.NewReader(body)),
		"ends with EOF": iotest.DataErrReader(strings.NewReader(body)),
	} {
		if name == "byte by byte" && len(body) > 64<<10 {
			continue
		}
		got, err := parts(src, boundary)
		if len(got) != len(want) || strings.Join(got, "") != strings.Join(want, "") || (err == nil) != (wantErr == nil) {
			t.Errorf("%s: got %d parts %.300v, %v, want %d %.300v, %v", name, len(got), got, err, len(want), want, wantErr)
		}
	}
}

const disposition = "Content-Disposition: form-data; name=\"file\"; filename=\"/a/b\"\r\n\r\n"

var formSeeds = []string{
	"--b\r\n" + disposition + "content\r\n--b--\r\n",
	"--b\r\n" + disposition + "content\r\n--b--",
	"--b\r\n" + disposition + "content\r\n--b-- \t\r\nafter",
	"before\r\n--b \t\r\n" + disposition + "\r\n--b\r\n" + disposition + "--b\r\n" + disposition + "--b--",
	"--b\n" + disposition + "of LF\n--b\n\nx\r\n--b--\n--b--\n",
	"--b\r\n" + disposition + "\r\n--bc\r\n--b-c\r\n--b-\r\n--\r\n-\r\r\n--b\r\n\r\n\r\n\r\n--b--",
	"--b\r\n" + disposition + "--bc--b-\r\n--b--",
	"--b\r\n" + disposition + "cut\r\n--b",
	"--b\r\n" + disposition + "cut\r\n--b-",
	"--b\r\n" + disposition + "cut\r\n--",
	"--b\r\n" + disposition,
	"--b\r\nContent-Disposition: form-data; name=\"skipped\"\r\n\r\ncontent\r\n--b\r\nContent-Disposition: attachment; name=\"x\"\r\n\r\n1\r\n--b--",
	"--b\r\nContent-Disposition: form-data; name=\"skipped\"\r\n\r\ncut",
	"--b\r\n continued: first\r\n\r\n\r\n--b--",
	"--b\r\nA: b\r\n c\r\nB\r\n\r\n\r\n--b--",
	"--b\r\n\r\nheaderless\r\n--b\r\n\nLF\r\n--b--",
	"--b\r\nA: b\r\n\r\nx\r\n--b\r\njunk\r\n--b\r\n",
	"--b--\r\n",
	"--b\n",
	"",
}

// What a client sent must not depend on which program reads it: a proxy or a scanner
// that uses the library must see the same files.
func TestFormsAreReadAsTheLibraryReadsThem(t *testing.T) {
	for i, body := range formSeeds {
		t.Run(fmt.Sprint(i), func(t *testing.T) { same(t, body, "b") })
	}
	// Around the ends of the buffers, with what looks like a boundary everywhere.
	for _, size := range []int{maxFormLine - 2, maxFormLine - 1, maxFormLine, firstBuffer - 80, firstBuffer, bigBuffer - 120, bigBuffer + 4096} {
		for _, fill := range []string{"x", "\r\n", "\r\n--boundar", "\n--boundary-"} {
			content := strings.Repeat(fill, size/len(fill)+1)[:size]
			body := "--boundary\r\n" + disposition + content + "\r\n--boundary\r\n" + disposition + "more\r\n--boundary--\r\n"
			same(t, body, "boundary")
			if size <= firstBuffer {
				same(t, content+"\r\n"+body, "boundary")
			}
		}
	}
}

func TestFormsAreBounded(t *testing.T) {
	if _, err := parts(strings.NewReader("--b\r\nA: "+strings.Repeat("x", maxPartHeader)+"\r\n\r\n\r\n--b--"), "b"); err == nil {
		t.Error("a header without bound: got no error")
	}
	cut := errors.New("cut")
	if _, err := parts(io.MultiReader(strings.NewReader("--b\r\n"+disposition+"x"), iotest.ErrReader(cut)), "b"); !errors.Is(err, cut) {
		t.Errorf("the connection has ended: got %v", err)
	}
}

func FuzzForm(f *testing.F) {
	for _, s := range formSeeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) < maxPartHeader {
			same(t, string(body), "b")
		}
	})
}
