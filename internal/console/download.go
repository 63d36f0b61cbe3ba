package console

import (
	"errors"
	"fmt"
	"mime"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"

	"postern/internal/store"
)

// errNoFile means that an action has no such file.
var errNoFile = fmt.Errorf("no such file: %w", store.ErrNotFound)

// download answers with bytes that a stranger chose. A browser must only save them: they
// have no type of their own, and the browser must not guess one. If it shows them all the
// same, nothing runs and they have no origin.
func download(w http.ResponseWriter, name string, data []byte) error {
	disposition := mime.FormatMediaType("attachment", map[string]string{"filename": safeName(name)})
	if disposition == "" {
		return errors.New("write the file's name") // unreachable: a safe name can be written
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", disposition)
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox; frame-ancestors 'none'")
	h.Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data) //nolint:gosec // saved, and not shown by a browser; the browser may be gone
	return nil
}

// maxName bounds the name of a file that is saved, in bytes, with room for what
// a browser adds.
const maxName = 120

// reserved lists names of devices on some systems, which stay devices with any extension.
var reserved = []string{"con", "prn", "aux", "nul", "com1", "com2", "com3", "com4", "com5", "com6", "com7", "com8", "com9", "lpt1", "lpt2", "lpt3", "lpt4", "lpt5", "lpt6", "lpt7", "lpt8", "lpt9"}

// safeName returns the name under which a file may be saved. The attacks: the name of a
// folder, a hidden file or a device, and letters that reverse the text after them, so that
// "invoice\u202efdp.exe" reads as a PDF.
func safeName(name string) string {
	name = strings.ToValidUTF8(name, "_")
	name = name[strings.LastIndexAny(name, `/\`)+1:]
	name = strings.Map(func(r rune) rune {
		switch {
		case strings.ContainsRune(`<>:"|?*%;`, r), unicode.IsControl(r), unicode.IsSpace(r) && r != ' ', !unicode.IsPrint(r):
			return '_'
		}
		return r
	}, name)
	name = strings.Trim(name, ". ")
	if len(name) > maxName {
		ext := filepath.Ext(name)
		if len(ext) > 16 {
			ext = ""
		}
		name = strings.TrimRight(strings.ToValidUTF8(name[:maxName-len(ext)], ""), ". ") + ext
	}
	stem, _, _ := strings.Cut(strings.ToLower(name), ".")
	for _, device := range reserved {
		if strings.TrimSpace(stem) == device {
			return "_" + name
		}
	}
	if name == "" {
		return "unnamed"
	}
	return name
}
