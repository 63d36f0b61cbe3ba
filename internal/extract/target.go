package extract

import (
	"net/netip"
	"net/url"
	"strings"
)

// A Target is where a link leads.
type Target struct {
	Scheme   string // lower case
	Host     string // lower case, without port; empty for schemes without one
	Userinfo bool   // has a name before the host, which phishing uses: https://bank.example@evil.example
	IP       bool   // the host is an IP address, in any spelling that browsers accept
	Query    string
	Path     string // with the query and the fragment
}

// ParseTarget reads a link as leniently as browsers do. ok is false for links
// without a scheme.
func ParseTarget(s string) (t Target, ok bool) {
	s = strings.Map(func(r rune) rune { // browsers drop these
		if r == '\t' || r == '\n' || r == '\r' {
			return -1
		}
		return r
	}, strings.TrimSpace(s))
	if len(s) > 8000 {
		s = Cut(s, 8000)
	}
	s = strings.ReplaceAll(s, `\`, "/")
	if strings.HasPrefix(s, "//") {
		s = "https:" + s
	}
	scheme, rest, found := strings.Cut(s, ":")
	scheme = strings.ToLower(scheme)
	if !found || strings.ContainsAny(scheme, "/?#. ") {
		return Target{}, false
	}
	t.Scheme = scheme
	if scheme != "http" && scheme != "https" && scheme != "ftp" {
		return t, true
	}
	rest = strings.TrimLeft(rest, "/")
	i := strings.IndexAny(rest, "/?#")
	authority := rest
	if i >= 0 {
		authority = rest[:i]
		t.Path = rest[i:]
		if _, q, ok := strings.Cut(rest[i:], "?"); ok {
			t.Query = q
		}
	}
	if j := strings.LastIndexByte(authority, '@'); j >= 0 {
		t.Userinfo = true
		authority = authority[j+1:]
	}
	host := authority
	if k := strings.LastIndexByte(host, ':'); k >= 0 && !strings.HasSuffix(host, "]") && strings.Trim(host[k+1:], "0123456789") == "" {
		host = host[:k]
	}
	if u, err := url.PathUnescape(host); err == nil {
		host = u
	}
	t.Host = strings.TrimSuffix(strings.ToLower(host), ".")
	t.IP = isIP(t.Host)
	return t, true
}

// isIP accepts the spellings that only browsers do as well: 0x7f000001, 2130706433.
func isIP(host string) bool {
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	if host == "" || host[0] < '0' || host[0] > '9' {
		return false
	}
	return strings.Trim(strings.TrimPrefix(host, "0x"), "0123456789abcdef.x") == "" && strings.Trim(host[strings.LastIndexByte(host, '.')+1:], "0123456789abcdefx") == "" &&
		(strings.HasPrefix(host, "0x") || strings.Trim(host, "0123456789.") == "")
}

// RegisteredDomain returns the registered part of a host: its last two labels, or
// three under the usual second-level suffixes of countries ("co.uk"). The Public
// Suffix List would be exact; it is 200 KB that every process would load.
func RegisteredDomain(host string) string {
	labels := strings.Split(host, ".")
	n := len(labels)
	if n <= 2 {
		return host
	}
	if len(labels[n-1]) == 2 {
		switch labels[n-2] {
		case "co", "com", "org", "net", "gov", "ac", "edu", "or", "ne", "go", "gob", "gouv", "mil", "in":
			return strings.Join(labels[n-3:], ".")
		}
	}
	return strings.Join(labels[n-2:], ".")
}

// HostIn returns the host that the words of a link show, or "".
func HostIn(text string) string {
	text = strings.ToLower(strings.TrimSpace(text))
	if len(text) > 300 {
		return ""
	}
	for w := range strings.FieldsSeq(text) {
		w = strings.Trim(w, `<>()[]"'.,;!`)
		web := strings.HasPrefix(w, "http://") || strings.HasPrefix(w, "https://") || strings.HasPrefix(w, "www.")
		if strings.ContainsRune(w, '@') && !web {
			continue
		}
		if !web {
			// A bare name is one only where nothing else is said: "Node.js".
			if strings.ContainsAny(text, " ") || !strings.ContainsRune(w, '.') {
				continue
			}
			w = "https://" + w
		} else if strings.HasPrefix(w, "www.") {
			w = "https://" + w
		}
		t, ok := ParseTarget(w)
		if !ok || !strings.Contains(t.Host, ".") {
			continue
		}
		top := t.Host[strings.LastIndexByte(t.Host, '.')+1:]
		if len(top) < 2 || strings.Trim(top, "abcdefghijklmnopqrstuvwxyz") != "" && !t.IP {
			continue
		}
		switch top {
		case "js", "py", "go", "md", "txt", "pdf", "doc", "docx", "xls", "xlsx", "csv", "png", "jpg", "zip", "html", "php", "exe", "json":
			if !web {
				continue
			}
		}
		return t.Host
	}
	return ""
}
