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

// This file has the text of notices. An agent chooses recipients, and with them their
// domains. Mail programs and chats turn text that looks like a link into one. The attack: a
// recipient's domain becomes a link to a page that looks like the console. So text of agents
// is only written through defang.

// defang returns s as one line of at most most octets that no program turns into
// a link, an address, a mention or a command.
func defang(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r <= ' ' || r >= utf8.RuneSelf || r == 0x7f { // names are ASCII here; any other or invisible character becomes ?
			return '?'
		}
		return r
	}, truncate(s, most))
	return strings.NewReplacer(".", "[.]", "@", " (at) ", ":", "[:]", "/", "[/]", "#", "?", "<", "?", ">", "?", "&", "?", `"`, "?").Replace(s)
}

// truncate returns at most most octets of s, followed by "..." if it cut any off.
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

// actionFields returns the lines of a notice about an action. The only text from an
// agent in them is domains and the name of an inbox, both defanged.
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
		add("findings", "%s", strings.Join(names, ", "))
	}
	if a.Approvers > 1 {
		add("approvals", "%d of %d so far", a.Approvals, a.Approvers)
	}
	if a.StepUp {
		add("second factor", "required, so decide in the console")
	}
	if !a.Expires.IsZero() {
		add("decide until", "%s, then it is denied", a.Expires.UTC().Format("Mon 2 Jan 2006 15:04 MST"))
	}
	add("digest", "%s, version %d", prefix(a), a.Version)
	return out
}

// prefixLen is how many digits of a digest a notice and a button carry.
const prefixLen = 16

// prefix returns the first digits of a's digest.
func prefix(a oversight.Action) string { return a.Hex()[:min(prefixLen, len(a.Hex()))] }

// headline returns a sentence that says why the notice is sent.
func headline(p outgoing) string {
	switch {
	case p.others > 0:
		return plural(p.others) + " wait for a decision"
	case p.kind == kindEscalated:
		return kindInWords(p.action) + " waits, and nobody has decided on it"
	case p.kind == kindReminder:
		return kindInWords(p.action) + " still waits for your decision"
	case p.kind == kindUnclaimed, p.kind == kindUnclaimedReminder:
		return kindInWords(p.action) + " waits, and nobody whom the policy asks has an account"
	}
	return kindInWords(p.action) + " waits for your decision"
}

func plural(n int) string {
	if n == 1 {
		return "1 action"
	}
	return strconv.Itoa(n) + " actions"
}

// outcome returns a sentence about what became of the action of a notice. version is the
// one that the notice was about.
func outcome(a oversight.Action, version int64) string {
	by := ""
	if name, ok := a.Person(); ok {
		by = " by " + defang(name, 80)
	}
	switch a.State {
	case oversight.Pending, oversight.Scheduled:
		if a.Version != version {
			return "It was edited since; the new version has a notice of its own."
		}
	case oversight.Denied:
		switch {
		case by != "":
			return "Rejected" + by + "."
		case a.Lapsed():
			return "Nobody decided in time, so it was denied."
		}
		return "Stopped by policy or by a kill switch."
	case oversight.Cancelled:
		return "It was cancelled before anybody decided."
	case oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown:
		if by != "" {
			return "Approved" + by + "."
		}
		return "Approved by policy."
	}
	return "It still waits."
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }
