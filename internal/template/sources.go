package template

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A source is a place to get packages of the template's release from.
type source struct {
	uri      string
	suite    string
	signedBy string // path of a keyring on the host, or empty
}

func (s source) line() string {
	if s.signedBy != "" {
		return fmt.Sprintf("deb [signed-by=%s] %s %s main\n", s.signedBy, s.uri, s.suite)
	}
	return fmt.Sprintf("deb %s %s main\n", s.uri, s.suite)
}

// public returns s without the user name and password in its URI: the host's
// credentials must not get into a sandbox.
func (s source) public() source {
	if u, err := url.Parse(s.uri); err == nil {
		u.User = nil
		s.uri = u.String()
	}
	return s
}

// hostSources returns the host's sources of the Debian release suite. Its other
// sources are ignored: a template must depend only on its recipe.
func hostSources(etcApt, suite string) ([]source, error) {
	files, err := filepath.Glob(filepath.Join(etcApt, "sources.list.d", "*"))
	if err != nil {
		return nil, err
	}
	var out []source
	for _, f := range append([]string{filepath.Join(etcApt, "sources.list")}, files...) {
		if !strings.HasSuffix(f, ".list") && !strings.HasSuffix(f, ".sources") {
			continue // apt ignores these files as well
		}
		b, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		out = append(out, parseSources(string(b), suite)...)
	}
	return out, nil
}

// parseSources parses a sources.list in either of apt's formats. It returns the
// sources of suite, its updates and its security fixes.
func parseSources(text, suite string) []source {
	var out []source
	add := func(uris, suites, components []string, signedBy string) {
		if !slices.Contains(components, "main") {
			return // other archives use Debian's suite names, too
		}
		if !strings.HasPrefix(signedBy, "/") {
			signedBy = "" // a key in the text; mmdebstrap finds Debian's own
		}
		for _, uri := range uris {
			if uri = resolveURI(uri); uri == "" {
				continue
			}
			for _, s := range suites {
				s = strings.TrimSuffix(s, "/")
				if src := (source{uri, s, signedBy}); (s == suite || s == suite+"-updates" || s == suite+"-security") && !slices.Contains(out, src) {
					out = append(out, src)
				}
			}
		}
	}
	for _, l := range lines(text) {
		if uri, suites, components, signedBy, ok := oneLine(l); ok {
			add([]string{uri}, []string{suites}, components, signedBy)
		}
	}
	for stanza := range strings.SplitSeq(strings.ReplaceAll(text, "\r\n", "\n"), "\n\n") {
		f := fields(stanza)
		if slices.Contains(strings.Fields(f["types"]), "deb") && !strings.EqualFold(f["enabled"], "no") {
			add(strings.Fields(f["uris"]), strings.Fields(f["suites"]), strings.Fields(f["components"]), f["signed-by"])
		}
	}
	return out
}

// oneLine parses "deb [options] uri suite component...".
func oneLine(l string) (uri, suite string, components []string, signedBy string, ok bool) {
	rest, ok := strings.CutPrefix(l, "deb ")
	if !ok {
		return "", "", nil, "", false
	}
	rest = strings.TrimSpace(rest)
	if o, ok := strings.CutPrefix(rest, "["); ok {
		opts, after, _ := strings.Cut(o, "]")
		rest = after
		for opt := range strings.FieldsSeq(opts) {
			if v, ok := strings.CutPrefix(opt, "signed-by="); ok {
				signedBy = v
			}
		}
	}
	f := strings.Fields(rest)
	if len(f) < 3 {
		return "", "", nil, "", false
	}
	return f[0], f[1], f[2:], signedBy, true
}

// fields parses one stanza of the deb822 format.
func fields(stanza string) map[string]string {
	f, last := map[string]string{}, ""
	for l := range strings.SplitSeq(stanza, "\n") {
		switch {
		case strings.HasPrefix(l, "#") || strings.TrimSpace(l) == "":
		case l[0] == ' ' || l[0] == '\t':
			f[last] += " " + strings.TrimSpace(l)
		default:
			k, v, _ := strings.Cut(l, ":")
			last = strings.ToLower(k)
			f[last] = strings.TrimSpace(v)
		}
	}
	return f
}

// resolveURI returns the URI to download from, or an empty string if there is none.
func resolveURI(uri string) string {
	// Debian's cloud images name a file with a list of mirrors.
	if path, ok := strings.CutPrefix(uri, "mirror+file:"); ok {
		b, err := os.ReadFile(filepath.Clean("/" + strings.TrimLeft(path, "/")))
		if l := lines(string(b)); err == nil && len(l) > 0 {
			uri = strings.Fields(l[0])[0]
		}
	}
	if u, err := url.Parse(uri); err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return "" // a disc or a directory of the host
	}
	return uri
}
