package door

import (
	"mime"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"
)

// Download makes an answer something to keep, which no browser shows as a page of this
// server's or runs. The name is one of ours or from [FileName].
func Download(w http.ResponseWriter, contentType, name string) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	disposition := mime.FormatMediaType("attachment", map[string]string{"filename": name})
	if disposition == "" {
		disposition = "attachment"
	}
	h.Set("Content-Disposition", disposition)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// FileType returns the media type that a sender gave a file, unless it is one that
// browsers and mail programs run, or read as something else than a file.
func FileType(claimed string) string {
	const none = "application/octet-stream"
	t, _, err := mime.ParseMediaType(claimed)
	if err != nil {
		return none
	}
	top, sub, ok := strings.Cut(t, "/")
	if !ok || !slices.Contains([]string{"application", "audio", "font", "image", "text", "video"}, top) {
		return none
	}
	for _, runs := range []string{"html", "xml", "script", "css", "wasm", "multipart", "shockwave"} {
		if strings.Contains(sub, runs) {
			return none
		}
	}
	return t
}

// FileName returns a name that is safe to create in any folder.
func FileName(name string) string {
	// The attacks: .bashrc, a path, a device's name, "report.pdf ..", options of commands.
	name = strings.TrimRight(strings.Map(func(r rune) rune {
		if strings.ContainsRune(`/\:*?"<>|`, r) || r < ' ' {
			return '_'
		}
		return r
	}, name), ". ")
	if name == "" || strings.ContainsRune(".-~ ", rune(name[0])) {
		name = "_" + name
	}
	base, _, _ := strings.Cut(strings.ToUpper(name), ".")
	if isDevice(strings.TrimRight(base, " ")) {
		name = "_" + name
	}
	return name
}

// isDevice reports whether Windows has a device of this name, in capital letters, in
// every folder. It takes COM¹ for COM1.
func isDevice(name string) bool {
	switch name {
	case "CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$":
		return true
	}
	return utf8.RuneCountInString(name) == 4 && (strings.HasPrefix(name, "COM") || strings.HasPrefix(name, "LPT"))
}
