package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Kind is a kind of action: an effect on the outside world, or on what an
// agent may do. Its zero value is not valid.
type Kind string

// The kinds of action. To add one, add its constant here and its row to kindRows;
// its executor is a package of its own, which [postern/internal/oversight.Gate]
// is given in cmd. Pages, notices, kill switches and the language of policies
// take it from the row.
const (
	KindSend    Kind = "email.send"
	KindReceive Kind = "email.receive"
	KindArchive Kind = "email.archive"
	KindTrash   Kind = "email.trash"
	KindCopy    Kind = "email.copy"
	KindMode    Kind = "inbox.mode"
	KindAllow   Kind = "inbox.allow"
	KindChange  Kind = "policy.change"
	KindConnect Kind = "net.connect"
	KindWebhook Kind = "webhook.create"
)

// A kindRow is what is known of a kind of action.
type kindRow struct {
	kind    Kind
	means   string // what would happen, for the documentation
	title   string // on pages
	subject string // begins the sentence of a notice
	// detail are the keys of [Request.Detail], the attributes that only this kind has.
	detail []string
	// within is after which time it is denied if no rule says it; 0 means the gate's default.
	within time.Duration
	// personal names, in a verdict, what only a person can decide, whatever a rule
	// says; empty means that rules can. The attack: a rule, written in haste or
	// slipped in, by which an agent raises its own mode or changes what it is judged
	// by.
	personal string
	// undeniable means that no rule may deny it, since that rule could not be
	// changed again.
	undeniable bool
	// unstoppable means that no kill switch is offered for it.
	unstoppable bool
	// byMode says what happens where no rule matches; nil means that a person is asked.
	byMode func(r Request) Verdict
}

// kindRows has a row for every kind, in the order in which pages list them.
var kindRows = []kindRow{
	{
		kind: KindSend, means: "an agent sends mail", title: "Email", subject: "An email",
		byMode: sendByMode,
	},
	{
		kind: KindReceive, means: "mail arrives for an inbox", title: "Email that arrived", subject: "An email that arrived",
		detail: []string{"score"},
		byMode: receiveByMode,
	},
	{
		kind: KindTrash, means: "an agent's tool puts a message into the trash", title: "Message into the trash", subject: "A message that is thrown away",
		detail: []string{"message"},
		byMode: trashByMode,
	},
	{
		kind: KindArchive, means: "an agent's tool puts a message into the archive", title: "Message into the archive", subject: "A message that is put away",
		detail: []string{"message"},
		byMode: archiveByMode,
	},
	{
		kind: KindConnect, means: "code in a sandbox connects to the outside", title: "Connection", subject: "A connection out of a sandbox",
		detail: []string{"host", "port"}, within: time.Hour, // code that waits for its connection does not wait for days
	},
	{
		kind: KindWebhook, means: "an agent has events sent to a URL", title: "Webhook", subject: "A webhook of an agent",
		detail: []string{"url", "host"},
	},
	{
		kind: KindMode, means: "an inbox is put into a mode that watches it less", title: "Change of mode", subject: "A change of how closely an inbox is watched",
		detail: []string{"from", "to"}, personal: "a less closely watched inbox",
	},
	{
		kind: KindAllow, means: "an inbox's allow list gets an entry", title: "Addition to an allow list", subject: "An addition to an allow list",
		detail: []string{"pattern", "until"}, personal: "an addition to an allow list",
	},
	{
		kind: KindChange, means: "another policy takes the place of this one", title: "Change of policy", subject: "A change of the policy",
		detail: []string{"version", "proposer"}, personal: "a change of the policy", undeniable: true,
	},
	{
		kind: KindCopy, means: "overseers get a copy of what a monitored inbox sends", title: "Copy for overseers", subject: "A copy for overseers",
		detail: []string{"of"}, unstoppable: true, byMode: copyByMode,
	},
}

// row returns what is known of k; of a kind that is not known, only its name.
func (k Kind) row() kindRow {
	if i := slices.IndexFunc(kindRows, func(r kindRow) bool { return r.kind == k }); i >= 0 {
		return kindRows[i]
	}
	return kindRow{kind: k}
}

// Kinds returns every kind, in the order in which pages list them.
func Kinds() []Kind {
	out := make([]Kind, len(kindRows))
	for i, r := range kindRows {
		out[i] = r.kind
	}
	return out
}

// JoinKinds returns kinds as a list for people: "email.send, net.connect".
func JoinKinds(kinds []Kind) string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = string(k)
	}
	return strings.Join(names, ", ")
}

// Stoppable returns the kinds for which people are offered a kill switch, in
// the order in which pages list them.
func Stoppable() []Kind {
	return slices.DeleteFunc(Kinds(), func(k Kind) bool { return k.row().unstoppable })
}

// Known reports whether k is one of the kinds.
func (k Kind) Known() bool { return k.row().title != "" }

// Title returns the name of k for pages, "Email"; for a kind that is not known, k.
func (k Kind) Title() string {
	if t := k.row().title; t != "" {
		return t
	}
	return string(k)
}

// Subject returns how a notice names an action of kind k, "An email". It is
// empty for a kind that is not known.
func (k Kind) Subject() string { return k.row().subject }

// Means returns what would happen by an action of kind k, "an agent sends mail".
func (k Kind) Means() string { return k.row().means }

// Detail returns the keys of [Request.Detail] that requests of kind k have.
func (k Kind) Detail() []string { return slices.Clone(k.row().detail) }

// Personal reports whether only a person decides on actions of kind k, whatever
// a rule says. All of these change what agents may do.
func (k Kind) Personal() bool { return k.row().personal != "" }

// askedIn is the verdict of a mode under which a person is asked.
func askedIn(mode Mode, why string) Verdict {
	return Verdict{Effect: Ask, Rule: string(mode), Reason: fmt.Sprintf("the inbox is in mode %s: %s", mode, why)}
}

// allowedIn is the verdict of a mode that lets something go.
func allowedIn(mode Mode, why string) Verdict {
	return Verdict{Effect: Allow, Rule: string(mode), Reason: fmt.Sprintf("the inbox is in mode %s: %s", mode, why)}
}

func sendByMode(r Request) Verdict {
	switch r.Mode {
	case Monitored, Autonomous:
		return allowedIn(r.Mode, "it sends without approval")
	case GatedAll:
		return askedIn(GatedAll, "every send waits for a person")
	case GatedSend:
		if r.Listed && len(r.To) > 0 { // an empty list of recipients is on every list
			return Verdict{Effect: Allow, Rule: string(GatedSend), Reason: "the inbox's allow list has every recipient"}
		}
	case ReadOnly: // denied before any rule is tried
	}
	return askedIn(GatedSend, "every send waits for a person")
}

func receiveByMode(r Request) Verdict {
	if r.Mode.Known() && r.Mode != GatedAll {
		return allowedIn(r.Mode, "mail arrives freely")
	}
	return askedIn(GatedAll, "what arrives waits for a person")
}

func archiveByMode(r Request) Verdict {
	if r.Mode.Known() && r.Mode != GatedAll {
		return Verdict{Effect: Allow, Rule: string(r.Mode), Reason: "what is in the archive is not lost, and nothing leaves"}
	}
	return askedIn(GatedAll, "what is put away waits for a person")
}

func trashByMode(r Request) Verdict {
	if r.Mode == Monitored || r.Mode == Autonomous {
		return allowedIn(r.Mode, "it puts mail into the trash without approval")
	}
	return askedIn(r.Mode, "what is thrown away waits for a person")
}

// copyByMode allows: the copy is the program's own, of mail that was judged
// already. A rule that held it would only keep the overseers from knowing.
func copyByMode(Request) Verdict {
	return Verdict{Effect: Allow, Rule: string(Monitored), Reason: "its overseers get a copy"}
}
