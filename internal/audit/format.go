package audit

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// details returns the detail of e as fields, or under the name detail if it has none.
func (e *Entry) details() Fields {
	var f Fields
	if err := json.Unmarshal([]byte(e.Detail), &f); err != nil {
		return Fields{"detail": e.Detail}
	}
	return f
}

// CEF returns e, recorded with hash, as a line of the Common Event Format without its
// end. It is for display: an entry cannot be verified from it.
func CEF(e Entry, hash Digest, version string) string {
	var b strings.Builder
	head := strings.NewReplacer(`\`, `\\`, `|`, `\|`, "\n", " ", "\r", " ")
	value := strings.NewReplacer(`\`, `\\`, `=`, `\=`, "\n", `\n`, "\r", `\r`)
	fmt.Fprintf(&b, "CEF:0|Postern|postern|%s|%s|%s|%d|", head.Replace(version), head.Replace(string(e.Verb)), head.Replace(string(e.Verb)), 10-e.Verb.Severity()-1)
	pair := func(k, v string) {
		if v != "" {
			fmt.Fprintf(&b, "%s=%s ", k, calm(value.Replace(v)))
		}
	}
	pair("rt", strconv.FormatInt(e.At.UnixMilli(), 10))
	pair("externalId", strconv.FormatInt(e.Seq, 10))
	pair("suser", e.Actor)
	pair("cs1Label", "project")
	pair("cs1", e.Project)
	if e.Object != "" {
		pair("cs2Label", "object")
		pair("cs2", e.Object)
	}
	pair("cs3Label", "hash")
	pair("cs3", hex.EncodeToString(hash[:]))
	f := e.details()
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(f)) {
		parts = append(parts, k+": "+f[k])
	}
	pair("msg", strings.Join(parts, "; "))
	return strings.TrimSuffix(b.String(), " ")
}

// structured is the name of the element with an entry's fields in syslog. Its number
// is the one reserved for documentation (RFC 5612), since this program has no
// registered one.
const structured = "postern@32473"

// Syslog returns e, recorded with hash, as a message of RFC 5424 from host,
// facility 13 (log audit). Its text is the line of an export, so that a log of these
// messages can be verified. If the message would be longer than limit bytes, which
// receivers may cut, that line is left out.
func Syslog(e Entry, hash Digest, host string, limit int) ([]byte, error) {
	line, err := MarshalLine(e, hash)
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "<%d>1 %s %s postern - %s [%s seq=\"%d\"", 13*8+int(e.Verb.Severity()), e.At.UTC().Format(lineTime), name(host, 255), name(string(e.Verb), 32), structured, e.Seq)
	value := strings.NewReplacer(`\`, `\\`, `"`, `\"`, `]`, `\]`, "\n", " ", "\r", " ", "\x00", " ")
	for _, p := range [][2]string{{"project", e.Project}, {"actor", e.Actor}, {"object", e.Object}, {"hash", hex.EncodeToString(hash[:])}} {
		if p[1] != "" {
			fmt.Fprintf(&b, ` %s="%s"`, p[0], calm(value.Replace(p[1])))
		}
	}
	if b.Len()+len(line)+1 > limit {
		fmt.Fprintf(&b, ` omitted="%d"]`, len(e.Detail))
		return []byte(b.String()), nil
	}
	b.WriteString("] ")
	b.Write(line)
	return []byte(b.String()), nil
}

// calm returns s with invisible characters replaced by spaces. The attack: a name or a
// reason with control characters that a terminal obeys, or that a reader of lines takes
// for the end of one.
func calm(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// name makes s a field of a syslog header: printable ASCII without spaces.
func name(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, s)
	if len(s) > most {
		s = s[:most]
	}
	if s == "" {
		return "-"
	}
	return s
}
