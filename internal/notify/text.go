package notify

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/mail"
	"postern/internal/oversight"
)

// What of an action is said outside. An agent chooses recipients, and with them
// their domains; a mail program and a chat make links of what looks like one.
// The attack: a notice whose domain is a link to a page that looks like the
// console. So nothing of an agent's is written but what inert returns.

// defang returns s as one line that no program makes a link, an address, a
// mention or a command of, of at most most octets.
func defang(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r <= ' ' || r >= utf8.RuneSelf || r == 0x7f { // names are ASCII here; what is not, or hides, is shown as not
			return '?'
		}
		return r
	}, truncate(s, most))
	return strings.NewReplacer(".", "[.]", "@", " (at) ", ":", "[:]", "/", "[/]", "#", "?", "<", "?", ">", "?", "&", "?", `"`, "?").Replace(s)
}

// truncate returns at most most octets of s, and says so.
func truncate(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}

// kindInWords names an action's kind in words.
func kindInWords(a oversight.Action) string {
	if s := a.Kind.Subject(); s != "" {
		return s
	}
	return "Something of kind " + defang(string(a.Kind), 40)
}

// maxDomains is how many domains a notice names.
const maxDomains = 5

// A field is one line of a notice.
type field struct{ name, value string }

// actionFields are what a notice says of an action. They hold nothing that an agent
// wrote but domains and the name of an inbox, both inert.
func actionFields(a oversight.Action) []field {
	var out []field
	add := func(name, format string, args ...any) { out = append(out, field{name, fmt.Sprintf(format, args...)}) }
	inbox := a.Request.Inbox
	if inbox == "" {
		inbox = a.Inbox
	}
	if inbox != "" {
		add("inbox", "%s", defang(inbox, 120))
	}
	if to := a.Request.To; len(to) > 0 {
		var domains []string
		for _, r := range to {
			if d := defang(mail.Domain(r), 80); !slices.Contains(domains, d) {
				domains = append(domains, d)
			}
		}
		more := ""
		if len(domains) > maxDomains {
			more = fmt.Sprintf(" and %d more", len(domains)-maxDomains)
			domains = domains[:maxDomains]
		}
		add("recipients", "%d, at %s%s", len(to), strings.Join(domains, ", "), more)
	}
	if n := len(a.Request.Files); n > 0 {
		add("files", "%d", n)
	}
	if flags := a.Request.Flags; len(flags) > 0 {
		var names []string
		for _, f := range flags[:min(len(flags), 10)] {
			names = append(names, defang(f, 40))
		}
		add("found in it", "%s", strings.Join(names, ", "))
	}
	if a.Approvers > 1 {
		add("approvals", "%d of %d so far", a.Approvals, a.Approvers)
	}
	if a.StepUp {
		add("second factor", "needed, so it is decided in the console")
	}
	if !a.Expires.IsZero() {
		add("decide until", "%s, then it is denied", a.Expires.UTC().Format("Mon 2 Jan 2006 15:04 MST"))
	}
	add("digest", "%s, version %d", prefix(a), a.Version)
	return out
}

// prefixLen is how many digits of a digest are told, and are in a button.
const prefixLen = 16

func prefix(a oversight.Action) string { return a.Hex()[:min(prefixLen, len(a.Hex()))] }

// headline says in a sentence why a person is told.
func headline(p outgoing) string {
	switch {
	case p.others > 0:
		return plural(p.others) + " more wait for a decision"
	case p.kind == kindReminder:
		return kindInWords(p.action) + " still waits for your decision"
	case p.kind == kindUnclaimed, p.kind == kindUnclaimedReminder:
		return kindInWords(p.action) + " waits, and nobody whom the policy asks is there"
	}
	return kindInWords(p.action) + " waits for your decision"
}

func plural(n int) string {
	if n == 1 {
		return "1 action"
	}
	return strconv.Itoa(n) + " actions"
}

// outcome says what became of an action that a notice was about, by the version
// that it was about.
func outcome(a oversight.Action, version int64) string {
	by := ""
	if name, ok := a.Person(); ok {
		by = " by " + defang(name, 80)
	}
	switch a.State {
	case oversight.Pending, oversight.Scheduled:
		if a.Version != version {
			return "It was written anew since, and is asked about anew."
		}
	case oversight.Denied:
		switch {
		case by != "":
			return "Rejected" + by + "."
		case a.Lapsed():
			return "Nobody decided in time: it is denied."
		}
		return "Stopped by policy or by a switch."
	case oversight.Cancelled:
		return "It was taken back before it was decided."
	case oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown:
		if by != "" {
			return "Approved" + by + "."
		}
		return "Let go by policy."
	}
	return "It still waits."
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }
